"""The overview: right numbers, for whoever may see what, at a small and bounded cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, stores, virtual
from tests.waiting import elapse, in_virtual_time

from bide import Bide, StoreUnavailable
from bide.core.records import Count, Filter, Found, OutcomeKind, Page, Settlement, Tally
from bide.engine.history import MINUTE, DeliveryCounts, History, rows_between, together
from bide.engine.pauses import Pauses
from bide.engine.registry import WakeChannel
from bide.insight.minute_log import MINUTES, Flow, Throughput
from bide.insight.overview import Overview, Overviews
from bide.ports import COUNTED, Wakes
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualClock, VirtualLoop


class Stopping(MemoryStore):
    """Stops counting as stores do that walk an index: at so many, unless more is asked for."""

    def __init__(self, stops: int) -> None:
        super().__init__()
        self.stops = stops
        self.asked: list[int] = []

    async def tally(
        self, edges: Sequence[int] | None = None, *, upto: int = COUNTED, topics: Collection[str] | None = None
    ) -> Tally:
        found = await super().tally(edges, topics=topics)
        most = self.stops if upto == COUNTED else upto
        self.asked.append(upto)
        return Tally(
            {of: _cut(count, self.stops) for of, count in found.counts.items()},
            {topic: [_cut(count, most) for count in counts] for topic, counts in found.forecast.items()},
        )


def _cut(count: Count, most: int) -> Count:
    return Count(min(count.number, most), count.number <= most)


@asynccontextmanager
async def looking(app: Bide) -> AsyncIterator[Overviews]:
    overviews = Overviews(app)
    yield overviews
    await overviews.close()


async def overview(app: Bide) -> Overview:
    async with looking(app) as overviews:
        return (await overviews.get()).overview()


async def fill(app: Bide, topic: str, number: int, delay: str) -> None:
    await app.schedule_many([app.new(topic, None, delay=delay) for _ in range(number)])


async def busy(app: Bide) -> None:
    """Some of everything."""
    await fill(app, "later", 7, "1h")
    await fill(app, "due", 3, "0s")
    await fill(app, "held", 4, "0s")
    await fill(app, "broken", 2, "0s")
    now = app.clock.now()
    dead = await app.store.lease({"broken": 2}, now=now, until=now + 10_000, holder="w1")
    told = [
        Settlement(one.topic, one.key, one.token, OutcomeKind.DEAD, keep_until=now + 10**6, error="x")
        for one in dead.tasks
    ]
    assert await app.store.settle(told, now=now) == [True, True]
    await app.store.lease({"held": 3}, now=now, until=now + 600_000, holder="w1")
    await app.store.lease({"held": 1}, now=now, until=now + 600_000, holder="c1@service")
    await app.store.announce("w1", ["held", "broken"], now + 600_000, now=now)  # type: ignore[attr-defined]
    await Pauses(app.store, app.clock).pause("held", who="anna")


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_what_there_is(store_url: str) -> None:
    async with Bide(store_url) as app:
        assert (await overview(app)).empty
        began = app.clock.now()
        await busy(app)
        async with looking(app) as overviews:
            seen = await overviews.get()
        ended = app.clock.now()
    all_of_it = seen.overview()
    assert all_of_it.pending.count == Count(10)
    assert all_of_it.due.count == Count(3)
    assert all_of_it.leased == Count(4)
    assert all_of_it.dead == Count(2)
    assert not all_of_it.empty
    assert all_of_it.oldest_due is not None
    assert all_of_it.oldest_due[0] == "due"
    assert began - 1_000 <= all_of_it.oldest_due[1] <= ended
    assert [(one.topic, one.due.count.number, one.workers) for one in all_of_it.topics] == [
        ("due", 3, []), ("later", 0, []), ("broken", 0, ["w1"]), ("held", 0, ["w1"]),
    ]  # fmt: skip
    [worker, consumer] = all_of_it.holders
    assert (worker.name, worker.announced, set(worker.topics)) == ("w1", True, {"held", "broken"})
    assert (worker.number, worker.lost) == (3, 0)
    assert (consumer.name, consumer.announced, consumer.topics, consumer.number) == ("c1@service", False, (), 1)
    assert (all_of_it.holders_known, all_of_it.holding_whole) == (True, True)
    [pause] = [one.pause for one in all_of_it.topics if one.pause is not None]
    assert (pause.topic, pause.who) == ("held", "anna")
    assert all_of_it.held_back == []

    some = seen.overview(lambda topic: topic == "due")
    assert (some.pending.count, some.due.count, some.leased, some.dead) == (Count(3), Count(3), Count(0), Count(0))
    assert [one.topic for one in some.topics] == ["due"]
    assert list(some.holders) == []
    none = seen.overview(lambda topic: False)
    assert none.empty
    assert none.oldest_due is None


async def test_who_looks_on_is_no_worker() -> None:
    async with Bide("memory:") as app, looking(app) as one, looking(app) as other:
        await one.get()
        assert not (await other.get()).overview().holders


@virtual
async def test_leases_that_have_run_out_are_lost(world: World) -> None:
    async with world.app() as app:
        await fill(app, "a", 5, "0s")
        now = world.clock.now()
        await app.store.lease({"a": 3}, now=now, until=now + 1_000, holder="dies")
        await app.store.lease({"a": 2}, now=now, until=now + 60_000, holder="lives")
        await world.pause(1.0)
        found = {one.name: (one.number, one.lost, one.announced) for one in (await overview(app)).holders}
        assert found == {"dies": (3, 3, False), "lives": (2, 0, False)}


@virtual
async def test_topics_on_which_nobody_works(world: World) -> None:
    async with world.app() as app:
        for topic in ("alone", "paused", "worked", "consumed", "held"):
            await app.schedule(topic, None, delay="0s")
        await app.schedule("ahead", None, delay="1h")
        await world.pause(4.0)
        assert not (await overview(app)).unworked, "somebody may come for it yet"
        await world.pause(2.0)
        await Pauses(app.store, app.clock).pause("paused")
        now = world.clock.now()
        await world.memory.announce("w", ["worked"], now + 5_000, now=now)
        await fill(app, "held", 1, "0s")
        await app.store.lease({"held": 1}, now=now, until=now + 60_000, holder="c")
        app.history.began("consumed", [now], now)
        await app.history.flush()
        seen = await overview(app)
        assert [one.topic for one in seen.unworked] == ["alone"]
        assert [one.topic for one in seen.held_back] == ["paused"]


# --- counts that stop


@virtual
async def test_where_a_count_stopped_an_exact_one_is_shown_with_its_age(world: World) -> None:
    store = Stopping(10)
    faulty = FaultyStore(store)
    async with Bide(faulty, clock=world.clock) as app, looking(app) as overviews:
        await fill(app, "big", 1_234, "1h")
        await fill(app, "due", 30, "0s")
        await fill(app, "small", 5, "1h")
        seen = (await overviews.get()).overview()
        assert (seen.pending.count, seen.due.count) == (Count(1_269), Count(30))
        assert world.clock.now() - seen.pending.at < 100
        began = world.clock.now()
        await fill(app, "big", 1, "1h")
        faulty.latency = lambda name: 0.02 if name == "tally" else 0.0
        await world.pause(2.0)
        seen = (await overviews.get()).overview()
        assert seen.pending.count == Count(1_269), "older, and better than ten and more"
        assert world.clock.now() - seen.pending.at >= 2_000
        while seen.pending.count != Count(1_270):
            await world.pause(2.0)
            seen = (await overviews.get()).overview()
            assert world.clock.now() - began < 60_000
        assert seen.pending.count.exact


@virtual
async def test_what_costs_is_asked_seldom(world: World) -> None:
    store = Stopping(10)
    faulty = FaultyStore(store)
    async with Bide(faulty, clock=world.clock) as app, looking(app) as overviews:
        await fill(app, "big", 100, "1h")
        faulty.latency = lambda name: 0.05 if name == "tally" else 0.0
        ends = world.clock.now() + 60_000
        while world.clock.now() < ends:
            await asyncio.gather(*(overviews.get() for _ in range(10)))
            await world.pause(2.0)
        exact = sum(upto != COUNTED for upto in store.asked)
        assert 4 <= len(store.asked) - exact <= 6, "50 ms at most for 0.3 % of the time, but for the second look"
        assert 3 <= exact <= 5, "and 0.2 %"
        assert faulty.calls["announce"] >= 25, "what is cheap stays fresh"


@virtual
async def test_one_that_stumbles_is_not_put_off(world: World) -> None:
    faulty = FaultyStore(MemoryStore())
    slow = [0.001] * 5 + [1.0] + [0.001] * 4
    async with Bide(faulty, clock=world.clock) as app, looking(app) as overviews:
        faulty.latency = lambda name: slow.pop(0) if name == "tally" else 0.0
        for number in range(10):
            await app.schedule("a", None, delay="1h")
            await world.pause(2.0)
            assert (await overviews.get()).overview().pending.count == Count(number + 1)


@virtual
async def test_an_exact_count_that_takes_long_is_bounded(world: World) -> None:
    store = Stopping(10)
    faulty = FaultyStore(store)
    async with Bide(faulty, clock=world.clock) as app, looking(app) as overviews:
        await fill(app, "big", 100, "1h")
        faulty.latency = lambda name: 0.001 if not store.asked or name != "tally" else 0.4
        before = world.clock.now()
        seen = (await overviews.get()).overview()
        assert seen.pending.count == Count(10, False), "nobody waits for it"
        assert world.clock.now() - before <= 200
        await world.pause(1.0)
        assert (await overviews.get()).overview().pending.count == Count(100)
        first = max(store.asked)
        await world.pause(600.0)
        await overviews.get()
        await world.pause(1.0)
        assert max(upto for upto in store.asked[2:] if upto != COUNTED) == first // 4


async def test_a_store_that_is_away_is_said_and_comes_back() -> None:
    store = FaultyStore(MemoryStore())
    async with Bide(store) as app, looking(app) as overviews:
        store.fault = lambda point: StoreUnavailable("away") if point.endswith(":before") else None
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await overviews.get()
        store.fault = lambda _: None
        assert (await overviews.get()).overview().empty


# --- what went through


class Told:
    """Somebody who writes the history."""

    def __init__(self, app: Bide) -> None:
        self._history = History(app.store, app.clock)
        self._clock = app.clock

    async def deliver(
        self, number: int, *, topic: str = "a", late: int = 3, outcome: OutcomeKind = OutcomeKind.DONE
    ) -> None:
        now = self._clock.now()
        self._history.scheduled(number)
        self._history.began(topic, [now - late] * number, now)
        for _ in range(number):
            self._history.ended(topic, outcome)
        await self._history.flush()


def figures(flow: Flow) -> tuple[int, int, int | None]:
    return flow.deliveries.begun, flow.deliveries.done, flow.scheduled


@virtual
async def test_the_last_minute_is_a_minute(world: World) -> None:
    await world.pause((MINUTE - world.clock.now() % MINUTE) / 1000)  # a minute begins
    async with world.app() as app:
        told, throughput = Told(app), Throughput(app.store, app.clock)
        await told.deliver(10)
        await world.pause(30.0)
        await told.deliver(5, late=800, outcome=OutcomeKind.RETRY)
        first = await throughput.read()
        assert figures(first.last_minute()) == (15, 10, 15)
        assert first.last_minute().failed == 5
        assert first.last_minute().span == 90_000, "this minute so far, and the one before it"
        for _ in range(15):
            await world.pause(2.0)
            await throughput.read()
        await told.deliver(1)
        await world.pause(29.0)
        seen = await throughput.read()
        assert figures(seen.last_minute()) == (1, 1, 1), "what was seen a minute ago is over"
        assert seen.last_minute().span == 59_000
        assert seen.last_minute().rate(59) == 1.0
        assert seen.last_minute().deliveries.late == {3: 1}
        assert figures(seen.last_hour()) == (16, 11, 16)
        assert seen.by_minute()[-2:] == [15, 1]
        assert len(seen.by_minute()) == MINUTES


@virtual
async def test_of_some_topics_only(world: World) -> None:
    async with world.app() as app:
        told, throughput = Told(app), Throughput(app.store, app.clock)
        await told.deliver(2)
        await told.deliver(3, topic="b", late=900)
        seen = await throughput.read()
        assert figures(seen.last_minute()) == (5, 5, 5)
        mine = seen.last_minute(lambda topic: topic == "a")
        assert figures(mine) == (2, 2, None), "what is counted over all topics is theirs who see all"
        assert mine.deliveries.lateness(0.99) == 3
        assert seen.by_minute(lambda topic: topic == "a")[-1] == 2
        assert (seen.latest(), seen.latest(lambda topic: topic == "a")) == ("b", "a")
        assert seen.latest(lambda topic: False) is None
        async with looking(app) as overviews:
            shown = (await overviews.get()).overview(lambda topic: topic == "a")
        assert shown.minute is not None
        assert shown.hour is not None
        assert figures(shown.minute) == figures(shown.hour) == (2, 2, None)
        assert (shown.latest, shown.by_minute[-1]) == ("a", 2)


@virtual
async def test_a_look_reads_two_minutes(world: World) -> None:
    async with world.app() as app:
        told, throughput = Told(app), Throughput(app.store, app.clock)
        for _ in range(70):
            await told.deliver(1)
            await world.pause(60.0)
        read: list[int] = []
        original = world.memory.find

        async def find(where: Filter, page: Page) -> Found:
            found = await original(where, page)
            read.append(len(found.tasks))
            return found

        world.memory.find = find  # type: ignore[method-assign]
        await throughput.read()
        assert sum(read) >= MINUTES - 1
        for _ in range(20):
            read.clear()
            await world.pause(2.0)
            await throughput.read()
            assert sum(read) <= 2


@given(
    st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 3), st.booleans()), min_size=1, max_size=25),
    st.sampled_from(["a", "b"]),
)
@in_virtual_time
async def test_the_last_hour_is_what_the_rows_say(
    loop: VirtualLoop, steps: list[tuple[int, int, bool]], topic: str
) -> None:
    """However long nobody looked in between."""
    clock = VirtualClock(loop)
    async with Bide(MemoryStore(), clock=clock) as app:
        told, throughput = Told(app), Throughput(app.store, app.clock)
        for pause, number, looks in steps:
            await elapse(pause / 1000)
            if number:
                await told.deliver(number, topic=topic)
            if not looks:
                continue
            minute = clock.now() // MINUTE
            rows = await rows_between(app.store, clock, minute - MINUTES + 1, minute)
            seen = await throughput.read()
            assert seen.hour == together(rows.values())
            assert seen.last_minute().span <= 2 * MINUTE
            now_and_before = sum(
                row.topics.get(topic, DeliveryCounts()).begun for one, row in rows.items() if one >= minute - 1
            )
            assert 0 <= seen.last_minute().deliveries.begun <= now_and_before


# --- wake-ups


def test_missed_wake_ups_are_a_warning_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [1_000.0]
    monkeypatch.setattr("bide.engine.registry.time.monotonic", lambda: at[0])
    channel = WakeChannel()
    assert channel.look(notifies=True).heard_ago is None
    one, other = Wakes(), Wakes(notifications=3, heard_at=990.0)
    channel.working(one)
    channel.working(other)
    found = channel.look(notifies=True)
    assert (found.loops, found.heard, found.heard_ago, found.missed, found.missed_lately) == (2, 3, 10.0, 0, False)
    one.missed = 2
    assert channel.look(notifies=True).missed_lately
    at[0] += 599
    assert channel.look(notifies=True).missed_lately
    at[0] += 2
    found = channel.look(notifies=True)
    assert (found.missed, found.missed_lately) == (2, False)
