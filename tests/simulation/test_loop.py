"""The loop of several processes: virtual time, an order by lot, and processes that stand still or die at any await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest
from tests.waiting import elapse

from bide_proofs.simulate.loop import Process, SimulatedLoop, run_simulated

R = TypeVar("R")


def played(main: Callable[[SimulatedLoop], Coroutine[Any, Any, R]], seed: int = 1) -> R:
    return run_simulated(Random(seed), main)


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
            await elapse(1)

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
                await elapse(1)
                said.append(("step", loop.time()))

        process.start(work())
        await elapse(1.5)
        process.stop()
        await elapse(8.5)
        assert len(said) == 1
        process.go_on()
        await elapse(5)
        return said

    assert played(main) == [("step", 1.0), ("step", 10.0), ("step", 11.0)]


def test_who_is_killed_takes_no_step_more_and_cleans_nothing_up() -> None:
    said: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        process = Process(loop, "one")

        async def work() -> None:
            try:
                said.append("began")
                await elapse(1)
                said.append("went on")
            finally:
                if process.alive:
                    said.append("cleaned up")

        task = process.start(work())
        await elapse(0.5)
        process.kill()
        await elapse(5)
        assert not task.done()

    played(main)
    assert said == ["began"]


def test_when_all_wait_for_ever_it_says_so() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="deadlock: every coroutine waits"):
        played(main)
