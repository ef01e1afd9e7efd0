"""The drive against the real clock: short timers, none early, on asyncio, on uvloop and in a thread."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.waiting import PATIENCE, not_before, pause, until

from bide.timers import HashedWheel, HierarchicalWheel, IdleRing, SteadyClock, drive

COUNT = 1_000
WITHIN = 250
"""Milliseconds over which the timers are spread: some 4 at every millisecond."""

Run = Callable[[Coroutine[Any, Any, None]], object]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


class Lateness:
    """Notes by how many ms each item came late, by a clock of its own with nanoseconds."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.due: dict[int, int] = {}
        self.late: list[float] = []

    def __call__(self, item: int) -> None:
        self.late.append(time.monotonic_ns() / 1e6 - self.due[item])
        if len(self.late) == COUNT:
            self.finished.set()

    def check(self) -> None:
        assert len(self.late) == COUNT
        not_before(min(self.late), 0, "a timer")


@LOOPS
def test_never_early_on_a_loop(run: Run) -> None:
    choose, lateness = random.Random(4), Lateness()

    async def main() -> None:
        async with drive(HierarchicalWheel[int](), lateness, clock=SteadyClock()) as timers:
            begin = timers.now()
            for item in range(COUNT):
                lateness.due[item] = begin + choose.randrange(WITHIN)
                timers.add(item, lateness.due[item])
                if item % 100 == 0:
                    await pause(0.01, why="some are added while others fire")
            await until(lateness.finished.is_set, "all timers to fire")

    run(main())
    lateness.check()


def test_never_early_in_a_thread() -> None:
    choose, lateness = random.Random(5), Lateness()
    with drive(HierarchicalWheel[int](), lateness, clock=SteadyClock()) as timers:
        begin = timers.now()
        for item in range(COUNT):
            lateness.due[item] = begin + choose.randrange(WITHIN)
            timers.add(item, lateness.due[item])
        assert lateness.finished.wait(PATIENCE)
    lateness.check()


@LOOPS
def test_one_short_timer_after_the_other(run: Run) -> None:
    """Each is added while the drive sleeps for nothing or for something later, and uvloop's clock lags behind."""
    early = list[float]()

    async def main() -> None:
        fired = asyncio.Event()

        def callback(due: int) -> None:
            if due < 10**15:
                early.append(time.monotonic_ns() / 1e6 - due)
                fired.set()

        async with drive(HierarchicalWheel[int](), callback, clock=SteadyClock()) as timers:
            for count in range(100):
                due = timers.now() + 1 + count % 4
                timers.add(due, due)
                await fired.wait()
                fired.clear()

    run(main())
    assert len(early) == 100
    not_before(min(early), 0, "a timer")


@LOOPS
def test_after_is_never_short(run: Run) -> None:
    lengths = list[float]()

    async def main() -> None:
        fired = asyncio.Event()
        async with drive(HashedWheel[str](), lambda item: fired.set()) as timers:
            for _ in range(50):
                begin = time.time_ns()
                timers.after("a", 2)
                await fired.wait()
                lengths.append((time.time_ns() - begin) / 1e6)
                fired.clear()

    run(main())
    not_before(min(lengths), 2, "the end of 2 ms")


@LOOPS
def test_an_idle_ring_is_never_early(run: Run) -> None:
    clock, last, silent = SteadyClock(), dict[int, int](), dict[int, int]()  # in nanoseconds: a clock of ms hides some

    async def main() -> None:
        all_silent = asyncio.Event()

        def idle(uid: int) -> None:
            silent[uid] = time.monotonic_ns() - last[uid]
            if len(silent) == 400:
                all_silent.set()

        async with drive(IdleRing[int](timeout=100, tick=20), idle, clock=clock) as ring:
            for turn in range(20):
                for uid in range(turn * 20, 400):
                    last[uid] = time.monotonic_ns()
                    ring.touch(uid)
                await pause(0.01, why="each is heard from again and again")
            await all_silent.wait()

    run(main())
    assert len(silent) == 400
    not_before(min(silent.values()), 100_000_000, "the end of 100 ms of silence")
