"""Slots are lent to who has work, the sum is a bound, and nobody starves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, virtual
from tests.waiting import elapse

from bide import Task
from bide.core.records import Leased
from bide.engine.delivery.executor import lease_in_turn, slots_to_lease


class Held(NamedTuple):
    free: int
    occupied: int
    backlogged: bool


held = st.builds(Held, st.integers(0, 300), st.integers(0, 300), st.booleans())
worlds = st.lists(held, max_size=40).map(lambda rooms: {f"{number}": room for number, room in enumerate(rooms)})


@given(worlds, st.integers(1, 2_000), st.integers(0, 10_000))
def test_the_sum_is_a_bound_and_a_free_slot_is_lent(rooms: Mapping[str, Held], slots: int, turn: int) -> None:
    asked = slots_to_lease(rooms, slots, turn)
    free = max(0, slots - sum(room.occupied for room in rooms.values()))
    assert sum(asked.values()) <= free
    assert all(0 <= count <= rooms[topic].free and rooms[topic].free for topic, count in asked.items())
    assert all(count for topic, count in asked.items() if rooms[topic].backlogged)
    others = {topic for topic, room in rooms.items() if room.free and not room.backlogged}
    assert others <= asked.keys() or not free
    if others and free:
        idle = sum(not rooms[topic].occupied for topic in others)
        assert sum(asked[topic] for topic in others) >= min(free, idle, 1 if slots > 1 else 0)
    elif sum(room.free for room in rooms.values()) >= free:
        assert sum(asked.values()) == free


@given(st.integers(1, 2_000), st.integers(1, 2_000))
def test_one_busy_topic_gets_about_what_it_gets_alone(slots: int, topics: int) -> None:
    rooms = {f"{number}": Held(slots, 0, backlogged=not number) for number in range(topics)}
    assert slots_to_lease(rooms, slots)["0"] >= slots - max(slots // 8, min(2, slots // 2))
    if topics <= slots // 8:
        assert slots_to_lease(rooms, slots)["0"] == slots - (topics - 1)


@given(st.integers(1, 30), st.integers(1, 60), st.booleans())
def test_whoever_waits_has_its_turn(slots: int, topics: int, backlogged: bool) -> None:
    rooms = {f"{number}": Held(slots, 0, backlogged) for number in range(topics)}
    turn, had = 0, set[str]()
    for _ in range(topics):
        got = {topic for topic, count in slots_to_lease(rooms, slots, turn).items() if count}
        turn, had = turn + len(got), had | got
    assert had == rooms.keys()


@given(st.integers(1, 20), st.sets(st.integers(0, 199), min_size=1, max_size=5))
async def test_what_no_slot_was_left_for_is_found_by_halves(free: int, due: set[int]) -> None:
    calls = 0

    async def ask(asked: Mapping[Any, int]) -> Leased:
        nonlocal calls
        calls += 1
        got: list[Any] = [topic for topic, count in asked.items() if count and topic in due]
        left = [topic for topic, count in asked.items() if not count and topic in due]
        return Leased(got, 5 if left else 20, 10)

    asked: Any = dict.fromkeys(range(-free, 0), 1) | dict.fromkeys(range(200), 0)
    leased = await lease_in_turn(ask, asked)
    assert 1 <= len(leased.tasks) <= free
    assert leased.next_wake == 5, "there may be more: look again at once"
    assert calls <= 10


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
        assert world.store.calls["lease"] - before < 70, "an idle worker does not spin"
