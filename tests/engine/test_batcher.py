"""Group commit: a crowd's calls travel together, one alone goes at once, and failures reach exactly their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bide.engine.batcher import Batcher


async def test_a_crowd_costs_one_call() -> None:
    sent: list[int] = []

    async def send(batch: Sequence[int]) -> list[int]:
        sent.append(len(batch))
        return [number * 2 for number in batch]

    batcher = Batcher(send)
    answers = await asyncio.gather(*(batcher.ask(number) for number in range(1000)))
    assert answers == [number * 2 for number in range(1000)]
    assert sent == [1000]


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


async def test_a_failed_call_fails_its_own_callers_only() -> None:
    async def send(batch: Sequence[int]) -> Sequence[int]:
        if 1 in batch:
            raise OSError("away")
        return batch

    batcher = Batcher(send, limit=2)
    answers = await asyncio.gather(*(batcher.ask(number) for number in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [OSError, OSError, int, int]


async def test_a_caller_that_gives_up_does_not_disturb_the_others() -> None:
    async def send(batch: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0)
        return batch

    batcher = Batcher(send)
    leaving, staying = batcher.ask(1), batcher.ask(2)
    leaving.cancel()
    assert await staying == 2
    await batcher.drain()
    with pytest.raises(asyncio.CancelledError):
        await leaving
