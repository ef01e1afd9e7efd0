"""Wake-ups: told, missed and planned, and by which clock; none is early.

Timers fire early: uvloop's by up to 1.2 ms, four times out of ten. So the first line of each handler reads the clock in
nanoseconds, and hundreds of short delays leave no room for luck.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import World, virtual
from tests.waiting import PATIENCE, block, elapse, not_before, pause

from bide import BadInput, Bide, ScaledClock, SystemClock, Task
from bide.core.records import Record, Settlement
from bide.core.retry import policy
from bide.engine.delivery.lease_loop import DescriptorAlarm, LoopAlarm, Waker, new_alarm
from bide.engine.delivery.long_poll import LongPoll
from bide.ports import Policy
from bide.testing.virtual import VirtualLoop, run_virtual


@virtual
async def test_a_notification_an_alarm_and_the_cap_are_told_apart(world: World) -> None:
    app = world.app(max_sleep="5s")
    post = world.noted(app, "post")
    async with app:
        await post.handler.schedule(None, key="known", delay="2s")
        async with app.worker() as worker:
            await world.until(lambda: len(post.at) == 1)
            assert (worker.wakes.by_alarm, worker.wakes.by_notification, worker.wakes.by_cap) == (1, 0, 0)
            await post.handler.schedule(None, key="told", delay="3s")
            await world.until(lambda: len(post.at) == 2)
            assert (worker.wakes.by_alarm, worker.wakes.by_notification, worker.wakes.by_cap) == (1, 1, 0)
            assert worker.wakes.notifications == 1
            assert worker.wakes.heard_at is not None
            await world.pause(25)
            assert (worker.wakes.by_alarm, worker.wakes.by_notification) == (1, 1)
            assert worker.wakes.by_cap in (4, 5)
            assert worker.wakes.missed == 0


@virtual
async def test_what_was_due_during_a_whole_sleep_was_missed(world: World) -> None:
    world.store.deaf = True
    app = world.app(max_sleep="10s")
    post = world.noted(app, "post")
    async with app, app.worker() as worker:
        await world.pause(1)
        await post.handler.schedule(None, key="a", delay="2s")
        await world.until(lambda: len(post.at) == 1)
        assert post.at == [10_000]
        assert worker.wakes.missed == 1
        assert worker.wakes.notifications == 0
        await world.pause(20)
        assert worker.wakes.missed == 1


@virtual
async def test_the_desk_counts_its_sleeps_too(world: World) -> None:
    world.store.deaf = True
    app = world.app(max_sleep="10s")
    async with app:
        long_poll = LongPoll(app, policy_of=lambda _: Policy(policy(None)))
        await long_poll.start()
        leasing = asyncio.ensure_future(long_poll.lease({"post": 1}, holder="me", lease_for=10_000, wait=60))
        await world.pause(1)
        await app.schedule("post", key="a", delay="2s")
        assert [record.key for record in await leasing] == ["a"]
        assert (long_poll.wakes.by_cap, long_poll.wakes.missed) == (1, 1)
        await long_poll.close()


@virtual
async def test_the_longest_sleep_counts_from_the_question_and_not_from_its_answer(world: World) -> None:
    """What was added in between, and wakes just beyond the cap from then, was told to nobody."""
    loop = asyncio.get_running_loop()
    waker = Waker(world.app().clock, 1_000)
    for answer_takes in (0.0, 0.4, 3.0):
        asked_at = loop.time()
        waker.forget()
        await elapse(answer_takes)
        await waker.sleep(None)
        assert loop.time() - asked_at == max(1.0, answer_takes)
    began = loop.time()
    await waker.sleep(None)
    assert loop.time() - began == 1.0, "nothing was asked since the last sleep"
    waker.close()


Alarm = LoopAlarm | DescriptorAlarm
Kind = Callable[[Callable[[], None]], Alarm]
KINDS = pytest.mark.parametrize("kind", [DescriptorAlarm, LoopAlarm])


class Bell:
    """Counts, and lets a test wait for the next time."""

    def __init__(self) -> None:
        self.rung: list[float] = []
        self._heard = asyncio.Event()

    def ring(self) -> None:
        self.rung.append(time.monotonic())
        self._heard.set()

    async def heard(self) -> float:
        self._heard.clear()
        async with asyncio.timeout(PATIENCE):
            await self._heard.wait()
        return self.rung[-1]


@KINDS
async def test_it_rings_once_and_not_much_too_early_and_what_it_was_set_to_last_counts(kind: Kind) -> None:
    bell = Bell()
    alarm = kind(bell.ring)
    try:
        for before, seconds in ((3600, 0.0), (3600, 0.0004), (0.001, 0.05)):
            set_at = time.monotonic()
            alarm.set(before)
            alarm.set(seconds)
            not_before(await bell.heard(), set_at + seconds - 0.002, "the alarm")
        await pause(0.01, why="an alarm that rings twice would do it now")
        assert len(bell.rung) == 3
    finally:
        alarm.close()


@KINDS
async def test_a_closed_one_is_silent_and_leaves_nothing_open(kind: Kind) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    alarm = kind(bell.ring)
    alarm.set(0.001)
    alarm.close()
    alarm.close()
    await pause(0.01, why="it would have rung by now")
    assert bell.rung == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("factory", ["asyncio", "uvloop"])
def test_any_loop_of_real_time_has_the_fine_one(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bide.engine.delivery.lease_loop._OWN_TIME", PATIENCE
    )  # what two looks at the time may lie apart
    make = asyncio.new_event_loop if factory == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def kind() -> type[Alarm]:
        alarm = new_alarm(lambda: None)
        alarm.close()
        return type(alarm)

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(kind()) is DescriptorAlarm


def test_a_loop_with_a_time_of_its_own_is_asked_for_its_own() -> None:
    async def main(loop: VirtualLoop) -> float:
        bell = Bell()
        alarm = new_alarm(bell.ring)
        assert isinstance(alarm, LoopAlarm)
        alarm.set(3)
        await bell.heard()
        return loop.time()

    assert run_virtual(main) == pytest.approx(3)


class Poor:
    """The C library of another system."""


class Full:
    """A system without descriptors to spare."""

    @staticmethod
    def timerfd_create(*_: int) -> int:
        ctypes.set_errno(24)
        return -1


@pytest.mark.parametrize("library", [Poor, Full])
async def test_without_such_timers_the_loop_does_it(library: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library())
    assert isinstance(new_alarm(lambda: None), LoopAlarm)


def test_the_machines_clock_is_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.ports.time.time.time_ns", lambda: 1_800_000_000_000_999_999)
    assert SystemClock().now() == 1_800_000_000_000
    assert SystemClock().span(30_000) == 30_000


def test_it_begins_now_and_runs_as_fast_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 1_800_000_000.0
    monkeypatch.setattr("bide.ports.time.time.time", lambda: seconds)
    clock = ScaledClock(3600)
    begin = clock.now()
    assert begin == 1_800_000_000_000
    seconds += 1.5
    assert clock.now() - begin == 5_400_000
    assert clock.seconds_until(begin + 2 * 3_600_000) == pytest.approx(0.5)
    assert clock.seconds_until(begin) == pytest.approx(-1.5)


def test_only_what_is_planned_is_fast_a_length_of_real_time_is_a_long_way() -> None:
    assert ScaledClock(3600).span(10_000) == 36_000_000
    assert ScaledClock(0.5).span(10_000) == 5_000


def test_a_sleep_until_then_is_over_when_the_clock_says_so() -> None:
    clock = ScaledClock(1_000)
    for ahead in (1, 500, 3_000):
        at = clock.now() + ahead
        block(max(0.0, clock.seconds_until(at)), why="the length of this sleep is what is tested")
        assert clock.seconds_until(at) <= 0
        assert clock.now() >= at


@pytest.mark.parametrize("speed", [0, -1, 1_000_001, float("nan")])
def test_a_speed_is_within_reason(speed: float) -> None:
    with pytest.raises(BadInput, match="speed"):
        ScaledClock(speed)


async def test_on_a_fast_clock_a_lease_lasts_as_long_as_ever() -> None:
    """Ten minutes of the story pass while the handler runs: its lease of one minute must not have ended."""
    app = Bide("memory:", clock=ScaledClock(6_000), lease="1m")
    attempts: list[int] = []

    @app.handler("slow", timeout="1m")
    def slow(task: Task[Any]) -> None:
        attempts.append(task.attempt)
        block(0.1, why="ten minutes of the story are to pass")

    ended = asyncio.Event()

    def end(record: Record, outcome: Settlement) -> None:
        ended.set()

    async with app, app.worker(observe=end) as first, app.worker(observe=end) as second:
        before = app.now()
        await slow.schedule(None, key="k", delay="1m")
        await ended.wait()
        assert (app.now() - before).total_seconds() >= 600
    assert attempts == [1]
    assert first.stats.lost + second.stats.lost == 0


WAVE = 50
MICROSECOND = timedelta(microseconds=1)
MILLISECOND = 1_000_000
"""In nanoseconds."""


def uvloop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop}
TIMERS = {"memory": 2_000, "threads": 300, "a file": 500, "a server": 500}
"""Short timers in each place."""


async def late_by(url: str, timers: int, *, threads: bool = False) -> list[int]:
    """Nanoseconds from when it may start to the first line of the handler, of so many short timers."""
    app, chance = Bide(url), random.Random(7)
    asked: dict[str, int] = {}
    late: list[int] = []

    def note(task: Task[Any]) -> None:
        late.append(time.time_ns() - max(task.record.planned_at * MILLISECOND, asked[task.key]))

    if threads:

        @app.handler("tick")
        def ticks(task: Task[Any]) -> None:
            note(task)
    else:

        @app.handler("tick")
        async def tick(task: Task[Any]) -> None:
            note(task)

    async with app, app.worker() as worker:
        for _ in range(timers // WAVE):
            tasks = []
            for _ in range(WAVE):
                delay = timedelta(milliseconds=chance.uniform(1, 50))
                tasks.append(app.new("tick", delay=delay))
                asked[tasks[-1].key] = time.time_ns() + delay // MICROSECOND * 1_000
            await app.schedule_many(tasks)
            await pause(chance.uniform(0, 0.02), why="the waves come at any part of a millisecond")
        await worker.until_empty()
    return late


@pytest.mark.parametrize(("where", "loop"), [("memory", "asyncio"), *((where, "uvloop") for where in TIMERS)])
def test_no_handler_starts_early(request: pytest.FixtureRequest, tmp_path: Path, where: str, loop: str) -> None:
    """The server's clock is this machine's, so that what it calls due can be compared."""
    url = f"sqlite:///{tmp_path}/ticks.db" if where == "a file" else "memory:"
    if where == "a server":
        server, name = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_namespace")
        url = f"{server}?namespace={name}"
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        late = runner.run(late_by(url, TIMERS[where], threads=where == "threads"))
    assert len(late) == TIMERS[where]
    not_before(min(late), 0, f"one of {sum(one < 0 for one in late)} handlers, by nanoseconds,")
