"""One verb over many tasks: every verb on every store, none twice, at a pace, stopped, broken off, and gone on with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, stores, virtual
from tests.waiting import PATIENCE, until

from bide import BadInput, Bide, Dead, OutcomeUnknown, Ref, StoreFull, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import In, Millis
from bide.core.names import RESERVED_TOPIC, SHOWN_TOPIC, new_id
from bide.core.records import Change, Filter, Move, NewTask, Record, State
from bide.engine.session import acting_as
from bide.engine.settings_store import SettingsStore
from bide.insight.bulk import PAGE, BulkRequest, BulkScope, BulkVerb, Version, change_one, preview
from bide.insight.bulk_run import AT_ONCE, MOST_MISSED, MOST_NOTED, BulkRunner, BulkState, Progress, untouched_by
from bide.ports import Pending, StoreFacade
from bide.stores.memory import MemoryStore

HOUR: Millis = 3_600_000
EVERY_STORE = stores("memory", "sqlite", "redis")


@pytest.fixture(autouse=True)
def patient_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is meant is counted to its end, however long that takes."""
    monkeypatch.setattr("bide.insight.bulk._PATIENCE", PATIENCE)


def anything(topic: str) -> bool:
    """May do everything to every topic."""
    return True


async def fill(app: Bide, topic: str, number: int, *, group: str | None = None, delay: str = "1h", **more: Any) -> None:
    """So many tasks, k0000 and on."""
    await app.schedule_many(
        [app.new(topic, n, key=f"k{n:04}", group=group, delay=delay, **more) for n in range(number)]
    )


async def records(app: Bide, topic: str, **where: Any) -> dict[str, Record]:
    """Those of a topic as they are, by key."""
    return {task.key: task.record async for task in app.find(topic=topic, **where)}


@asynccontextmanager
async def runner(app: Bide, name: str = "here") -> AsyncIterator[BulkRunner]:
    """That of an instance."""
    made = BulkRunner(app, name)
    yield made
    await made.close()


async def dues(app: Bide, topic: str) -> dict[str, Millis]:
    return {key: one.due_at for key, one in (await records(app, topic)).items()}


async def begun(bulks: BulkRunner, bulk: BulkRequest, *, may: Callable[[str], bool] = anything) -> str:
    """Its id."""
    id = new_id()
    assert await bulks.start(id, bulk, may, who="ann")
    return id


async def ended(bulks: BulkRunner, id: str) -> Progress:
    """How far it came, once one that this instance works on is over."""
    if id in bulks._tasks:
        await asyncio.wait([bulks._tasks[id]])
    progress = await bulks.get(id)
    assert progress is not None
    return progress


async def carried_out(bulks: BulkRunner, bulk: BulkRequest, *, may: Callable[[str], bool] = anything) -> Progress:
    return await ended(bulks, await begun(bulks, bulk, may=may))


