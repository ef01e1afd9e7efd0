"""Errors of a SQL server: full disks, failovers, clocks that differ, calls that are cancelled.

The tables lie on a small file system of their own, while the server's log of changes has room: without that, the server
itself stops, whatever a client does. On a disk without a single free page PostgreSQL refuses a lease too, since every
change of a row is a new row to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from types import ModuleType
from typing import Any

import asyncpg
import pytest
from asyncmy.errors import OperationalError
from tests.cancelling import each_await
from tests.stores.mysql import connections as of_mysql
from tests.stores.postgres import connections as of_postgres
from tests.stores.sql.callers import Makes
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore, Shop
from tests.waiting import PATIENCE, until

from bide.core.errors import BadInput, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.instants import At, In
from bide.core.records import Cancel, Filter, Leased, Move, Ref, Result
from bide.stores.driver_adapters import driver_of
from bide.stores.mysql import connection as mysql
from bide.stores.postgres import connection as postgres
from bide.stores.resending import Lost, NotSent
from bide.stores.sql import dialect as kinds
from bide.stores.sql.transactions import MOST
from bide.testing.store_suite.base import (
    HOUR,
    NOW,
    add_all,
    do,
    done,
    hold,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    see,
    settle,
    settle_all,
)
from bide_proofs.servers.disk import Disk


def reported(code: str) -> asyncpg.PostgresError:
    error = asyncpg.PostgresError.new({"C": code, "M": "it says"})
    assert isinstance(error, asyncpg.PostgresError)
    return error


def meaning(error: Exception, *, adding: bool = False) -> Exception:
    if isinstance(error, OperationalError):
        return mysql.meaning(error, "db", adding=adding)
    return postgres.meaning(error, "db", adding=adding)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (reported("40001"), kinds.TransactionConflict, ""),
        (reported("40P01"), kinds.TransactionConflict, ""),
        (reported("25006"), NotSent, ""),
        (reported("57P03"), NotSent, ""),
        (reported("57P01"), Lost, ""),
        (reported("53100"), StoreUnavailable, "free some of its disk"),
        (reported("XX001"), StoreCorrupt, "restore a backup"),
        (reported("42P01"), StoreMismatch, "bide migrate"),
        (reported("42703"), StoreMismatch, "bide migrate"),
        (reported("42501"), StoreUnavailable, "grant"),
        (reported("28P01"), StoreUnavailable, "password"),
        (reported("3D000"), StoreUnavailable, "create the database"),
        (reported("26000"), StoreUnavailable, "pooler=transaction"),
        (reported("XX000"), StoreUnavailable, "it says"),
        (OperationalError(1213, "it says"), kinds.TransactionConflict, ""),
        (OperationalError(1205, "it says"), kinds.LockTimeout, ""),
        (OperationalError(1290, "it says"), NotSent, ""),
        (OperationalError(1792, "it says"), NotSent, ""),
        (OperationalError(1040, "it says"), NotSent, ""),
        (OperationalError(2003, "it says"), NotSent, ""),
        (OperationalError(2006, "it says"), Lost, ""),
        (OperationalError(2013, "it says"), Lost, ""),
        (OperationalError(1242, "it says"), kinds.AlreadyApplied, ""),
        (OperationalError(1062, "it says"), kinds.KeyTaken, ""),
        (OperationalError(1690, "it says"), kinds.RowsMissing, ""),
        (OperationalError(1114, "it says"), StoreUnavailable, "free some of its disk"),
        (OperationalError(1034, "it says"), StoreCorrupt, "restore a backup"),
        (OperationalError(1146, "it says"), StoreMismatch, "bide migrate"),
        (OperationalError(1054, "it says"), StoreMismatch, "bide migrate"),
        (OperationalError(1142, "it says"), StoreUnavailable, "grant"),
        (OperationalError(1045, "it says"), StoreUnavailable, "password"),
        (OperationalError(1665, "it says"), StoreUnavailable, "binlog_format"),
        (OperationalError(1406, "it says"), BadInput, "255 bytes"),
        (OperationalError(1105, "it says"), StoreUnavailable, "it says"),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else str(getattr(one, "sqlstate", None) or one),
)
def test_each_error_has_its_meaning(error: Exception, kind: type[Exception], said: str) -> None:
    found = meaning(error)
    assert type(found) is kind
    assert said in str(found)


@pytest.mark.parametrize("error", [reported("53100"), OperationalError(1021, "full"), OperationalError(1114, "full")])
def test_only_new_work_meets_a_full_store(error: Exception) -> None:
    assert type(meaning(error, adding=True)) is StoreFull


@pytest.mark.parametrize("errors", [postgres, mysql])
def test_what_is_ours_comes_back_as_it_is(errors: ModuleType) -> None:
    for error in (KeyError("a defect"), BadInput("a", 1, "b"), Lost("x")):
        assert errors.meaning(error, "db") is error
    for cut in (ConnectionResetError(), TimeoutError()):
        assert type(errors.meaning(cut, "db")) is Lost
    assert type(mysql.meaning(mysql.ProtocolError("cut in the middle"), "db")) is Lost


async def test_text_that_cannot_be_kept_is_refused_and_the_store_goes_on(database: Database, store: Any) -> None:
    for key in {"postgres": ("a\0b", "\ud800"), "mysql": ("a\0b", "\ud800", "x" * 201)}[database.name]:
        with pytest.raises(BadInput):
            await add_all(store, [new(key)])
    await put_one(store)


async def test_names_are_one_only_if_every_byte_is(store: Any) -> None:
    names = ["a", "a ", "A", "ä", "a\u0308", "ａ", "'", '"', "\\", "\\'", "a;b", "%s", ":key", "`"]
    refs = [Ref(topic, key) for topic in ("t", "t ", "T") for key in names]
    tasks = [new(key, topic=topic, group=f"{key} ", payload=key.encode(), options=key.encode()) for topic, key in refs]
    records = [await put_one(store, task) for task in tasks]
    assert await store.get(refs) == records
    assert [(one.payload, one.options) for one in records] == [(task.payload, task.options) for task in tasks]
    assert await store.get([Ref("t  ", "a"), Ref("t", "a  ")]) == [None, None]
    assert sorted(keys((await lease(store, 50, topic="t ")).tasks)) == sorted(names)
    assert keys(await listed(store, Filter(group="a "))) == ["a"] * 3


@pytest.fixture
def small_disk(database: Database, starts: Any) -> Iterator[tuple[str, Disk]]:
    """The URL of tables on a file system of 16 MiB, and that."""
    server = starts()
    url, place = database.apart(server)
    disk = Disk(16 << 20, account=server.account)
    disk.make(place)
    try:
        if not disk.mounted:
            pytest.skip(disk.refused)
        database.migrate(url)
        database.move(server, place)
        yield url, disk
    finally:
        server.kill()
        disk.remove()


async def test_new_work_is_refused_until_there_is_room(
    database: Database, small_disk: tuple[str, Disk], open_store: OpensStore
) -> None:
    url, disk = small_disk
    store = await open_store(url, migrate=False)
    stored = 0
    refused: StoreFull | None = None
    while refused is None:
        try:
            stored += len(await put(store, *(new(f"{stored + n}", payload=b"x" * 100) for n in range(500))))
        except StoreFull as error:
            refused = error
    assert "free some of its disk" in str(refused)
    assert stored > 1_000
    assert await look(store, Ref("t", f"{stored}")) is None, "a batch is refused as a whole"
    assert await look(store, Ref("t", f"{stored - 1}")) is not None
    if database.name == "mysql":
        assert (await do(store, Move("t", "2", At(NOW + HOUR)))).ok, "what is there can still be worked on"
    disk.size = 128 << 20
    disk.free()
    assert (await do(store, Cancel("t", "0"))).ok
    assert (await do(store, Move("t", "1", At(NOW + HOUR)))).ok
    left = stored - 2 - (database.name == "mysql")
    while held := (await lease(store, 2_000)).tasks:
        assert all(await settle_all(store, [done(one) for one in held]))
        left -= len(held)
    assert left == 0


async def test_a_promoted_replica_goes_on(database: Database, starts: Any, open_store: OpensStore) -> None:
    primary, replica, url = await database.pair(starts)
    store = await open_store(url, clock="server")
    await put(store, *(new(str(number), due=In(0)) for number in range(30)))
    held = (await lease(store, 10, lasts=HOUR)).tasks
    assert len(held) == 10
    assert await settle_all(store, [done(one) for one in held[:5]]) == [True] * 5
    primary.kill()
    adding = asyncio.create_task(add_all(store, [new("meanwhile", due=In(0))]))
    await until(lambda: store._open().connections["write"].resent >= 1, "the call to be sent again")
    await asyncio.to_thread(replica.promote)
    [answer] = await adding
    assert answer.result is Result.CREATED
    assert await settle_all(store, [done(one) for one in held[5:]]) == [True] * 5
    left = await listed(store, Filter())
    assert {one.key for one in left} == {str(n) for n in range(30)} - {one.key for one in held} | {"meanwhile"}
    taken = (await lease(store, 50)).tasks
    assert len(taken) == 21
    assert min(one.token for one in taken) > max(one.token for one in held)


WRONG = 86_400_000
"""A caller's clock in 1970."""
NEAR = PATIENCE * 1_000
"""Milliseconds, far less than that is wrong by."""


