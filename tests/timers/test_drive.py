"""The drive's own logic, with a clock that stands still until it is told: no test here waits for real time to pass."""

import asyncio
import logging
import threading

import pytest
from tests.waiting import PATIENCE, until, wait_until

from bide.core.instants import Millis
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel, IdleRing, SteadyClock, SystemClock, drive


class HandClock:
    """Shows what it is set to; a sleep until anything ahead ends at once, so that every wake-up comes too early."""

    grain: Millis = 1

    def __init__(self, now: Millis = 1_000_000) -> None:
        self.time = now
        self.asked = 0

    def now(self) -> Millis:
        self.asked += 1
        return self.time

    def seconds_until(self, at: Millis) -> float:
        return 0.0

    def span(self, length: Millis) -> Millis:
        return length


async def looked_again(clock: HandClock, times: int = 5) -> None:
    """The drive has woken so often and read the clock."""
    asked = clock.asked
    await until(lambda: clock.asked >= asked + times, "the drive to look again")


async def test_wake_ups_that_come_early_fire_nothing() -> None:
    clock, fired = HandClock(), list[str]()
    async with drive(HierarchicalWheel[str](), fired.append, clock=clock) as timers:
        timers.add("a", clock.time + 10)
        clock.time += 9
        await looked_again(clock)
        assert fired == []
        clock.time += 1
        await until(lambda: fired == ["a"], "the callback")


def test_wake_ups_that_come_early_fire_nothing_in_a_thread() -> None:
    clock, fired, called = HandClock(), list[str](), threading.Event()

    def callback(item: str) -> None:
        fired.append(item)
        called.set()

    with drive(HierarchicalWheel[str](), callback, clock=clock) as timers:
        timers.add("a", clock.time + 10)
        clock.time += 9
        asked = clock.asked
        wait_until(lambda: clock.asked >= asked + 5, "the drive to look again")
        assert fired == []
        clock.time += 1
        assert called.wait(PATIENCE)


async def test_a_clock_that_is_set_back_fires_nothing_early() -> None:
    clock, fired = HandClock(), list[str]()
    async with drive(HeapTimer[str](), fired.append, clock=clock) as timers:
        await looked_again(clock, 1)
        clock.time -= 5000
        timers.add("a", clock.time + 100)
        await looked_again(clock)
        assert fired == []
        clock.time += 5000
        await until(lambda: fired == ["a"], "the callback")


class SlowClock(HandClock):
    """Says of everything that it is an hour away: as a clock does that is about to be set."""

    def seconds_until(self, at: Millis) -> float:
        return 3600.0


async def test_a_clock_that_is_set_ahead_is_noticed_within_the_longest_sleep() -> None:
    clock, fired = SlowClock(), list[str]()
    async with drive(HierarchicalWheel[str](), fired.append, clock=clock, longest_sleep=0.01) as timers:
        timers.add("a", clock.time + 3_600_000)
        await looked_again(clock, 2)
        assert fired == []
        clock.time += 3_600_000
        await until(lambda: fired == ["a"], "the callback")