# --- what is asked


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({}, "scope"),
        ({"chosen": (Version(Ref("t", "k"), 1),), "where": Filter()}, "scope"),
        ({"verb": BulkVerb.MOVE, "where": Filter()}, "to"),
        ({"at": 1, "where": Filter()}, "to"),
        ({"verb": BulkVerb.SHIFT, "where": Filter()}, "by"),
        ({"verb": BulkVerb.SHIFT, "by": 0, "where": Filter()}, "by"),
        ({"by": 5, "where": Filter()}, "by"),
        ({"pace": 0, "where": Filter()}, "pace"),
        ({"pace": 10_000_000, "where": Filter()}, "pace"),
        ({"where": Filter(state=State.DEAD)}, "state"),
        ({"where": Filter(), "error": "x"}, "error"),
        ({"verb": BulkVerb.REDRIVE, "where": Filter(state=State.WAITING)}, "state"),
        ({"verb": BulkVerb.REDRIVE, "where": Filter(wake_before=1)}, "wake_from"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        BulkRequest(**{"verb": BulkVerb.CANCEL, **more})
    assert refused.value.field == field


# --- every verb, on every store


@EVERY_STORE
async def test_all_that_match_are_changed_once_and_nothing_else(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as bulks:
        await fill(app, "a", 2 * PAGE + 10, group="g")
        await fill(app, "b", 5, group="g")
        before = await dues(app, "a")

        shifted = await carried_out(bulks, BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="a")))
        assert (shifted.state, shifted.counts, shifted.missed) == (BulkState.ENDED, {"moved": 1010}, 0)
        assert (shifted.total, shifted.total_exact, shifted.looked) == (1010, True, 1010)
        assert await dues(app, "a") == {key: due + HOUR for key, due in before.items()}, (
            "none was shifted twice, although each moved ahead of the walk"
        )

        back = BulkRequest(verb=BulkVerb.SHIFT, by=-HOUR, where=Filter(group="g", topic="a"))
        assert (await carried_out(bulks, back)).counts == {"moved": 1010}
        assert await dues(app, "a") == before

        at = app.clock.now() + 5 * HOUR
        moved = BulkRequest(verb=BulkVerb.MOVE, at=at, where=Filter(topic="a", state=State.WAITING))
        assert (await carried_out(bulks, moved)).counts == {"moved": 1010}
        assert set((await dues(app, "a")).values()) == {at}

        fired = await carried_out(bulks, BulkRequest(verb=BulkVerb.FIRE, where=Filter(topic="b")))
        assert fired.counts == {"moved": 5}
        due = await records(app, "b")
        latest = max(one.wake_at for one in due.values())
        await until(lambda: app.clock.now() > latest, "the server's clock, which may be a little behind")
        again = await carried_out(bulks, BulkRequest(verb=BulkVerb.FIRE, where=Filter(topic="b")))
        assert again.counts == {}, "what is due keeps its place in the line"
        assert await records(app, "b") == due

        cancelled = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(group="g")))
        assert cancelled.counts == {"cancelled": 1015}
        assert (await app.tally()).number(state=State.WAITING) == 0


