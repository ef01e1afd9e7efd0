"""Scans of tables on SQL servers: what each reads, where it goes on, how it ends; lists and tallies of many topics.

Each scan is thorough here, where otherwise one a second is, and a full one is too expensive for another.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import patch

import pytest
from tests.stores.many_topics import asked_of_topics
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import not_before, pause, until

from bide import BadInput, Bide, Row, StoreUnavailable, TableSource
from bide.core.instants import In
from bide.core.records import Leased
from bide.stores.mysql import leasing as mysql
from bide.stores.mysql.connection import Call as MySqlCall
from bide.stores.postgres import leasing as postgres
from bide.stores.postgres.connection import Call as PostgresCall
from bide.stores.sql import leasing
from bide.stores.sql.leasing import SLACK, ScanPositions
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


def test_the_first_scan_is_thorough_and_the_next_goes_on() -> None:
    known = ScanPositions(used=True)
    assert known.begin({"t": 1}, NOW) == ([0], True)
    known.scanned(["t"], {})
    known.emptied(["t"], NOW)
    assert known.begin({"t": 1}, NOW) == ([NOW - SLACK], False)
    known.reached({"t": NOW - 5_000})
    assert known.begin({"t": 1}, NOW) == ([NOW - 5_000], False)
    known.note_wakes({"t": NOW - 6_000, "u": NOW})
    assert known.begin({"t": 1}, NOW) == ([NOW - 6_000], False)
    assert known.begin({"t": 1, "u": 1}, NOW) == ([NOW - 6_000, 0], True), "one that was never scanned"
    assert known.begin({"t": 1, "u": 1}, NOW) == ([NOW - 6_000, 0], True), "the one before has failed"
    known.scanned(["t", "u"], {})
    assert known.begin({"t": 1}, NOW)[1] is False


def test_what_is_told_of_while_a_scan_is_under_way_is_where_the_next_begins() -> None:
    known = ScanPositions(used=True, slack=100)
    known.begin({"t": 1, "u": 1}, NOW)
    known.scanned(["t", "u"], {})
    known.note_wakes({"t": NOW - 700, "u": NOW - 800})
    known.note_wakes({"t": NOW - 300})
    known.emptied(["t"], NOW)
    known.reached({"u": NOW - 20})
    assert known.begin({"t": 1, "u": 1}, NOW) == ([NOW - 700, NOW - 800], False), "it may not have seen them"
    known.emptied(["t"], NOW)
    known.reached({"u": NOW - 20})
    assert known.begin({"t": 1, "u": 1}, NOW) == ([NOW - 100, NOW - 20], False)


def test_a_scan_is_thorough_once_a_lease_has_ended_that_others_hold() -> None:
    known = ScanPositions(used=True)
    known.begin({"t": 1, "u": 1}, NOW)
    known.scanned(["t", "u"], {"t": NOW + 400})
    assert known.heads({"t": 1, "u": 1}, {"t": NOW + 300}, NOW, thorough=True) == {"t": NOW + 300}
    assert known.heads({"t": 1, "u": 1}, {"u": NOW + 9_000}, NOW, thorough=True) == {"t": NOW + 400, "u": NOW + 9_000}
    assert known.begin({"t": 1}, NOW + 399)[1] is False
    assert known.heads({"t": 1}, {"t": NOW + 9_000}, NOW + 399, thorough=False) == {"t": NOW + 400}
    assert known.begin({"u": 1}, NOW + 400)[1] is False, "there it is of no use"
    assert known.begin({"t": 1, "u": 1}, NOW + 400)[1] is True
    known.scanned(["u"], {})
    assert known.begin({"t": 1}, NOW + 400)[1] is True, "it was not among those"
    known.scanned(["t"], {})
    assert known.begin({"t": 1}, NOW + 401)[1] is False, "it is known of no other"
    assert known.heads({"t": 1}, {}, NOW, thorough=True) == {}
    assert NOW < known.heads({"t": 1}, {}, NOW, thorough=False)["t"] <= NOW + 1_000


def test_a_scan_for_heads_alone_is_thorough_and_needs_no_other_soon() -> None:
    known = ScanPositions(used=True)
    for _ in range(2):
        assert known.begin({"t": 0, "u": 0}, NOW)[1] is True
        known.scanned(["t", "u"], {})
    assert known.begin({"t": 0, "u": 1}, NOW)[1] is False
    assert known.heads({"t": 0, "u": 1}, {}, NOW, thorough=False).keys() == {"u"}


def test_where_the_callers_clock_counts_every_scan_is_thorough() -> None:
    known = ScanPositions(used=False)
    known.emptied(["t"], NOW)
    assert [known.begin({"t": 1}, NOW)[1] for _ in range(3)] == [True] * 3


async def test_an_ordinary_scan_does_not_say_that_there_are_none(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 600.0)
    store = await open_store(url, clock="server")
    await put_one(store, new(due=In(0)))
    assert len((await lease(store, 5, lasts=HOUR)).tasks) == 1
    leased, heads = await lease(store, 5), await lease(store, 0)
    assert leased.next_wake is not None
    assert heads.next_wake is not None
    assert leased.now < leased.next_wake <= leased.now + 600_001, "when the next thorough scan is due"
    assert leased.next_wake < heads.next_wake, "a scan for heads alone is thorough"


DUE = "2020-01-01 08:00:00"
STOP = {"postgres": "SELECT pg_wal_replay_pause()", "mysql": "STOP SLAVE SQL_THREAD"}
GO_ON = {"postgres": "SELECT pg_wal_replay_resume()", "mysql": "START SLAVE SQL_THREAD"}


def watched(app: Bide, **options: Any) -> tuple[Any, list[int]]:
    """A watch, and the ids that its handler is given."""
    given = {"table": "posts", "due": "due", "where": "status = 2", "changes": {"status": 3}}
    watch = app.watch(TableSource(**{**given, **options}))
    handled: list[int] = []

    @watch.handler
    async def publish(row: Row) -> None:
        handled.append(row.id)

    return watch, handled


async def test_a_replica_is_looked_at_and_what_fires_is_asked_for_on_the_primary(
    database: Database, starts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    primary, replica, _ = await database.pair(starts)
    primary.ask("CREATE TABLE posts (id integer PRIMARY KEY, status integer, due timestamp)")
    app = Bide("memory:")
    _, handled = watched(app, database=primary.url, reads=replica.url, dead={"status": 9})

    def add(*numbers: int) -> None:
        for number in numbers:
            primary.ask(f"INSERT INTO posts VALUES ({number}, 2, '{DUE}')")

    async def follows() -> None:
        there = "SELECT id, status FROM posts ORDER BY id"
        await until(lambda: replica.ask(there) == primary.ask(there), "the replica to follow")

    await until(lambda: _has(replica, "posts"), "the table")
    async with app:
        [loop] = app.table_loops()
        await loop.open()
        try:
            assert await loop.run_once() == (0, None)
            replica.ask(STOP[database.name])
            add(1)
            assert await loop.run_once() == (0, None), "it is late"
            replica.ask(GO_ON[database.name])
            add(2, 3)
            await follows()
            replica.ask(STOP[database.name])
            primary.ask("UPDATE posts SET status = 1 WHERE id = 2")
            for _ in range(3):  # all three are due still on the replica
                await loop.run_once()
            assert sorted(handled) == [1, 3]
            assert sorted(map(tuple, primary.ask("SELECT id, status FROM posts"))) == [(1, 3), (2, 1), (3, 3)]
            assert (loop.stats.fired, loop.stats.failed) == (2, 0)
            replica.ask(GO_ON[database.name])
            add(4)
            await follows()
            table: Any = loop._table
            table._time.saw(0, 0.0, 0.0)  # as if this machine's clock had parted from the primary's meanwhile
            table._connections.answered = -math.inf
            await loop.run_once()
            assert sorted(handled) == [1, 3, 4]
            await asyncio.to_thread(replica.kill)
            with pytest.raises(StoreUnavailable, match=str(replica.port)):
                await loop.run_once()
        finally:
            await loop.stop(0)


def _has(server: Any, table: str) -> bool:
    [row] = server.ask(f"SELECT count(*) FROM information_schema.tables WHERE table_name = '{table}'")
    return bool(row[0])


@pytest.mark.parametrize(
    "reads",
    ["redis://:secret@h", "sqlite:///x", "nothing", "postgresql+x://u:secret@h", "mysql://u:secret@h/d?nothing=1"],
)
async def test_a_replica_is_one_of_the_same_kind(database: Database, url: str, reads: str) -> None:
    if database.name == "postgres" and reads.startswith("mysql"):
        reads = "mysql://u:secret@h/d"
    app = Bide("memory:")
    watched(app, database=url, reads=reads)
    async with app:
        with pytest.raises(BadInput) as raised:
            app.table_loops()
    assert raised.value.field == "reads"
    assert "secret" not in str(raised.value)


async def test_what_is_asked_does_not_grow_with_the_topics(url: str, open_store: OpensStore) -> None:
    """P11: but for the tally, by a few statements for some hundred topics."""
    with (
        patch.object(PostgresCall, "fetch", autospec=True, side_effect=PostgresCall.fetch) as fetched,
        patch.object(MySqlCall, "send", autospec=True, side_effect=MySqlCall.send) as sent,
    ):
        found = await asked_of_topics(
            await open_store(url), lambda: fetched.call_count + sum(len(call.args) - 1 for call in sent.call_args_list)
        )
    assert found[1][:2] == found[100][:2] == found[1_000][:2]
    assert found[1_000][2] <= found[1][2] + 12
