"""The virtual loop: time jumps when nothing else is left to do, and only then."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.waiting import block, elapse

from bide.ports import Clock
from bide.testing import VirtualClock, VirtualLoop, run_virtual


def test_hours_pass_at_once_each_timer_at_its_own_time() -> None:
    async def story(loop: VirtualLoop) -> None:
        woken: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await elapse(seconds)
            woken.append((name, loop.time()))

        await asyncio.gather(sleeper("day", 86_400), sleeper("hour", 3_600), sleeper("now", 0), sleeper("blink", 0.25))
        assert woken == [("now", 0.0), ("blink", 0.25), ("hour", 3_600.0), ("day", 86_400.0)]

    run_virtual(story)


def test_it_gives_back_what_the_story_returns_or_raises() -> None:
    async def story(loop: VirtualLoop) -> float:
        await elapse(1)
        return loop.time()

    async def sad(loop: VirtualLoop) -> None:
        raise KeyError("at the end")

    assert run_virtual(story) == 1.0
    with pytest.raises(KeyError, match="at the end"):
        run_virtual(sad)


def test_time_outs_are_virtual_too() -> None:
    async def story(loop: VirtualLoop) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        assert loop.time() == 600

    run_virtual(story)


def test_time_stands_still_while_work_is_ready() -> None:
    async def story(loop: VirtualLoop) -> None:
        alarm = asyncio.create_task(elapse(1))
        for _ in range(1_000):
            await asyncio.sleep(0)
            assert loop.time() == 0
        await alarm
        assert loop.time() == 1

    run_virtual(story)


def test_time_stands_still_while_a_thread_call_is_outstanding() -> None:
    async def story(loop: VirtualLoop) -> None:
        alarm = asyncio.create_task(elapse(0.001))
        await asyncio.to_thread(block, 0.1, why="a call in a thread takes its time")
        assert loop.time() == 0
        assert not alarm.done(), "the thread's answer came first, however long it took"
        await alarm
        assert loop.time() == 0.001

    run_virtual(story)


def test_time_stands_still_where_somebody_holds_it() -> None:
    async def story(loop: VirtualLoop) -> None:
        answered = asyncio.Event()
        alarm = asyncio.create_task(elapse(0.001))
        with loop.hold():
            threading.Timer(0.1, loop.call_soon_threadsafe, [answered.set]).start()
            await answered.wait()
            assert not alarm.done()
        await alarm

    run_virtual(story)


def test_two_outstanding_calls_hold_it_until_both_are_back() -> None:
    async def story(loop: VirtualLoop) -> None:
        alarm = asyncio.create_task(elapse(0.001))
        gate = threading.Event()
        slow = loop.run_in_executor(None, gate.wait)
        await loop.run_in_executor(None, str)
        for _ in range(100):
            await asyncio.sleep(0)
            assert not alarm.done()
        gate.set()
        await slow
        assert not alarm.done()

    run_virtual(story)


def test_a_deadlock_is_reported_instead_of_waited_for() -> None:
    async def story(loop: VirtualLoop) -> None:
        await elapse(5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock: every coroutine waits"):
        run_virtual(story)


def test_a_thread_that_the_loop_knows_nothing_of_may_wake_it_again_and_again() -> None:
    """Each of these looks like a deadlock for a moment; together they must not count as one."""

    async def story(loop: VirtualLoop) -> None:
        for _ in range(40):
            answered = asyncio.Event()
            threading.Timer(0.002, loop.call_soon_threadsafe, [answered.set]).start()
            await answered.wait()

    run_virtual(story)


def test_its_clock_reads_the_loop_and_never_says_too_much() -> None:
    async def story(loop: VirtualLoop) -> None:
        clock = VirtualClock(loop, start=1_000)
        assert isinstance(clock, Clock)
        assert (clock.now(), clock.seconds_until(1_500), clock.span(7)) == (1_000, 0.5, 7)
        for step in range(1, 200):
            await elapse(0.001)
            assert clock.now() == 1_000 + step, "no millisecond is lost to floating point"

    run_virtual(story)