@EVERY_STORE
async def test_what_is_being_delivered_is_left_alone_and_told(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as bulks:
        await fill(app, "t", 20)
        await app.schedule("t", None, key="held", delay="0s")
        leased: list[Record] = []
        while not leased:
            now = app.clock.now()
            leased = (await app.store.lease({"t": 1}, now=now, until=now + HOUR, holder="worker-7")).tasks
        bulk = BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t"))
        seen = await preview(app, bulk, anything)
        assert (seen.meant.number, seen.leased.number) == (21, 1)
        id = await begun(bulks, bulk)
        progress = await ended(bulks, id)
        assert progress.counts == {"moved": 20, "under_way": 1}
        [missed] = await bulks.missed(id)
        assert (missed.key, missed.result, missed.state, missed.holder) == (
            "held", "under_way", State.LEASED, "worker-7"
        )  # fmt: skip
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t")))
        assert done.counts == {"cancelled": 20, "cancelled_while_leased": 1}


@EVERY_STORE
async def test_the_chosen_are_changed_as_they_were_seen_or_not_at_all(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as bulks:
        await fill(app, "t", 30)
        seen = tuple(Version(one.ref, one.token) for one in (await records(app, "t")).values())
        with acting_as("bo"):
            await app.reschedule("t", "k0003", delay="9h")
        await app.cancel("t", "k0004")
        noted: list[Event] = await until(lambda: app.events("t", "k0003"), "the event to be written")
        assert noted[0].who == "bo"
        bulk = BulkRequest(verb=BulkVerb.CANCEL, chosen=seen)
        before = await preview(app, bulk, anything)
        assert before.meant.number == 28
        assert {one.ref.key for one in before.gone} == {"k0003", "k0004"}
        id = new_id()
        with acting_as("ann"):
            assert await bulks.start(id, bulk, anything, who="ann")
        progress = await ended(bulks, id)
        assert progress.counts == {"cancelled": 28, "stale_token": 1, "finished": 1}
        assert (progress.chosen, progress.total) == (30, 30)
        missed = {one.key: one for one in await bulks.missed(id)}
        assert (missed["k0003"].who, missed["k0003"].what) == ("bo", "reschedule: moved")
        assert missed["k0004"].result == "finished"
        assert set(await records(app, "t", state="waiting")) == {"k0003"}
        events = await app.events("t", "k0005")
        assert [(one.who, one.what) for one in events] == [("ann", "cancel: cancelled")], "whoever asked has done it"


@EVERY_STORE
async def test_only_topics_that_one_may_and_never_ours(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as bulks:
        await SettingsStore(app.store, app.clock).put("setting", b"1")
        await SettingsStore(app.store, app.clock, SHOWN_TOPIC).put("shown", b"1")
        for topic in ("mine.a", "mine.b", "theirs"):
            await fill(app, topic, 7)
        bulk = BulkRequest(verb=BulkVerb.CANCEL, where=Filter())

        def may(topic: str) -> bool:
            return topic.startswith("mine.")

        count, topics = await BulkScope(app, bulk, may, app.clock.now()).total()
        assert (count.number, topics) == (14, frozenset({"mine.a", "mine.b"}))
        assert (await carried_out(bulks, bulk, may=may)).counts == {"cancelled": 14}
        assert len(await records(app, "theirs")) == 7
        done = await carried_out(bulks, bulk)
        assert done.counts == {"cancelled": 7}
        assert await SettingsStore(app.store, app.clock, RESERVED_TOPIC).get("setting") == b"1"
        assert await SettingsStore(app.store, app.clock, SHOWN_TOPIC).get("shown") == b"1"


@EVERY_STORE
async def test_a_range_of_times_and_a_state_narrow_it(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as bulks:
        now = app.clock.now()
        for hours in range(1, 6):
            await app.schedule("t", hours, key=f"h{hours}", delay=f"{hours}h")
        where = Filter(topic="t", wake_from=now + 2 * HOUR - 60_000, wake_before=now + 4 * HOUR - 60_000)
        bulk = BulkRequest(verb=BulkVerb.CANCEL, where=where)
        assert (await BulkScope(app, bulk, anything, app.clock.now()).total())[0].number == 2
        assert (await carried_out(bulks, bulk)).counts == {"cancelled": 2}
        assert set(await records(app, "t", state="waiting")) == {"h1", "h4", "h5"}
        leased = BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t", state=State.LEASED))
        assert (await carried_out(bulks, leased)).counts == {}


@EVERY_STORE
async def test_every_instance_shows_it_and_it_is_listed(store_url: str) -> None:
    async with Bide(store_url) as app, runner(app) as here, runner(app, "there") as there:
        await fill(app, "t", 10)
        await fill(app, "u", 10, deadline="2h")
        id = new_id()
        bulk = BulkRequest(verb=BulkVerb.SHIFT, by=5 * HOUR, where=Filter(topic="u"))
        began = await asyncio.gather(
            here.start(id, bulk, anything, who="ann"), there.start(id, bulk, anything, who="ann"),
            here.start(id, bulk, anything, who="ann"),
        )  # fmt: skip
        assert sum(began) == 1, "a resent form starts nothing twice"
        await asyncio.gather(ended(here, id), ended(there, id))
        shown = await ended(there, id)
        assert shown == await here.get(id)
        assert (shown.state, shown.counts, shown.who) == (BulkState.ENDED, {"refused": 10}, "ann")
        assert shown.bulk == bulk
        missed = await there.missed(id)
        assert [one.result for one in missed] == ["refused"] * 10
        assert all(one.deadline is not None for one in missed)
        other = await carried_out(there, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t")))
        assert {one.id for one in await here.all()} == {other.id, id}
        along = BulkRequest(verb=BulkVerb.SHIFT, by=5 * HOUR, where=Filter(topic="u"), deadlines=True)
        assert (await carried_out(here, along)).counts == {"moved": 10}
        assert await here.get(new_id()) is None


class Locking(StoreFacade):
    """The change of a locked task, whose answer is lost."""

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Any:
        pending = Pending[Any]()
        pending.set_exception(OutcomeUnknown("lost"))
        return [pending]


@pytest.mark.parametrize("verb", BulkVerb)
async def test_of_one_whose_answer_was_lost_nobody_says_that_nothing_was_done(verb: BulkVerb) -> None:
    async with Bide(Locking(MemoryStore())) as app:
        record = (await app.schedule("t", key="1", delay="1h")).record
        assert record is not None
        more: dict[str, Any] = {BulkVerb.MOVE: {"at": record.due_at + HOUR}, BulkVerb.SHIFT: {"by": HOUR}}.get(verb, {})
        bulk = BulkRequest(verb=verb, chosen=(Version(record.ref, record.token),), **more)
        with pytest.raises(OutcomeUnknown):
            await change_one(app, bulk)


# --- time, faults and ends, in virtual time


@virtual
async def test_it_keeps_to_its_pace(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 300)
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t"), pace=30))
        assert done.counts == {"cancelled": 300}
        assert done.started_at is not None
        assert done.ended_at is not None
        assert 9_800 <= done.ended_at - done.started_at <= 10_100
        await fill(app, "t", 5)
        slow = new_id()
        await bulks.start(slow, BulkRequest(verb=BulkVerb.FIRE, where=Filter(topic="t"), pace=1), anything, who="ann")
        gone: list[int] = []
        for _ in range(5):
            await world.pause(1)
            gone.append((await app.tally(["0s", "10h"])).forecast["t"][0].number)
        assert gone == [4, 3, 2, 1, 0]


@virtual
async def test_what_comes_between_the_preview_and_the_confirmation_is_not_meant(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 3)
        await fill(app, "u", 3)
        await app.schedule("u", None, key="due by then", delay="1m")
        seen_at = app.clock.now()
        await world.pause(120)
        counts = []
        for verb, topic in ((BulkVerb.CANCEL, "t"), (BulkVerb.FIRE, "u")):
            await app.schedule(topic, None, key="later", delay="2h")
            id = new_id()
            bulk = BulkRequest(verb=verb, where=Filter(topic=topic))
            assert await bulks.start(id, bulk, anything, who="ann", asked_at=seen_at)
            counts.append((await ended(bulks, id)).counts)
            assert (await records(app, topic))["later"].due_at > app.clock.now()
        assert counts == [{"cancelled": 3}, {"moved": 3}]


@virtual
async def test_one_that_dies_again_at_once_is_not_sent_again_and_again(world: World) -> None:
    app = world.app()
    tries: list[str] = []

    @app.handler("t")
    async def dies(task: Any) -> Dead:
        tries.append(task.key)
        return Dead("for good")

    async with app, app.worker(), runner(app) as bulks:
        await fill(app, "t", 40, delay="0s")
        await world.until(lambda: len(tries) == 40)
        await world.pause(1)
        tries.clear()
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.REDRIVE, where=Filter(topic="t"), pace=20))
        assert done.counts == {"redriven": 40}
        await world.pause(5)
        assert sorted(tries) == sorted(set(tries)), "each was delivered once more"
        assert len(tries) == 40


@virtual
async def test_what_somebody_changed_meanwhile_is_read_again(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 10)
        meddled: list[str] = []

        def meddle(point: str) -> BaseException | None:
            if point == "change:before" and not meddled:
                meddled.append(point)
                world.loop.create_task(away())
            return None

        async def away() -> None:
            await world.memory.change([Move("t", "k0001", In(3 * HOUR))], now=world.clock.now())
            await world.memory.add([NewTask("t", "k0002", new_id(), In(10 * HOUR))], now=world.clock.now())

        where = Filter(topic="t", wake_before=world.clock.now() + 5 * HOUR)
        world.store.latency = lambda name: 0.5 if name == "change" else 0.0
        world.store.fault = meddle
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=where))
        world.store.latency = None
        assert meddled
        assert done.counts == {"cancelled": 9, "stale_token": 1}
        assert set(await records(app, "t", state="waiting")) == {"k0002"}, "it is another life, and out of the range"


@virtual
async def test_a_store_that_is_away_for_a_while_costs_time_and_nothing_else(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 20)
        began = world.elapsed

        def away(point: str) -> BaseException | None:
            if world.elapsed < began + 30_000 and point in ("find:before", "change:before", "add:before"):
                return StoreUnavailable("cable cut") if world.elapsed > began else None
            return None

        world.store.fault = away
        id = await begun(bulks, BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t"), pace=10))
        progress = await ended(bulks, id)
        assert (progress.state, progress.counts) == (BulkState.ENDED, {"moved": 20})
        assert set((await dues(app, "t")).values()) == {world.start + 2 * HOUR}

        world.store.fault = lambda point: StoreUnavailable("gone") if point == "change:before" else None
        failed = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t")))
        assert (failed.state, failed.error, failed.looked) == (BulkState.FAILED, "gone", 0)

        world.store.fault = lambda point: OutcomeUnknown("lost") if point == "change:after" else None
        unknown = await carried_out(bulks, BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t")))
        world.store.fault = lambda _: None
        assert (unknown.state, unknown.counts) == (BulkState.ENDED, {"unknown": 20})
        assert set((await dues(app, "t")).values()) == {world.start + 3 * HOUR}, "not twice"
        assert {one.result for one in await bulks.missed(unknown.id)} == {"unknown"}


@virtual
async def test_a_full_store_can_be_emptied_all_the_same(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 10)
        world.store.fault = lambda point: StoreFull("full") if point == "add:before" else None
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t")))
        assert (done.state, done.counts) == (BulkState.ENDED, {"cancelled": 10})
        assert [one.id for one in await bulks.all()] == [done.id], "this instance knows of it"


@virtual
async def test_it_is_stopped_from_any_instance_and_gone_on_with(world: World) -> None:
    async with world.app() as app, runner(app) as here, runner(app, "there") as there:
        await fill(app, "t", 100)
        before = await dues(app, "t")
        id = await begun(here, BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t"), pace=10))
        await world.pause(4)
        await there.stop(id, who="bo")
        stopped = await ended(here, id)
        assert stopped == await there.get(id)
        assert (stopped.state, stopped.stopped_by) == (BulkState.STOPPED, "bo")
        assert 40 <= stopped.looked <= 60
        assert stopped.counts == {"moved": stopped.looked}
        since = untouched_by(stopped)
        assert since is not None
        rest = BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t"), untouched_since=since)
        assert (await carried_out(there, rest)).counts == {"moved": 100 - stopped.looked}
        assert await dues(app, "t") == {key: due + HOUR for key, due in before.items()}


@virtual
async def test_the_end_of_the_service_stops_it_and_says_how_far_it_came(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", 100)
        ids = [new_id() for _ in range(AT_ONCE + 2)]
        for id in ids:
            bulk = BulkRequest(verb=BulkVerb.FIRE, where=Filter(topic="t"), pace=1)
            await bulks.start(id, bulk, anything, who="ann")
        await world.pause(3.5)
        states = [one.state for one in await bulks.all()]
        assert sorted(states) == sorted([BulkState.RUNNING] * AT_ONCE + [BulkState.QUEUED] * 2)
        await bulks.close()
        found = {one.id: one for one in await BulkRunner(app, "after").all()}
        assert found.keys() == set(ids)
        assert {one.state for one in found.values()} == {BulkState.STOPPED}
        assert {one.stopped_by for one in found.values()} == {None}
        assert sum(one.looked for one in found.values()) >= 12


@virtual
async def test_a_large_one_leaves_room_in_the_event_log(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", MOST_NOTED + 2 * PAGE)
        told: list[tuple[str, int, str]] = []
        with acting_as("ann", lambda verb, answers, who: told.append((verb, len(answers), who))):
            id = new_id()
            await bulks.start(id, BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic="t")), anything, who="ann")
        await ended(bulks, id)
        assert sum(number for _, number, _ in told) == MOST_NOTED + 2 * PAGE, "the audit log has all"
        assert {(verb, who) for verb, _, who in told} == {("cancel", "ann")}
        await world.pause(1)
        assert MOST_NOTED <= len(await app.events(limit=20_000)) <= MOST_NOTED + PAGE


@virtual
async def test_of_what_was_not_done_the_first_thousand_are_told(world: World) -> None:
    async with world.app() as app, runner(app) as bulks:
        await fill(app, "t", MOST_MISSED + 300, deadline="90m")
        done = await carried_out(bulks, BulkRequest(verb=BulkVerb.SHIFT, by=HOUR, where=Filter(topic="t")))
        assert (done.counts, done.missed) == ({"refused": 1300}, 1300)
        assert len(await bulks.missed(done.id)) == MOST_MISSED


@given(st.lists(st.integers(-10 * HOUR, 10 * HOUR), min_size=1, max_size=40), st.integers(1, 9 * HOUR), st.booleans())
def test_a_shift_moves_each_once_whatever_the_order(offsets: list[int], by: int, back: bool) -> None:
    async def story() -> None:
        async with Bide("memory:") as app, runner(app) as bulks:
            now = app.clock.now() + 20 * HOUR
            for n, offset in enumerate(offsets):
                await app.schedule("t", n, key=str(n), delay=f"{now - app.clock.now() + offset}ms")
            before = await dues(app, "t")
            delta = -by if back else by
            done = await carried_out(bulks, BulkRequest(verb=BulkVerb.SHIFT, by=delta, where=Filter(topic="t")))
            assert done.counts == {"moved": len(offsets)}
            assert await dues(app, "t") == {key: due + delta for key, due in before.items()}

    asyncio.run(story())
