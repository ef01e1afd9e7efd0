"""A verb on the caller's own connection, cancelled at whichever await: the connection is as it was, or closed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from tests.cancelling import each_await
from tests.stores.mysql import connections as of_mysql
from tests.stores.postgres import connections as of_postgres
from tests.stores.sql.callers import Makes
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore
from tests.stores.sql.shop import Shop

from bide.stores.driver_adapters import driver_of
from bide.stores.sql.transactions import MOST
from bide.testing.store_suite.base import NOW, new, put

KINDS: dict[tuple[str, str], tuple[Makes, Makes]] = {
    ("postgres", "asyncpg"): (of_postgres.by_asyncpg_alone, of_postgres.by_asyncpg),
    ("postgres", "psycopg"): (of_postgres.by_psycopg_async(autocommit=True), of_postgres.by_psycopg_async()),
    ("mysql", "asyncmy"): (partial(of_mysql.by_asyncmy, autocommit=True), of_mysql.by_asyncmy),
    ("mysql", "aiomysql"): (of_mysql.by_aiomysql(autocommit=True), of_mysql.by_aiomysql()),
}
"""Without a transaction, and in one."""
VERBS: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "schedule": lambda using: using.schedule("order.close", key="new", delay="1h"),
    "reschedule": lambda using: using.reschedule("order.close", "old", delay="2h"),
}
of_each_kind = pytest.mark.parametrize(("database", "kind"), KINDS, indirect=["database"])
each_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


@of_each_kind
@each_verb
async def test_no_transaction_is_left_open_and_what_is_answered_afterwards_stays(
    shop: Shop, database: Database, kind: str, verb: Callable[[Any], Coroutine[Any, Any, Any]]
) -> None:
    make, _ = KINDS[database.name, kind]
    await shop.others.schedule("order.close", key="old", delay="1h")
    async with shop.app:
        for point in each_await():
            async with make(shop.url) as caller:
                await point.cancel(verb(shop.app.using(caller.given)))
                driver = driver_of(caller.given)
                assert driver is not None
                if driver.closed:
                    continue
                assert not driver.in_transaction, point
                await caller.verb(shop.app, "schedule", "order.close", key=str(point), delay="1h")
            assert str(point) in await shop.keys(), point


@of_each_kind
@each_verb
async def test_a_transaction_goes_on_as_it_was(
    shop: Shop, database: Database, kind: str, verb: Callable[[Any], Coroutine[Any, Any, Any]]
) -> None:
    _, make = KINDS[database.name, kind]
    await shop.others.schedule("order.close", key="old", delay="1h")
    committed = 0
    async with shop.app:
        for point in each_await():
            async with make(shop.url) as caller:
                await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
                ended = await point.cancel(verb(shop.app.using(caller.given)))
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


async def test_a_transaction_of_our_own_leaves_no_lock_and_no_place_behind(
    database: Database, url: str, open_store: OpensStore
) -> None:
    store = await open_store(url)

    async def work() -> None:
        async with store.transaction() as joined:
            await joined.add([new("k")], now=NOW)

    for point in each_await():
        await point.cancel(work())
        await put(store, new("k"))  # else it would wait for a lock
        assert store._open().transactions.slots._value == MOST, point
