"""Group commit: what waits goes out together, and only the one that fails gets the error."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing
from typing import Any

import pytest
import pytest_asyncio
from tests.stores.sqlite.conftest import opened

from bide.core.errors import BadInput, PartlyFailed, StoreUnavailable
from bide.core.instants import At, In
from bide.core.payloads import AT_ONCE
from bide.core.records import Move, Ref, Result
from bide.stores.sqlite import SqliteStore, connection, operations
from bide.stores.sqlite.connection import WriteLock
from bide.testing.store_suite.base import (
    NOW,
    SECOND,
    add_all,
    done,
    hold,
    keys,
    lease,
    look,
    new,
    put_one,
    settle,
    take,
)

FULL, NORMAL = 2, 1


@pytest.fixture
def points() -> list[str]:
    """What `store` has come to so far."""
    return []


@pytest_asyncio.fixture
async def store(path: str, points: list[str]) -> AsyncIterator[SqliteStore]:
    async with opened(path, fault=points.append) as store:
        yield store


async def together(store: SqliteStore, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """What calls answer while the writer is kept waiting with the first of them in its hands; or their errors."""
    store._open().writer._lock.acquire()
    begun = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    store._open().writer._lock.release()
    return await asyncio.gather(*begun, return_exceptions=True)


def durability(store: SqliteStore) -> int:
    """PRAGMA synchronous of the writer: FULL or NORMAL."""
    found: int = store._open().writer._connection.execute("PRAGMA synchronous").fetchone()[0]
    return found


async def test_what_waits_together_is_committed_together(store: SqliteStore, points: list[str]) -> None:
    records = await together(store, *(put_one(store, new(str(number))) for number in range(100)))
    assert keys(records) == [str(number) for number in range(100)]
    assert points.count("after commit") <= 2
    assert points.count("add:inserted") == 100


async def test_a_task_behind_a_head_that_is_leased_with_it_wakes_the_workers(store: SqliteStore, path: str) -> None:
    """Others know of a head until it is leased, so what is added behind it need not be noted, but only until then."""
    await put_one(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as own:
        work = operations.UnitOfWork(own.cursor())
        operations.add(work, [new("behind", due=At(NOW + 2 * SECOND))], NOW)
        work.finish()
        assert not work.wakes
        operations.lease(work, {"t": 1}, NOW + SECOND, NOW + 9 * SECOND, "w")
        operations.add(work, [new("sooner", due=At(NOW + SECOND))], NOW)
        work.finish()
        assert work.wakes == {"t": NOW + SECOND}


async def test_only_the_one_that_fails_gets_the_error(store: SqliteStore) -> None:
    keys = ["a"] * 7 + ["lone \ud800"] + ["a"] * 12
    answers = await together(store, *(add_all(store, [new(key)]) for key in keys))
    assert isinstance(answers.pop(7), BadInput)
    results = [answer.result for [answer] in answers]
    assert results == [Result.CREATED] + [Result.REPLACED] * 18, "and in their order"


async def test_an_operation_whose_caller_has_gone_is_done_all_the_same(store: SqliteStore) -> None:
    call = asyncio.create_task(put_one(store))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await put_one(store, new("behind it"))
    assert await look(store, Ref("t", "k"))


async def test_closing_finishes_what_was_begun(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    calls = [asyncio.create_task(put_one(store, new(str(number)))) for number in range(50)]
    await asyncio.sleep(0)
    await store.close()
    assert len(await asyncio.gather(*calls)) == 50
    with pytest.raises(StoreUnavailable):
        await put_one(store)


async def test_a_lease_alone_does_not_wait_for_the_disk(store: SqliteStore) -> None:
    await put_one(store)
    assert durability(store) == FULL
    held = await take(store)
    assert durability(store) == NORMAL
    await settle(store, done(held))
    assert durability(store) == FULL
    await lease(store)
    assert durability(store) == NORMAL
    await store.change([Move("t", "k", In(0))], now=NOW)
    assert durability(store) == FULL


async def test_a_group_with_a_new_task_among_leases_waits_for_the_disk(store: SqliteStore, points: list[str]) -> None:
    await together(store, *(lease(store) for _ in range(9)), put_one(store))
    assert points.count("after commit") <= 2, "the last leases and the new task are one group"
    assert durability(store) == FULL


async def test_normal_is_normal(path: str) -> None:
    async with opened(path, synchronous="normal") as store:
        await put_one(store)
        assert durability(store) == NORMAL


async def test_a_large_call_is_cut_into_transactions_and_says_how_far_it_came(
    store: SqliteStore, points: list[str], path: str
) -> None:
    tasks = [new(str(number)) for number in range(2 * AT_ONCE + 1)]
    assert len(await store.add(tasks, now=NOW)) == len(tasks)
    assert points.count("before commit") == 3
    commits = 0

    def fault(point: str) -> None:
        nonlocal commits
        commits += point == "before commit"
        if commits == 2:
            raise StoreUnavailable("gone")

    await store.close()
    async with opened(path, fault=fault) as store:
        with pytest.raises(PartlyFailed) as failed:
            await store.add(tasks, now=NOW)
        undone = [isinstance(one, StoreUnavailable) for one in failed.value.answers]
        assert undone == [False] * AT_ONCE + [True] * (AT_ONCE + 1)


async def test_the_garbage_collector_visits_a_large_call_before_it_locks_the_file(path: str) -> None:
    young: list[bool] = []
    tasks = [new(str(number)) for number in range(AT_ONCE + 1)]

    def fault(point: str) -> None:
        if point == "add:begun":
            young.append(any(one is tasks for one in gc.get_objects(generation=0)))

    async with opened(path, fault=fault) as store:
        gc.disable()
        try:
            tasks = list(tasks)
            assert any(one is tasks for one in gc.get_objects(generation=0))
            await store.add(tasks, now=NOW)
        finally:
            gc.enable()
        assert young == [False, False]


async def test_a_large_call_pauses_again_if_a_checkpoint_took_the_pause(
    store: SqliteStore, points: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = store._open().checkpointer
    assert checkpointer is not None
    checkpointer.stop()  # its thread must not use the connection meanwhile
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            checkpointer._restart()

    with monkeypatch.context() as patched:
        patched.setattr("bide.stores.sqlite.store._WRITES_FOR", -1.0)
        patched.setattr(asyncio, "sleep", sleep)
        await store.add([new(str(number)) for number in range(2 * AT_ONCE + 1)], now=NOW)
    assert points.count("after commit") == 3
    assert len(pauses) == 4


async def test_large_payloads_are_added_and_leased_by_1_mib_oldest_first(store: SqliteStore, points: list[str]) -> None:
    """Also where waiting and lost tasks are merged: neither kind is passed over because the other was cut short."""
    large = bytes(300 * 1024)
    lost = [new(f"lost-{number}", payload=large) for number in range(8)]
    waiting = [new(f"{number}", due=At(NOW + SECOND - 4 + number), payload=large) for number in range(8)]
    await store.add(lost, now=NOW)
    while (await lease(store, 9, lasts=SECOND)).tasks:
        pass
    await store.add(waiting, now=NOW)
    assert points.count("before commit") == 3 + 3 + 1 + 3, "three tasks to add or to lease, and an empty lease"
    await store.add([new(str(number), topic="u", payload=large) for number in range(4)], now=NOW)
    taken: list[str] = []
    wants, now, until = {"t": 20, "u": 20}, NOW + 2 * SECOND, NOW + 9 * SECOND
    while tasks := (await store.lease(wants, now=now, until=until, holder="w")).tasks:
        assert len(tasks) <= 4, "three, and one of the other topic"
        taken += [task.key for task in tasks if task.topic == "t"]
    at_one_instant = sorted(["4", *(task.key for task in lost)])
    assert [*taken[:4], *sorted(taken[4:13]), *taken[13:]] == ["0", "1", "2", "3", *at_one_instant, "5", "6", "7"]


async def test_a_lease_does_not_write_payloads_again(store: SqliteStore, path: str) -> None:
    """P11: since the row keeps its length, SQLite writes only the pages that differ."""
    await store.add([new(str(number), payload=bytes(100 * 1024)) for number in range(8)], now=NOW)
    with closing(sqlite3.connect(path)) as own:
        own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    leased = (await lease(store, 8)).tasks
    assert await store.extend([hold(task) for task in leased], now=NOW, until=NOW + 9 * SECOND) == [True] * 8
    assert os.stat(f"{path}-wal").st_size < 100 * 1024


def test_a_busy_file_is_waited_for_in_small_steps(path: str) -> None:
    with closing(connection.connect(path)) as one, closing(sqlite3.connect(path, isolation_level=None)) as other:
        one.execute("PRAGMA busy_timeout = 0")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            connection.patiently(one, "BEGIN IMMEDIATE", patience=0.01)
        other.execute("ROLLBACK")
        connection.patiently(one, "BEGIN IMMEDIATE", patience=0.01)


def test_the_write_lock_keeps_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = WriteLock("/the/file")
    lock.acquire()
    assert not lock.try_acquire()
    monkeypatch.setattr(connection, "PATIENCE", 0.01)
    with pytest.raises(StoreUnavailable, match="/the/file: a transaction of this process"):
        lock.acquire()
    lock.release()
    assert lock.try_acquire()
    lock.release()
