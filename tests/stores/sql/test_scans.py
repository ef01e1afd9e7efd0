"""Leases that begin where nothing is missed for long: what appears late all the same is found by a thorough scan.

Each scan is thorough here, where otherwise one a second is, and a full one is too expensive for another.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import not_before, pause, until

from bide.core.instants import In
from bide.core.records import Leased
from bide.stores.mysql import leasing as mysql
from bide.stores.mysql.connection import Call as MySqlCall
from bide.stores.postgres import leasing as postgres
from bide.stores.postgres.connection import Call as PostgresCall
from bide.stores.sql import leasing
from bide.testing.store_suite.base import HOUR, MINUTE, NOW, keys, lease, new, put, put_one

LIMITS = {"postgres": postgres, "mysql": mysql}
CALLS: dict[str, Any] = {"postgres": PostgresCall, "mysql": MySqlCall}


@pytest.fixture
def rarely_full(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS[database.name], "EXPENSIVE", 0.0)
    monkeypatch.setattr(leasing, "SHARE", 1_000_000_000)
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 0.0)
    monkeypatch.setattr(
        mysql, "LONGEST_TRANSACTION", 10 * MINUTE
    )  # how long a transaction may be open in MySQL to be found so


async def find_nothing(store: Any) -> None:
    """Some scans, so that what there is is known."""
    for _ in range(4):
        assert (await lease(store, 5, lasts=HOUR)).tasks == []


async def find_nothing_for_long(store: Any) -> None:
    await find_nothing(store)
    await pause(1.1, why="a scan begins a second before the last one")
    await find_nothing(store)


async def found(store: Any) -> Leased:
    """The first scan that finds something."""

    async def some() -> list[Leased]:
        leased = await lease(store, 5, lasts=HOUR)
        return [leased] if leased.tasks else []

    scans: list[Leased] = await until(some, "a task to be found")
    return scans[0]


async def test_a_task_whose_transaction_was_open_for_long_is_found(
    database: Database, url: str, open_store: OpensStore, rarely_full: None
) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    await find_nothing(store)
    async with database.somebody(url) as caller:
        await other.using(caller.given).add([new("late", due=In(0))], now=NOW)
        await find_nothing_for_long(store)
        await caller.commit()  # nobody listens: that it was told of does not help
    assert keys((await found(store)).tasks) == ["late"]


async def test_a_task_that_somebody_had_locked_is_found(
    database: Database, url: str, open_store: OpensStore, rarely_full: None
) -> None:
    store = await open_store(url, clock="server")
    await find_nothing(store)
    await put_one(store, new("locked", due=In(10)))
    async with database.holding(url, "locked"):
        await find_nothing_for_long(store)
    assert keys((await found(store)).tasks) == ["locked"]


async def test_a_lost_lease_is_found(url: str, open_store: OpensStore, rarely_full: None) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    await find_nothing(store)
    await put_one(other, new(due=In(0)))
    [held] = (await lease(other, lasts=500)).tasks
    leased = await found(store)
    assert [(one.attempt, one.losses) for one in leased.tasks] == [(2, 1)]
    not_before(leased.now, held.wake_at, "another's lease")


async def test_what_lies_further_back_is_found_in_the_background(
    database: Database, url: str, open_store: OpensStore, rarely_full: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "SHARE", 1)
    monkeypatch.setattr(mysql, "LONGEST_TRANSACTION", 5_000)
    store = await open_store(url, clock="server")
    await find_nothing(store)
    await put_one(store, new("by hand", due=In(HOUR)))
    database.ask(url, f"UPDATE {{task}} SET at = at - {HOUR + MINUTE}")
    assert keys((await found(store)).tasks) == ["by hand"]


async def test_a_worker_that_begins_where_a_full_scan_takes_longer_than_a_call_may_begins_late(
    database: Database, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 0.0)
    monkeypatch.setattr(LIMITS[database.name], "EXPENSIVE", 1_000.0)
    store = await open_store(url, clock="server")
    await put(store, new("k", due=In(0)), new("before", topic="other", due=In(0)))
    assert len((await lease(store, topic="other")).tasks) == 1, "from now on the caller is known"
    call, scans = CALLS[database.name], []
    timed = call.timed

    async def slow(self: Any, *said: Any, **more: Any) -> Any:
        if str(said[0]).startswith("lease") or any(b"SKIP LOCKED" in one for one in said if isinstance(one, bytes)):
            scans.append(said)
            await pause(0.7, why="longer than a call may take")
        return await timed(self, *said, **more)

    monkeypatch.setattr(call, "timed", slow)
    store._open().connections["lease"]._silence = 0.5
    assert keys((await lease(store, 5, lasts=HOUR)).tasks) == ["k"]
    assert len(scans) >= 2


async def test_what_appears_far_back_is_found_by_the_next_full_scan(
    database: Database, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS[database.name], "EXPENSIVE", 1_000.0)
    store = await open_store(url, clock="server")
    assert (await lease(store, 5)).tasks == []
    await put(store, *(new(str(number), due=In(0)) for number in range(20)))
    assert len((await lease(store, 15, lasts=HOUR)).tasks) == 15, "with more to come"
    assert len((await lease(store, 15, lasts=HOUR)).tasks) == 5
    await put_one(store, new("late", due=In(0)))
    database.ask(url, f"UPDATE {{task}} SET at = at - {HOUR} WHERE {database.key} = 'late'")
    assert keys((await found(store)).tasks) == ["late"]
