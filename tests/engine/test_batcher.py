"""Group commit: a crowd's calls travel together, one alone goes at once, and failures reach exactly their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bide.core.records import NewTask
from bide.engine.session import Batcher
from bide.ports import Pending
from bide.testing.store_suite.base import new


async def test_what_is_asked_during_a_call_goes_with_the_next() -> None:
    sent: list[list[str]] = []
    gate = asyncio.Event()

    async def send(batch: Sequence[str]) -> Sequence[str]:
        sent.append(list(batch))
        await gate.wait()
        return batch

    batcher = Batcher(send, limit=3)
    first = batcher.ask("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = [batcher.ask(letter) for letter in "bcdef"]
    gate.set()
    assert await asyncio.gather(first, *rest) == list("abcdef")
    assert sent == [["a"], ["b", "c", "d"], ["e", "f"]]


async def test_large_payloads_go_in_batches_of_1_mib() -> None:
    """A payload that is no bytes fails in the store, whose error its caller gets; here it must hold up nobody."""
    sent: list[int] = []

    async def send(batch: Sequence[NewTask]) -> Sequence[NewTask]:
        sent.append(len(batch))
        return batch

    batcher = Batcher(send)
    tasks = [new(str(number), payload=bytes(300 * 1024)) for number in range(5)]
    wrong = new("wrong", payload=5)  # type: ignore[arg-type]
    assert await asyncio.gather(*map(batcher.ask, [*tasks, wrong])) == [*tasks, wrong]
    assert sent == [3, 3]


async def test_a_failed_call_fails_its_own_callers_only() -> None:
    async def send(batch: Sequence[int]) -> Sequence[int]:
        if 1 in batch:
            raise OSError("away")
        return batch

    batcher = Batcher(send, limit=2)
    answers = await asyncio.gather(*(batcher.ask(number) for number in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [OSError, OSError, int, int]


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_it_can_be_drained_after_its_task_was_cancelled(steps: int) -> None:
    """As asyncio.run does with every task once: nobody waits for ever, and later calls are answered."""
    gate = asyncio.Event()

    async def send(batch: Sequence[int]) -> Sequence[int]:
        await gate.wait()
        return batch

    batcher = Batcher(send, limit=1)
    asked = [batcher.ask(number) for number in range(3)]
    for _ in range(steps):
        await asyncio.sleep(0)
    assert batcher._task is not None
    batcher._task.cancel()
    gate.set()
    await batcher.drain()
    assert all(one.done() for one in asked)
    assert [one.cancelled() for one in asked] == [steps > 0, False, False]
    assert await batcher.ask(7) == 7


async def test_answers_of_another_number_fail_every_caller() -> None:
    async def send(batch: Sequence[int]) -> Sequence[int]:
        return batch[1:]

    batcher = Batcher(send)
    answers = await asyncio.gather(*(batcher.ask(number) for number in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["2 answers to 3 calls"] * 3


async def test_an_answer_to_come_that_is_cancelled_cancels_its_caller_alone() -> None:
    held_up = Pending[int]()

    async def send(batch: Sequence[int]) -> Sequence[Any]:
        return [held_up, *batch[1:]]

    batcher = Batcher[int, int](send)
    first, second = batcher.ask(1), batcher.ask(2)
    assert await second == 2
    held_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await batcher.drain()