def there() -> int:
    """The server is on this machine."""
    return time.time_ns() // 1_000_000


async def test_delays_leases_and_extensions_go_by_the_server(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    clock = store.clock()
    assert clock is not None
    for now in (clock.now(), await store.time()):
        assert abs(now - there()) < NEAR
    far = await put_one(store, new("far", due=In(HOUR)), now=WRONG)
    assert abs(far.wake_at - there() - HOUR) < NEAR
    assert (await lease(store, now=WRONG + 2 * HOUR)).tasks == [], "not due there"
    record = await put_one(store, new(due=In(10)), now=WRONG)

    async def due() -> list[Leased]:
        leased = await lease(store, now=WRONG, lasts=HOUR)
        return [leased] if leased.tasks else []

    found: list[Leased] = await until(due, "what is due there")
    [leased] = found
    [held] = leased.tasks
    assert abs(held.wake_at - there() - HOUR) < NEAR
    assert abs(leased.now - there()) < NEAR
    assert held.token >= record.wake_at * 1_000
    assert await store.extend([hold(held)], now=WRONG, until=WRONG + 2 * HOUR) == [True]
    assert abs((await see(store, held)).wake_at - there() - 2 * HOUR) < NEAR
    assert await settle(store, done(held), now=WRONG)


KINDS: dict[tuple[str, str], tuple[Makes, Makes]] = {
    ("postgres", "asyncpg"): (of_postgres.by_asyncpg_alone, of_postgres.by_asyncpg),
    ("postgres", "psycopg"): (of_postgres.by_psycopg_async(autocommit=True), of_postgres.by_psycopg_async()),
    ("mysql", "asyncmy"): (of_mysql.by_asyncmy(autocommit=True), of_mysql.by_asyncmy()),
    ("mysql", "aiomysql"): (of_mysql.by_aiomysql(autocommit=True), of_mysql.by_aiomysql()),
}
"""Without a transaction, and in one."""
VERBS: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "schedule": lambda using: using.schedule("order.close", key="new", delay="1h"),
    "reschedule": lambda using: using.reschedule("order.close", "old", delay="2h"),
}
CASES = [
    *((*kind, "reschedule") for kind in KINDS),
    ("postgres", "asyncpg", "schedule"),
    ("mysql", "asyncmy", "schedule"),
]
cancelled = pytest.mark.parametrize(("database", "kind", "verb"), CASES, indirect=["database"])