async def test_an_earlier_one_added_while_asleep_wakes_it() -> None:
    fired = list[str]()
    async with drive(HashedWheel[str](), fired.append, longest_sleep=3600) as timers:
        timers.add("tomorrow", timers.now() + 86_400_000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        timers.add("now", timers.now())
        await until(lambda: fired == ["now"], "the callback")
        timers.move("tomorrow", timers.now())
        await until(lambda: fired == ["now", "tomorrow"], "the callback")


def test_an_earlier_one_added_while_asleep_wakes_the_thread() -> None:
    called: dict[str, threading.Event] = {"now": threading.Event(), "tomorrow": threading.Event()}
    with drive(HashedWheel[str](), lambda item: called[item].set(), longest_sleep=3600) as timers:
        timers.add("tomorrow", timers.now() + 86_400_000)
        timers.add("now", timers.now())
        assert called["now"].wait(PATIENCE)
        timers.move("tomorrow", timers.now())
        assert called["tomorrow"].wait(PATIENCE)


async def test_what_was_there_before_it_began_fires() -> None:
    timer, fired = HeapTimer[str](), list[str]()
    timer.add("a", 5)
    async with drive(timer, fired.append):
        await until(lambda: fired == ["a"], "the callback")


async def test_an_error_is_logged_and_the_next_one_called(caplog: pytest.LogCaptureFixture) -> None:
    fired = list[int]()

    def callback(item: int) -> None:
        if item == 1:
            raise ZeroDivisionError
        if item == 2:
            raise asyncio.CancelledError
        fired.append(item)

    with caplog.at_level(logging.ERROR):
        async with drive(HeapTimer[int](), callback) as timers:
            for item in range(4):
                timers.add(item, item)
            await until(lambda: fired == [0, 3], "the callback")
    assert [record.getMessage() for record in caplog.records] == [
        "the callback for 1 failed; the drive goes on",
        "the callback for 2 failed; the drive goes on",
    ]


async def test_a_callback_may_cancel_and_move_what_is_due_with_it() -> None:
    fired = list[str]()

    def callback(item: str) -> None:
        fired.append(item)
        if item == "first":
            assert timers.cancel("second")
            assert not timers.cancel("first")
            assert timers.move("third", timers.now() + 86_400_000)
            timers.add("first", 3)

    clock = HandClock()
    async with drive(HierarchicalWheel[str](), callback, clock=clock) as timers:
        for at, item in enumerate(("first", "second", "third", "fourth")):
            timers.add(item, at)
        await until(lambda: len(fired) >= 3, "the callback")
        assert fired[:3] == ["first", "fourth", "first"]
        assert "second" not in timers
        assert "third" in timers


async def test_a_great_burst_lets_others_have_their_turn() -> None:
    fired, turns = list[int](), list[int]()
    async with drive(HierarchicalWheel[int](), fired.append) as timers:
        for item in range(5000):
            timers.add(item, item)
        while len(fired) < 5000:
            turns.append(len(fired))
            await asyncio.sleep(0)
    assert fired == list(range(5000))
    assert len(turns) > 5


async def test_idle_costs_nothing() -> None:
    clock = HandClock()
    async with drive(HeapTimer[str](), print, clock=clock) as timers:
        await looked_again(clock, 1)
        asked = clock.asked
        for _ in range(50):
            await asyncio.sleep(0)
        assert clock.asked == asked
        assert len(timers) == 0


async def test_closed_it_leaves_nothing_and_calls_nobody() -> None:
    loop, fired = asyncio.get_running_loop(), list[str]()
    tasks = asyncio.all_tasks()
    async with drive(HeapTimer[str](), fired.append) as timers:
        timers.add("later", timers.now() + 86_400_000)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == tasks
    timers.close()
    timers.add("now", 0)
    await asyncio.sleep(0)
    assert fired == []
    assert "later" in timers
    scheduled: list[asyncio.TimerHandle] = getattr(loop, "_scheduled", [])
    assert all(handle.cancelled() for handle in scheduled)
    async with timers:
        await until(lambda: fired == ["now"], "the callback")


def test_closed_the_thread_is_gone() -> None:
    before = threading.enumerate()
    with drive(HeapTimer[str](), print) as timers:
        timers.add("later", timers.now() + 86_400_000)
        assert len(threading.enumerate()) == len(before) + 1
    assert threading.enumerate() == before
    timers.close()


def test_closed_by_its_own_callback_in_a_thread() -> None:
    closed = threading.Event()

    def callback(item: str) -> None:
        timers.close()
        closed.set()

    timers = drive(HeapTimer[str](), callback)
    timers.add("a", 0)
    timers.add("b", 0)
    with timers:
        assert closed.wait(PATIENCE)
    assert "b" in timers


async def test_closed_by_its_own_callback_on_a_loop() -> None:
    fired = list[str]()

    def callback(item: str) -> None:
        fired.append(item)
        timers.close()

    async with drive(HeapTimer[str](), callback) as timers:
        timers.add("a", 0)
        timers.add("b", 1)
        await until(lambda: fired == ["a"], "the callback")
        await asyncio.sleep(0)
    assert "b" in timers


async def test_it_runs_once_at_a_time() -> None:
    timers = drive(HeapTimer[str](), print)
    async with timers:
        with pytest.raises(RuntimeError, match="running already"):
            await timers.__aenter__()


async def test_an_idle_ring_on_a_loop() -> None:
    clock, idle = HandClock(0), list[str]()
    async with drive(IdleRing[str](timeout=30_000, tick=1000), idle.append, clock=clock) as ring:
        await looked_again(clock, 1)
        clock.time = 1_000
        ring.touch("a")
        ring.touch("b")
        ring.touch("c")
        assert ring.remove("c")
        assert not ring.remove("c")
        clock.time = 12_000
        ring.touch("a")
        clock.time = 29_999
        await looked_again(clock)
        assert idle == []
        clock.time = 31_000  # if it was touched at the end of the millisecond 1,000, it has been silent for less
        await looked_again(clock)
        assert idle == []
        clock.time = 31_001
        await until(lambda: idle == ["b"], "the callback")
        assert "a" in ring
        clock.time = 42_001
        await until(lambda: idle == ["b", "a"], "the callback")
        assert len(ring) == 0


def test_many_threads_add_and_cancel_at_once() -> None:
    fired = list[tuple[int, int]]()
    cancelled = list[tuple[int, int]]()

    def callback(item: tuple[int, int]) -> None:
        fired.append(item)

    def work(number: int) -> None:
        for count in range(500):
            item = (number, count)
            timers.after(item, count % 5)
            if count % 3 == 0 and timers.cancel(item):
                cancelled.append(item)

    with drive(HierarchicalWheel[tuple[int, int]](start=SystemClock().now()), callback) as timers:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: not len(timers), "the last of them")
    assert not set(fired) & set(cancelled)
    assert len(fired) + len(cancelled) == 8 * 500


def test_what_it_refuses() -> None:
    async def coroutine(item: str) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        drive(HeapTimer[str](), coroutine)
    with pytest.raises(ValueError, match="longest_sleep"):
        drive(HeapTimer[str](), print, longest_sleep=0)


def test_the_clocks() -> None:
    for clock in (SystemClock(), SteadyClock()):
        now = clock.now()
        left = clock.seconds_until(now + 1000)
        passed = (clock.now() + 1 - now) / 1000  # at most, the clock being read in whole milliseconds
        assert 1 - passed - 1e-6 <= left <= 1 + 1e-6
        assert clock.span(1500) == 1500
