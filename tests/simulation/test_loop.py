"""The loop of several processes: virtual time, an order by lot, and processes that stand still or die at any await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest

from bide.testing.simulate.loop import Process, SimulatedLoop, current_process, run_simulated

R = TypeVar("R")


def played(main: Callable[[SimulatedLoop], Coroutine[Any, Any, R]], seed: int = 1) -> R:
    return run_simulated(Random(seed), main)


def test_time_passes_only_when_nothing_is_left_to_do() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        times = [loop.time()]
        await asyncio.sleep(3600)
        times.append(loop.time())
        await asyncio.gather(asyncio.sleep(0.5), asyncio.sleep(0.25))
        times.append(loop.time())
        return times

    assert played(main) == [0, 3600, 3600.5]


def test_within_a_process_the_order_is_kept_and_between_processes_it_is_drawn() -> None:
    def order(seed: int) -> str:
        said: list[str] = []

        async def main(loop: SimulatedLoop) -> None:
            one, other = Process(loop, "one"), Process(loop, "other")

            async def say(word: str) -> None:
                said.append(word)

            for process, words in ((one, "abc"), (other, "xyz")):
                for word in words:
                    process.start(say(word))
            await asyncio.sleep(1)

        played(main, seed)
        return "".join(said)

    orders = {order(seed) for seed in range(40)}
    assert len(orders) > 10
    for said in orders:
        assert [word for word in said if word in "abc"] == ["a", "b", "c"]
        assert [word for word in said if word in "xyz"] == ["x", "y", "z"]
    assert order(7) == order(7)


def test_who_stands_still_goes_on_where_it_was_and_finds_that_time_has_passed() -> None:
    async def main(loop: SimulatedLoop) -> list[tuple[str, float]]:
        said: list[tuple[str, float]] = []
        process = Process(loop, "one")

        async def work() -> None:
            while len(said) < 3:
                await asyncio.sleep(1)
                said.append(("step", loop.time()))

        process.start(work())
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(8.5)
        assert len(said) == 1
        process.go_on()
        await asyncio.sleep(5)
        return said

    assert played(main) == [("step", 1.0), ("step", 10.0), ("step", 11.0)]


def test_who_is_killed_takes_no_step_more_and_cleans_nothing_up() -> None:
    said: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        process = Process(loop, "one")

        async def work() -> None:
            try:
                said.append("began")
                await asyncio.sleep(1)
                said.append("went on")
            finally:
                if process.alive:
                    said.append("cleaned up")

        task = process.start(work())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(5)
        assert not task.done()

    played(main)
    assert said == ["began"]


def test_what_a_process_starts_belongs_to_it() -> None:
    async def main(loop: SimulatedLoop) -> list[str]:
        whose: list[str] = []

        async def child() -> None:
            await asyncio.sleep(0.1)
            process = current_process()
            whose.append(process.who if process else "nobody")

        async def parent() -> None:
            await asyncio.gather(child(), asyncio.create_task(child()))

        Process(loop, "one").start(parent())
        await child()
        await asyncio.sleep(1)
        return sorted(whose)

    assert played(main) == ["nobody", "one", "one"]


def test_when_all_wait_for_ever_it_says_so() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="deadlock: every coroutine waits"):
        played(main)


def test_many_timers_that_are_set_and_cancelled_are_forgotten() -> None:
    async def main(loop: SimulatedLoop) -> int:
        for _ in range(5_000):
            loop.call_later(10, lambda: None).cancel()
            await asyncio.sleep(0.001)
        return len(loop._scheduled)

    assert played(main) < 400
