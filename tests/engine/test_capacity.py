"""Slots are lent to who has work, the sum is a bound, and nobody starves."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, virtual
from tests.waiting import elapse

from bide import SystemClock, Task
from bide.core.instants import NEVER, Millis
from bide.core.records import Leased
from bide.engine.delivery.lease_plan import MOST_LOOKS, TURN, TopicWakes, kept_back, slots_to_lease


class Held(NamedTuple):
    free: int
    occupied: int
    backlogged: bool


held = st.builds(Held, st.integers(1, 300), st.integers(0, 300), st.booleans())
worlds = st.lists(held, max_size=40).map(lambda rooms: {f"{number}": room for number, room in enumerate(rooms)})


@given(worlds, st.integers(0, 40), st.integers(0, 2_000), st.integers(0, 300))
def test_the_sum_is_a_bound_and_a_free_slot_is_lent(rooms: dict[str, Held], due: int, free: int, kept: int) -> None:
    """The first `due` topics are due; the worker looks at the others."""
    topics = list(rooms)
    looked_at = {topic: rooms[topic] for topic in topics[due:]}
    asked = slots_to_lease({topic: rooms[topic] for topic in topics[:due]}, looked_at, free, kept)
    assert list(asked) == topics
    assert all(0 <= count <= rooms[topic].free for topic, count in asked.items())
    flood = sum(count for topic, count in asked.items() if topic not in looked_at and rooms[topic].backlogged)
    assert flood <= max(0, free - kept)
    few = len(looked_at) <= 8
    fits = sum(its.free for topic, its in rooms.items() if (few if topic in looked_at else not its.backlogged))
    assert sum(asked.values()) == min(free, flood + fits)
    if any(asked[topic] for topic in looked_at):
        assert all(asked[topic] == rooms[topic].free for topic in topics[:due] if not rooms[topic].backlogged)


@given(st.integers(1, 2_000), st.integers(1, 2_000))
def test_one_busy_topic_gets_about_what_it_gets_alone(slots: int, topics: int) -> None:
    kept = kept_back(slots, topics - 1)
    asked = slots_to_lease({"busy": Held(slots, 0, backlogged=True)}, {}, slots, kept)
    assert asked["busy"] >= slots - max(slots // 8, min(2, slots // 2))
    if topics <= slots // 8:
        assert asked["busy"] == slots - (topics - 1)


@given(st.integers(1, 30), st.integers(1, 60), st.booleans())
async def test_whoever_waits_has_its_turn(slots: int, topics: int, backlogged: bool) -> None:
    names = [f"{number}" for number in range(topics)]
    wakes, had = TopicWakes(names, SystemClock(), 1_000, "a"), set[str]()
    for name in names:
        wakes.note(name)
    for _ in names:
        asked = slots_to_lease({name: Held(slots, 0, backlogged) for name in wakes.due()}, {}, slots, 0)
        got = [name for name, count in asked.items() if count]
        wakes.asking(got)
        for name in got:
            wakes.note(name)
        had.update(got)
    assert had == set(names)


@pytest.mark.parametrize("again_by", [None, 1, 50_000])
async def test_each_of_many_topics_is_looked_at_once_however_soon_the_store_wants_to_be_asked(
    again_by: Millis | None,
) -> None:
    names = [f"t{number}" for number in range(3 * MOST_LOOKS)]
    wakes, seen = TopicWakes(names, SystemClock(), 60_000, "w"), Counter[str]()
    for _ in range(3):
        looks = wakes.take_looks()
        wakes.asking(looks)
        wakes.answered(looks, Leased([], {}, 0, again_by=again_by))
        seen.update(looks)
    assert seen == dict.fromkeys(names, 1)


HELPERS = [f"worker {number}" for number in range(7)]


async def in_turn() -> dict[str, TopicWakes]:
    """Workers of one topic, which wait for their turn."""
    workers = {name: TopicWakes(["t"], SystemClock(), 60_000, name) for name in HELPERS}
    for wakes in workers.values():
        wakes.take_looks()
        wakes.turns.announced({name: ["t"] for name in HELPERS})
        wakes.note_taken("t", 0, NEVER, "somebody")
    return workers


async def test_before_they_hear_of_each_other_all_ask_at_once() -> None:
    wakes = TopicWakes(["t"], SystemClock(), 60_000, HELPERS[0])
    wakes.turns.announced({name: ["t"] for name in HELPERS})
    assert wakes.note("t", 1_000) == 1_000


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20))
async def test_one_worker_asks_at_the_wake_and_the_others_in_turn(wakes: list[Millis]) -> None:
    workers = await in_turn()
    for wake in wakes:
        delays = sorted(one.turns.delay("t", wake) for one in workers.values())
        assert delays == [0, TURN, 2 * TURN, 3 * TURN, 4 * TURN, 5 * TURN, 5 * TURN]


@given(noted=st.lists(st.integers(2**41, 2**41 + 50), max_size=30), by=st.integers(2**41, 2**41 + 50))
async def test_what_others_took_hides_no_later_wake(noted: list[Millis], by: Millis) -> None:
    for wakes in (await in_turn()).values():
        for wake in noted:
            wakes.note("t", wake)
        wakes.note_taken("t", by, NEVER, "somebody")
        later = [wake for wake in noted if wake > by]
        asks = wakes.next_wake()
        if later:
            assert asks is not None
            assert asks <= min(later) + 5 * TURN
        elif len(noted) <= 16:
            assert asks is None


@given(known=st.none() | st.integers(2**41, 2**41 + 50), head=st.integers(2**41, 2**41 + 50), due=st.booleans())
async def test_a_store_that_knows_each_wake_says_when_to_ask(known: Millis | None, head: Millis, due: bool) -> None:
    wakes = TopicWakes(["t"], SystemClock(), 60_000, HELPERS[0])
    wakes.turns.announced({name: ["t"] for name in HELPERS})
    if known is not None:
        wakes.note("t", known)
    if due:
        wakes.note("t")
    wakes.note_taken("t", NEVER, head, "")
    asks = None if due or known is None else head  # a lease that is under way says more
    assert (list(wakes.due()), wakes.next_wake()) == (["t"] if due else [], asks)
    assert wakes.note("t", 2**41 - 1) == (0 if due else 2**41 - 1), "nobody waits for a turn"


class Work:
    """A handler that takes a second: how many ran at once at most, and how many have ended."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.ended = Counter[str]()

    async def handle(self, task: Task[Any]) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await elapse(1)
        self.running -= 1
        self.ended[task.topic] += 1


