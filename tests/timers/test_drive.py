"""A thread or loop that sleeps until the next time: alone, in real time, idle."""

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import PATIENCE, not_before, pause, until, wait_until

from bide.core.instants import Millis
from bide.ports import Timer
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


@pytest.mark.parametrize("timer", [HierarchicalWheel, HashedWheel, HeapTimer])
async def test_a_time_that_is_no_whole_number_is_refused_and_harms_no_other(timer: Callable[[], Timer[str]]) -> None:
    clock, fired = HandClock(), list[str]()
    async with drive(timer(), fired.append, clock=clock) as timers:
        timers.after("moved", 5)
        for at in (500.0, math.nan, "noon", None):
            with pytest.raises(TypeError):
                timers.after("a", at)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                timers.move("moved", at)  # type: ignore[arg-type]
        assert ("a" in timers, len(timers)) == (False, 1)
        clock.time += 10
        await until(lambda: fired == ["moved"], "the callback")


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
        if error := {1: ZeroDivisionError, 2: asyncio.CancelledError}.get(item):
            raise error
        fired.append(item)

    async with drive(HeapTimer[int](), callback) as timers:
        for item in range(4):
            timers.add(item, item)
        await until(lambda: fired == [0, 3], "the callback")
    said = "the callback for {} failed; the drive goes on"
    assert [record.getMessage() for record in caplog.records] == [said.format(1), said.format(2)]


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


STEP = st.tuples(
    st.sampled_from(["touch", "touch", "touch", "remove", "advance"]), st.integers(0, 5), st.integers(-3, 40)
)


@pytest.mark.parametrize(("timeout", "tick"), [(0, 1), (1, 0), (-5, 10)])
def test_timeout_and_tick_are_positive(timeout: int, tick: int) -> None:
    with pytest.raises(ValueError, match="1 ms or more"):
        IdleRing[str](timeout=timeout, tick=tick)


def test_no_deadline_of_a_slot_that_is_or_became_empty() -> None:
    ring = IdleRing[str](timeout=30, tick=10)
    assert (len(ring), "a" in ring, ring.next_deadline(), ring.remove("a")) == (0, False, None, False)
    ring.touch("a", 0)
    ring.touch("b", 15)
    ring.remove("a")
    assert ring.next_deadline() == 50


def test_a_hundred_thousand_chatty_ones_are_put_forward_once_per_timeout() -> None:
    """What makes a touch cheap: the hand moves a uid, not the packet."""
    ring = IdleRing[int](timeout=30_000, tick=1000)
    for uid in range(1000):
        ring.touch(uid, 0)
    for now in range(0, 300_000, 500):
        for uid in range(0, 1000, 7):
            ring.touch(uid, now)
        ring.advance(now)
    assert len(ring) == len(range(0, 1000, 7))
    assert len(ring._slots) <= 32


@given(timeout=st.integers(1, 60), tick=st.integers(1, 25), steps=st.lists(STEP, max_size=80))
def test_never_early_and_at_most_a_tick_late(timeout: int, tick: int, steps: list[tuple[str, int, int]]) -> None:
    ring = IdleRing[int](timeout=timeout, tick=tick)
    last: dict[int, int] = {}
    now = latest = 1000
    ring.advance(now)
    for verb, uid, gap in steps:
        now = latest + gap
        latest = max(latest, now)
        if verb == "touch":
            ring.touch(uid, now)
            last[uid] = latest
        elif verb == "remove":
            assert ring.remove(uid) == (last.pop(uid, None) is not None)
        else:
            idle = ring.advance(now)
            assert [last[uid] for uid in idle] == sorted(last[uid] for uid in idle)
            for uid in idle:
                assert last.pop(uid) + timeout <= latest
            assert all(heard + timeout + tick > latest for heard in last.values())
        assert len(ring) == len(last)
        deadline = ring.next_deadline()
        assert (deadline is None) == (not last)
        if deadline is not None:
            # by then whoever is idle can be told within a tick
            assert deadline < min(last.values()) + timeout + tick


COUNT = 1_000
WITHIN = 250
"""Milliseconds over which the timers are spread: some 4 at every millisecond."""

Run = Callable[[Coroutine[Any, Any, None]], object]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@LOOPS
def test_never_early_on_a_loop(run: Run) -> None:
    """By a clock with nanoseconds: uvloop's timers fire before their time."""
    choose, due, late = random.Random(4), dict[int, int](), list[float]()

    async def main() -> None:
        def callback(item: int) -> None:
            late.append(time.monotonic_ns() / 1e6 - due[item])

        async with drive(HierarchicalWheel[int](), callback, clock=SteadyClock()) as timers:
            begin = timers.now()
            for item in range(COUNT):
                due[item] = begin + choose.randrange(WITHIN)
                timers.add(item, due[item])
                if item % 100 == 0:
                    await pause(0.01, why="some are added while others fire")
            await until(lambda: len(late) == COUNT, "all timers to fire")

    run(main())
    not_before(min(late), 0, "a timer")


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