@cancelled
async def test_no_transaction_is_left_open_and_what_is_answered_afterwards_stays(
    shop: Shop, database: Database, kind: str, verb: str
) -> None:
    make, _ = KINDS[database.name, kind]
    await shop.others.schedule("order.close", key="old", delay="1h")
    async with shop.app:
        for point in each_await():
            async with make(shop.url) as caller:
                await point.cancel(VERBS[verb](shop.app.using(caller.given)))
                driver = driver_of(caller.given)
                assert driver is not None
                if driver.closed:
                    continue
                assert not driver.in_transaction, point
                await caller.verb(shop.app, "schedule", "order.close", key=str(point), delay="1h")
            assert str(point) in await shop.keys(), point


@cancelled
async def test_a_transaction_goes_on_as_it_was(shop: Shop, database: Database, kind: str, verb: str) -> None:
    _, make = KINDS[database.name, kind]
    await shop.others.schedule("order.close", key="old", delay="1h")
    committed = 0
    async with shop.app:
        for point in each_await():
            async with make(shop.url) as caller:
                await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
                ended = await point.cancel(VERBS[verb](shop.app.using(caller.given)))
                driver = driver_of(caller.given)
                assert driver is not None
                if driver.closed:
                    continue
                if database.name == "postgres":
                    assert [tuple(row) for row in await caller.execute("SHOW plan_cache_mode")] == [("auto",)], point
                await caller.execute(f"INSERT INTO {shop.orders} VALUES (2)")
                await caller.commit()
                committed += 2
                assert await shop.rows() == committed, f"{point}: {ended}"


async def test_a_transaction_of_our_own_leaves_no_lock_and_no_place_behind(database: Database, store: Any) -> None:

    async def work() -> None:
        async with store.transaction() as joined:
            await joined.add([new("k")], now=NOW)

    for point in each_await():
        await point.cancel(work())
        await put(store, new("k"))  # else it would wait for a lock
        assert store._open().transactions.slots._value == MOST, point
