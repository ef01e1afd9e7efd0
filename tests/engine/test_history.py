"""The past by the minute: every process tells what it did, and whoever looks sees all of it together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide import Bide, Dead, Retry, Task
from bide.core.errors import StoreUnavailable
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Filter, OutcomeKind, Page
from bide.engine.history import (
    KEPT,
    MINUTE,
    OTHERS,
    DeliveryCounts,
    History,
    MinuteRow,
    bucket_of,
    highest_of,
    rows_between,
    together,
)
from bide.stores.memory import MemoryStore
from bide.testing import FaultyStore, ManualClock

NOON = 29_000_000 * MINUTE


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


@given(st.integers(0, 10**12))
def test_a_bucket_is_no_wider_than_an_eighth(late: int) -> None:
    highest = highest_of(bucket_of(late))
    assert late <= highest <= late * 1.125 + 1
    assert bucket_of(highest) == bucket_of(late)
    assert bucket_of(highest + 1) == bucket_of(late) + 1


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_near_the_true_one(lates: list[int], share: float) -> None:
    past = DeliveryCounts()
    for late in lates:
        bucket = bucket_of(late)
        past.late[bucket] = past.late.get(bucket, 0) + 1
    rank = max(1, -(-share * len(lates) // 1))
    true = sorted(lates)[int(min(rank, len(lates))) - 1]
    found = past.lateness(share)
    assert found is not None
    assert found >= true
    assert found <= true * 1.125 + 1
    assert DeliveryCounts().lateness(share) is None


async def test_what_happened_is_told_by_minute_and_topic(store: MemoryStore) -> None:
    clock = ManualClock(NOON + 30_000)
    history = History(store, clock)
    history.scheduled(7)
    history.began("a", [NOON + 29_990, NOON - 10], clock.now())
    history.ended("a", OutcomeKind.DONE)
    history.ended("a", OutcomeKind.RETRY)
    await history.flush()
    clock.advance(MINUTE)
    history.began("b", [clock.now()], clock.now())
    history.ended("b", OutcomeKind.DEAD)
    history.ended("b", OutcomeKind.DEFER)
    await history.close()

    minute = NOON // MINUTE
    found = await rows_between(store, clock, minute, minute + 1)
    assert found == {
        minute: MinuteRow(
            7,
            {"a": DeliveryCounts(2, 1, 1, 0, 0, {bucket_of(10): 1, bucket_of(30_010): 1}, {minute: 1, minute - 1: 1})},
        ),
        minute + 1: MinuteRow(0, {"b": DeliveryCounts(1, 0, 0, 1, 1, {0: 1}, {minute + 1: 1})}),
    }
    assert await rows_between(store, clock, minute + 1, minute + 1) == {minute + 1: found[minute + 1]}
    assert found[minute + 1].topics["b"].ended == 2


async def test_nothing_is_written_where_nothing_happens_and_a_row_is_forgotten_after_a_day(store: MemoryStore) -> None:
    clock = ManualClock(NOON)
    history = History(store, clock)
    await history.flush()
    assert (await store.tally()).counts == {}
    history.ended("a", OutcomeKind.DONE)
    await history.flush()
    shown = Filter(topic=SHOWN_TOPIC)
    assert len((await store.find(shown, Page())).tasks) == 1
    clock.advance(KEPT + 2 * MINUTE)
    history.ended("a", OutcomeKind.DONE)
    await history.flush()
    [left] = (await store.find(shown, Page())).tasks
    assert left.key.split(":")[1] == str(clock.now() // MINUTE)


async def test_a_store_that_is_away_delays_what_is_told(store: MemoryStore) -> None:
    clock = ManualClock(NOON)
    away = StoreUnavailable("away")
    faulty = FaultyStore(store, fault=lambda point: away if point == "add:before" else None)
    history = History(faulty, clock)
    for _ in range(3):
        history.ended("a", OutcomeKind.DONE)
        await history.flush()
        clock.advance(MINUTE)
    faulty.fault = lambda _: None
    history.ended("a", OutcomeKind.DONE)
    await history.close()
    found = await rows_between(store, clock, NOON // MINUTE, clock.now() // MINUTE)
    assert [row.topics["a"].done for row in found.values()] == [1, 1, 1, 1]


async def test_beyond_two_hundred_topics_the_others_are_one(store: MemoryStore) -> None:
    clock = ManualClock(NOON)
    history = History(store, clock)
    for number in range(250):
        history.ended(f"topic {number}", OutcomeKind.DONE)
    await history.flush()
    row = (await rows_between(store, clock, NOON // MINUTE, NOON // MINUTE))[NOON // MINUTE]
    assert sum(past.done for past in row.topics.values()) == 250
    assert row.topics[OTHERS].done == 50
    assert len(row.topics) <= 201


async def test_a_row_that_cannot_be_read_is_passed_over(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(NOON)
    history = History(store, clock)
    history.ended("a", OutcomeKind.DONE)
    await history.flush()
    await history._kept.put(f"minute:{NOON // MINUTE}:x", b"\xff", until=NOON + MINUTE + KEPT)
    found = await rows_between(store, clock, NOON // MINUTE, NOON // MINUTE)
    assert found[NOON // MINUTE].topics["a"].done == 1
    assert "cannot be read" in caplog.text


async def test_a_worker_tells_what_it_did(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path / 'told.db'}")
    lives: list[Task[str]] = []

    @app.handler("story", retry="never")
    async def handle(task: Task[str]) -> Dead | Retry | None:
        lives.append(task)
        assert task.started_at is not None
        return Dead("no use") if task.payload == "dead" else None

    async with app:
        began = app.clock.now() // MINUTE
        for payload in ("a", "b", "dead"):
            await app.schedule("story", payload, delay="0s")
        async with app.worker() as worker:
            await worker.until_empty()
        await app.history.flush()
        rows = await rows_between(app.store, app.clock, began, app.clock.now() // MINUTE)
        past = together(rows.values()).topics["story"]
        assert (past.begun, past.done, past.dead) == (3, 2, 1)
        assert sum(past.planned.values()) == 3
        assert sum(row.scheduled for row in rows.values()) == 3
        assert not [task async for task in app.find() if task.topic != "story"], "what is told is nobody's task"
        [event] = await app.events("story", next(one.key for one in lives if one.payload == "dead"))
        assert event.was is not None
        assert event.was <= event.at

    silent = Bide(f"sqlite:///{tmp_path / 'silent.db'}", history="off", keep_done="0s")
    silent.handler("story")(handle.__wrapped__)
    async with silent:
        await silent.schedule("story", "a", delay="0s")
        async with silent.worker() as worker:
            await worker.until_empty()
        await silent.history.flush()
        assert (await silent.store.tally()).counts == {}