@pytest.mark.parametrize("topics", [10, 1_000])
@virtual
async def test_concurrency_is_a_bound_whatever_the_number_of_topics(world: World, topics: int) -> None:
    app, work = world.app(concurrency=10), Work()
    for number in range(topics):
        app.handler(f"t{number}")(work.handle)
    async with app, app.worker() as worker:
        await app.schedule_many([app.new(f"t{n}", None, delay="0s") for n in range(0, topics, topics // 10)])
        await app.schedule_many([app.new("t0", None, delay="0s") for _ in range(100)])
        await world.until(lambda: len(work.ended) == 10)
        assert work.ended["t0"] < 50, "in turns"
        await worker.until_empty()
        assert (work.most, worker.stats.done, worker.stats.leased) == (10, 110, 110)
        assert world.elapsed < 20_000, "idle topics lend their slots"


@virtual
async def test_one_busy_topic_of_a_thousand_runs_as_if_it_were_alone(world: World) -> None:
    app, work = world.app(), Work()
    for number in range(1_000):
        app.handler(f"t{number}")(work.handle)
    async with app, app.worker() as worker:
        await app.schedule_many([app.new("t7", None, delay="0s") for _ in range(2_000)])
        await worker.until_empty()
        assert (work.most, worker.stats.done) == (256, 2_000)
        assert world.store.calls["lease"] < 100
        before = world.store.calls["lease"]
        await world.pause(60)
        assert world.store.calls["lease"] - before < 4 * 62, "an idle worker looks at each topic once a second"
