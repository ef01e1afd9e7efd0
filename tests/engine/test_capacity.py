"""Slots are lent to who has work, the sum is a bound, and nobody starves."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, virtual
from tests.waiting import elapse

from bide import SystemClock, Task
from bide.engine.delivery.lease_plan import TopicWakes, kept_back, slots_to_lease


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
    wakes, had = TopicWakes(names, SystemClock(), 1_000), set[str]()
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


@pytest.mark.parametrize("topics", [10, 1_000])
@virtual
async def test_concurrency_is_a_bound_whatever_the_number_of_topics(world: World, topics: int) -> None:
    app = world.app(concurrency=10)
    running = most = 0
    ended: dict[str, int] = {}

    async def work(task: Task[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await elapse(1)
        running -= 1
        ended[task.topic] = ended.get(task.topic, 0) + 1

    for number in range(topics):
        app.handler(f"t{number}")(work)
    async with app, app.worker() as worker:
        await app.schedule_many([app.new(f"t{n}", None, delay="0s") for n in range(0, topics, topics // 10)])
        await app.schedule_many([app.new("t0", None, delay="0s") for _ in range(100)])
        await world.until(lambda: len(ended) == 10)
        assert ended["t0"] < 50, "in turns"
        await worker.until_empty()
        assert (most, worker.stats.done, worker.stats.leased) == (10, 110, 110)
        assert world.elapsed < 20_000, "idle topics lend their slots"


@virtual
async def test_one_busy_topic_of_a_thousand_runs_as_if_it_were_alone(world: World) -> None:
    app = world.app()
    running = most = 0

    async def work(task: Task[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await elapse(1)
        running -= 1

    for number in range(1_000):
        app.handler(f"t{number}")(work)
    async with app, app.worker() as worker:
        await app.schedule_many([app.new("t7", None, delay="0s") for _ in range(2_000)])
        await worker.until_empty()
        assert (most, worker.stats.done) == (256, 2_000)
        assert world.store.calls["lease"] < 100
        before = world.store.calls["lease"]
        await world.pause(60)
        assert world.store.calls["lease"] - before < 4 * 62, "an idle worker looks at each topic once a second"
