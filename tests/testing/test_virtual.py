"""Virtual time: clocks, the loop, the time machine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from tests.waiting import block, elapse, in_virtual_time

from bide import BadInput, Bide, Dead, Defer, Fixed, Handler, Retry, SetupError, Task
from bide.core.instants import LAST_INSTANT
from bide.ports import Clock
from bide.stores.memory import MemoryStore
from bide.testing import Fired, ManualClock, TimeMachine, VirtualClock, VirtualLoop, run_virtual


@in_virtual_time
async def test_hours_pass_at_once_each_timer_at_its_own_time(loop: VirtualLoop) -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await elapse(seconds)
        woken.append((name, loop.time()))

    await asyncio.gather(sleeper("day", 86_400), sleeper("hour", 3_600), sleeper("now", 0), sleeper("blink", 0.25))
    assert woken == [("now", 0.0), ("blink", 0.25), ("hour", 3_600.0), ("day", 86_400.0)]


def test_it_gives_back_what_the_story_returns_or_raises() -> None:
    async def story(loop: VirtualLoop) -> float:
        await elapse(1)
        return loop.time()

    async def sad(loop: VirtualLoop) -> None:
        raise KeyError("at the end")

    assert run_virtual(story) == 1.0
    with pytest.raises(KeyError, match="at the end"):
        run_virtual(sad)


@in_virtual_time
async def test_time_stands_still_while_a_thread_call_is_outstanding(loop: VirtualLoop) -> None:
    alarm = asyncio.create_task(elapse(0.001))
    await asyncio.to_thread(block, 0.1, why="a call in a thread takes its time")
    assert loop.time() == 0
    assert not alarm.done(), "the thread's answer came first, however long it took"
    await alarm
    assert loop.time() == 0.001


@in_virtual_time
async def test_time_stands_still_where_somebody_holds_it(loop: VirtualLoop) -> None:
    answered = asyncio.Event()
    alarm = asyncio.create_task(elapse(0.001))
    with loop.hold():
        threading.Timer(0.1, loop.call_soon_threadsafe, [answered.set]).start()
        await answered.wait()
        assert not alarm.done()
    await alarm


@in_virtual_time
async def test_two_outstanding_calls_hold_it_until_both_are_back(loop: VirtualLoop) -> None:
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


def test_a_deadlock_is_reported_instead_of_waited_for() -> None:
    async def story(loop: VirtualLoop) -> None:
        await elapse(5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock: every coroutine waits"):
        run_virtual(story)


@in_virtual_time
async def test_a_thread_that_the_loop_knows_nothing_of_may_wake_it_again_and_again(loop: VirtualLoop) -> None:
    """Each of these looks like a deadlock for a moment; together they must not count as one."""
    for _ in range(40):
        answered = asyncio.Event()
        threading.Timer(0.002, loop.call_soon_threadsafe, [answered.set]).start()
        await answered.wait()


@in_virtual_time
async def test_its_clock_reads_the_loop_and_never_says_too_much(loop: VirtualLoop) -> None:
    clock = VirtualClock(loop, start=1_000)
    assert isinstance(clock, Clock)
    assert (clock.now(), clock.seconds_until(1_500), clock.span(7)) == (1_000, 0.5, 7)
    for step in range(1, 200):
        await elapse(0.001)
        assert clock.now() == 1_000 + step, "no millisecond is lost to floating point"


def test_it_moves_when_told_and_only_forward_unless_it_is_set_right_as_real_ones_are() -> None:
    clock = ManualClock(1_000)
    assert clock.now() == clock.now() == 1_000
    assert clock.advance(0) == 1_000
    assert clock.advance(250) == clock.now() == 1_250
    with pytest.raises(ValueError, match="turn_back"):
        clock.advance(-1)
    assert clock.turn_back(400) == clock.now() == 850
    assert clock.turn_back(4_000) == 0, "there is no time before the epoch"
    assert clock.advance(LAST_INSTANT * 2) == LAST_INSTANT


def test_it_says_how_long_to_sleep_and_how_far_it_goes_meanwhile() -> None:
    clock = ManualClock(1_000)
    assert (clock.seconds_until(3_500), clock.seconds_until(500)) == (2.5, -0.5)
    assert clock.span(30_000) == 30_000


@dataclass
class Order:
    number: int


class Shop:
    """An app whose handler ends in whatever way it is told."""

    def __init__(self) -> None:
        self.app = Bide("sqlite:////nowhere/that/exists.db")
        self.seen: list[tuple[str, datetime]] = []
        self.ends: list[BaseException] = []

        @self.app.handler("order.close", retry=Fixed("10s", tries=3))
        async def close(task: Task[Order]) -> None:
            self.seen.append((task.key, self.app.now()))
            if self.ends:
                raise self.ends.pop(0)

        self.close: Handler[Order] = close


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_nothing_fires_before_its_time_and_everything_at_it(shop: Shop) -> None:
    async with TimeMachine(shop.app) as time:
        begin = time.now
        for key, delay in (("c", "3h"), ("a", "1h"), ("b", "2h")):
            await shop.close.schedule(Order(1), key=key, delay=delay)
        assert [task.key for task in await time.waiting()] == ["a", "b", "c"]
        assert await time.advance("59m59s999ms") == []
        fired = await time.advance("1h1ms")
        assert [(one.key, (one.at - begin) / timedelta(hours=1)) for one in fired] == [("a", 1), ("b", 2)]
        assert shop.seen == [(one.key, one.at) for one in fired], "the app's own time is the moved one"
        assert time.now == begin + timedelta(hours=2)
        assert [task.key for task in await time.waiting("order.close")] == ["c"]


async def test_what_a_delivery_tells(shop: Shop) -> None:
    async with TimeMachine(shop.app) as time:
        shop.ends = [OSError("away"), Defer("1m"), Retry("busy", delay="2m"), Dead("hopeless")]
        await shop.close.schedule(Order(42), key="k", delay="0s")
        fired = await time.advance("1d")
        assert [(one.outcome, one.attempt, one.error) for one in fired] == [
            ("retry", 1, "OSError: away"), ("defer", 2, None), ("retry", 2, "busy"), ("dead", 3, "hopeless"),
        ]  # fmt: skip
        assert [round((one.at - fired[0].at).total_seconds()) for one in fired] == [0, 10, 70, 190]
        one = fired[-1]
        assert (one.topic, one.ref, one.payload) == ("order.close", ("order.close", "k"), {"number": 42})
        assert one.record.state == "leased", "the task as the handler had it"
        assert repr(one).startswith("<Fired order.close/k dead at=")
        assert isinstance(one, Fired)


async def test_until_an_instant_and_never_back(shop: Shop) -> None:
    async with TimeMachine(shop.app, start="2030-03-31T00:00:00Z") as time:
        assert time.now == datetime(2030, 3, 31, tzinfo=UTC)
        await shop.close.schedule(Order(1), key="k", at="2030-03-31T08:00:00Z")
        assert await time.advance_to("2030-03-31T07:59:59.999Z") == []
        assert len(await time.advance_to(datetime(2030, 4, 1, tzinfo=UTC))) == 1
        with pytest.raises(BadInput, match="time does not go back"):
            await time.advance_to("2030-03-31T08:00:00Z")
        with pytest.raises(BadInput, match="by"):
            await time.advance("-1s")


async def test_with_nobody_there_what_became_due_is_overdue(shop: Shop) -> None:
    async with TimeMachine(shop.app) as time:
        begin = time.now
        await shop.close.schedule(Order(1), key="k", delay="10m")
        await shop.close.schedule(Order(2), key="too late", delay="10m", deadline="30m")
        await time.pass_unattended("1h")
        assert shop.seen == []
        fired = await time.advance("0s")
        assert sorted((one.key, str(one.outcome)) for one in fired) == [("k", "done"), ("too late", "dead")]
        assert {one.at for one in fired} == {begin + timedelta(hours=1)}
        assert [key for key, _ in shop.seen] == ["k"], "what came too late reached no handler"


@pytest.mark.parametrize("own", [False, True], ids=["under another key", "under its own key"])
async def test_what_a_handler_schedules_fires_in_the_same_advance(*, own: bool) -> None:
    app = Bide("memory:")

    @app.handler("count")
    async def count(task: Task[int]) -> None:
        if task.payload:
            await count.schedule(task.payload - 1, key="k" if own else str(task.payload - 1), delay="1h")

    async with TimeMachine(app) as time:
        await count.schedule(3, key="k", delay="0s")
        fired = await time.advance("3h")
        assert [(one.payload, one.outcome) for one in fired] == [(left, "done") for left in (3, 2, 1, 0)]
        assert [one.settled for one in fired] == [not own] * 3 + [True]


async def test_a_task_that_keeps_itself_due_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.testing.time_machine._MOST", 50)
    app = Bide("memory:")

    @app.handler("spin")
    async def spin(task: Task[None]) -> None:
        raise Defer("0s")

    async with TimeMachine(app) as time:
        await spin.schedule(None, key="k", delay="0s")
        with pytest.raises(RuntimeError, match="keeps itself due"):
            await time.advance("1s")


async def test_the_app_has_its_own_store_and_clock_back_afterwards(shop: Shop) -> None:
    clock = shop.app.clock
    async with TimeMachine(shop.app) as time:
        assert shop.app.clock is not clock
        await shop.close.schedule(Order(1), key="k", delay="1h")
    async with TimeMachine(shop.app) as time:
        assert await time.waiting() == [], "each begins with a store of its own"
    assert shop.app.clock is clock
    with pytest.raises(Exception, match="nowhere"):
        await shop.app.open()


async def test_a_machine_that_is_entered_again_goes_on_and_one_that_is_not_entered_changes_nothing(shop: Shop) -> None:
    clock = shop.app.clock
    machine = TimeMachine(shop.app, start="2030-03-31T00:00:00Z")
    assert shop.app.clock is clock
    async with machine:
        await machine.advance("1h")
    async with machine:
        assert shop.app.now() == datetime(2030, 3, 31, 1, tzinfo=UTC)
        await shop.close.schedule(Order(1), key="k", delay="1h")
        assert [one.key for one in await machine.advance("1h")] == ["k"]
    assert shop.app.clock is clock


@pytest.mark.parametrize("failing", ["open", "declare"])
async def test_a_machine_that_cannot_begin_gives_the_app_back(shop: Shop, failing: str) -> None:
    clock, store = shop.app.clock, MemoryStore()

    async def fail(*of: object) -> None:
        raise OSError("away")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store if failing == "open" else type(shop.app.recurring), failing, fail)
        with pytest.raises(OSError, match="away"):
            await TimeMachine(shop.app, store=store).__aenter__()
    assert shop.app.clock is clock
    with pytest.raises(Exception, match="nowhere"):
        await shop.app.open()


async def test_an_app_that_is_open_is_left_alone() -> None:
    app = Bide("memory:")
    async with app:
        with pytest.raises(SetupError, match="open"):
            async with TimeMachine(app):
                pass
