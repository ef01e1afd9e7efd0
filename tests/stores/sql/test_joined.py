"""Tasks on the caller's own connection: each kind that there is commits, rolls back and goes on after a failed verb."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import sqlalchemy
from tests.stores.mysql import connections as of_mysql
from tests.stores.postgres import connections as of_postgres
from tests.stores.sql.callers import Caller, Makes, by_sqlalchemy
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import Shop
from tests.waiting import until

from bide import BadInput, SetupError, StoreUnavailable
from bide.core.instants import At
from bide.stores.mysql import MySqlStore
from bide.stores.postgres import PostgresStore
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import NOW, done, lease, new, put, settle_all

CALLERS = [("postgres", kind) for kind in of_postgres.KINDS] + [("mysql", kind) for kind in of_mysql.KINDS]


@pytest_asyncio.fixture
async def caller(kind: str, database: Database, shop: Shop) -> AsyncIterator[Caller]:
    async with database.kinds[kind](shop.url) as made, AsyncExitStack() as opened:
        if not made.synchronous:
            await opened.enter_async_context(shop.app)
        yield made


of_each_kind = pytest.mark.parametrize(("database", "kind"), CALLERS, indirect=["database"])
of_each_driver = pytest.mark.parametrize(
    ("database", "kind"),
    [one for one in CALLERS if not one[1].startswith(("SQLAlchemy", "Django"))],  # these lend a driver's connection
    indirect=["database"],
)


@of_each_kind
async def test_a_commit_brings_both(shop: Shop, caller: Caller) -> None:
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    answer = await caller.verb(shop.app, "schedule", "order.close", {"n": 1}, key="1", group="ann", delay="15m")
    assert answer.result == "created"
    found = await caller.verb(shop.app, "get", "order.close", "1")
    assert found.payload == {"n": 1}
    assert found.token == answer.task.token
    assert (await shop.rows(), await shop.keys()) == (0, []), "nobody else sees either"
    await caller.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])
    assert [event.who for event in await shop.others.events("order.close", "1")] == ["ann"]


@of_each_kind
async def test_a_rollback_takes_both_back(shop: Shop, caller: Caller) -> None:
    """Also where a verb comes first: wrappers begin with the first statement of theirs, and know nothing of ours."""
    before = (await shop.others.schedule("order.close", key="old", delay="1h")).record
    assert (await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")).result == "created"
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    assert (await caller.verb(shop.app, "cancel", "order.close", "old")).result == "cancelled"
    await caller.rollback()
    assert (await shop.rows(), await shop.keys()) == (0, ["old"])
    after = await shop.others.get("order.close", "old")
    assert after is not None
    assert after.record == before
    assert await shop.others.events() == []


@of_each_driver
async def test_every_verb(shop: Shop, caller: Caller) -> None:
    app = shop.app

    async def verb(name: str, *args: Any, **kwargs: Any) -> Any:
        answers = await caller.verb(app, name, *args, **kwargs)
        if isinstance(answers, list):
            return [str(one.result) if hasattr(one, "result") else one for one in answers]
        return str(answers.result)

    new = [app.new("order.close", key=key, group="g", delay="1h") for key in "abc"]
    assert await verb("schedule_many", new) == ["created"] * 3
    assert await verb("schedule", "order.close", key="a", delay="2h") == "replaced"
    assert await verb("schedule", "order.close", key="a", delay="3h", on_conflict="keep") == "kept"
    assert await verb("schedule", "order.close", key="a", delay="3h", on_conflict="refuse") == "refused"
    assert await verb("reschedule", "order.close", "a", delay="3h") == "moved"
    assert await verb("fire_now", "order.close", "a") == "moved"
    assert await verb("reschedule_many", [(("order.close", "a"), "1h")]) == ["moved"]
    assert await verb("fire_many", [("order.close", "a")]) == ["moved"]
    assert await verb("shift", "g", "1h") == ["moved", "moved"]
    assert await verb("redrive", "order.close", "z") == "not_found"
    assert await verb("cancel_group", "g") == ["cancelled", "cancelled"]
    assert await verb("cancel_many", [("order.close", "a"), ("order.close", "z")]) == ["cancelled", "not_found"]
    assert await verb("get_many", [("order.close", "a")]) == [None]
    await caller.commit()
    assert await shop.keys() == []


@of_each_kind
async def test_a_verb_that_fails_leaves_the_transaction_usable(shop: Shop, caller: Caller) -> None:
    """Refused by us, or by the server, which without a savepoint would be the end of the transaction."""
    both = [shop.app.new("order.close", key=key, delay="1h") for key in ("ok", "ok?")]
    both[1] = msgspec.structs.replace(both[1], key="a\ud800")
    shop.database.ask(shop.url, f"ALTER TABLE {{task}} ADD CONSTRAINT never CHECK ({shop.database.key} <> 'never')")
    try:
        await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
        with pytest.raises(BadInput):
            await caller.verb(shop.app, "schedule_many", both)
        with pytest.raises(StoreUnavailable, match="never"):
            await caller.verb(shop.app, "schedule", "order.close", key="never", delay="1h")
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
        await caller.commit()
    finally:
        shop.database.ask(shop.url, "ALTER TABLE {task} DROP CONSTRAINT never")
    assert (await shop.rows(), await shop.keys()) == (1, ["1"]), "and of the failed ones nothing is left"


@pytest.mark.parametrize(
    ("database", "kind"), [("postgres", kind) for kind in of_postgres.KINDS], indirect=["database"]
)
async def test_in_a_failed_transaction_it_says_so(shop: Shop, caller: Caller) -> None:
    with pytest.raises(Exception, match="zero"):
        await caller.execute("SELECT 1 / 0")
    with pytest.raises(Exception) as raised:
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    assert isinstance(raised.value, SetupError) or "sqlalchemy" in type(raised.value).__module__
    await caller.rollback()
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")


@of_each_kind
async def test_a_closed_connection_is_refused_unless_it_opens_again(shop: Shop, caller: Caller, kind: str) -> None:
    await caller.close()
    if "Session" in kind or "Django" in kind:  # these open another by themselves
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
        return
    with pytest.raises((SetupError, BadInput)):
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")


SETTINGS = {"postgres": "SELECT name, setting FROM pg_settings", "mysql": "SHOW SESSION VARIABLES"}
MOVING = {"timestamp", "last_insert_id", "identity", "insert_id", "in_transaction", "warning_count", "statement_id"}
"""Variables of MySQL that change by themselves; and those of GTIDs and of random numbers."""


@of_each_driver
async def test_the_connection_is_left_as_it_was(shop: Shop, caller: Caller) -> None:
    settings = SETTINGS[shop.database.name]
    before = sorted(map(tuple, await caller.execute(settings)))
    for number in range(7):  # often enough for drivers and the server to keep plans
        await caller.verb(shop.app, "schedule", "order.close", key=f"{number}", delay="15m")
        await caller.verb(shop.app, "fire_now", "order.close", f"{number}")
    after = sorted(map(tuple, await caller.execute(settings)))
    changed = {str(name) for name, *value in set(after) ^ set(before)}
    assert {name for name in changed - MOVING if "gtid" not in name and "rand_seed" not in name} == set()
    await caller.commit()


# --- without a transaction around it

AUTOCOMMIT: dict[tuple[str, str], Makes] = {
    ("postgres", "asyncpg"): of_postgres.by_asyncpg_alone,
    ("postgres", "psycopg"): of_postgres.by_psycopg(autocommit=True),
    ("postgres", "SQLAlchemy"): by_sqlalchemy(of_postgres.sqlalchemys("psycopg"), session=False, level="AUTOCOMMIT"),
    ("postgres", "Django"): of_postgres.KINDS["Django"],
    ("mysql", "asyncmy"): of_mysql.by_asyncmy(autocommit=True),
    ("mysql", "PyMySQL"): of_mysql.by_pymysql(autocommit=True),
    ("mysql", "SQLAlchemy"): by_sqlalchemy(of_mysql.sqlalchemys("pymysql"), session=False, level="AUTOCOMMIT"),
    ("mysql", "Django"): of_mysql.KINDS["Django"],
}


@pytest.mark.parametrize(("database", "kind"), AUTOCOMMIT, indirect=["database"])
async def test_without_a_transaction_each_verb_is_one(shop: Shop, database: Database, kind: str) -> None:
    async with AUTOCOMMIT[database.name, kind](shop.url) as caller, AsyncExitStack() as opened:
        if kind == "Django":
            await caller.run(caller.given.set_autocommit, True)
        if not caller.synchronous:
            await opened.enter_async_context(shop.app)
        assert (await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")).result == "created"
        assert await shop.keys() == ["1"]
        assert (await caller.verb(shop.app, "cancel", "order.close", "1")).result == "cancelled"
        assert await shop.keys() == []


async def test_a_connection_to_another_server_is_refused(shop: Shop, database: Database, own_url: str) -> None:
    database.migrate(own_url)
    async with shop.app, database.somebody(own_url) as foreign:
        with pytest.raises(BadInput, match=r"another (database|server)"):
            await foreign.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
        assert [tuple(row) for row in await foreign.execute("SELECT 1")] == [(1,)], "and its transaction goes on"


async def test_the_wrong_kind_is_refused(shop: Shop, database: Database) -> None:
    said = {"postgres": "psycopg", "mysql": "PyMySQL"}[database.name]
    async with shop.app:
        wrong: Any
        for wrong in (sqlite3.connect(":memory:"), sqlalchemy.create_engine("sqlite://").connect()):
            with pytest.raises(BadInput, match=said):
                await shop.app.using(wrong).schedule("order.close", delay="1h")
            wrong.close()
        for wrong in (object(), None, "connection", sqlalchemy.create_engine("sqlite://")):
            with pytest.raises(BadInput, match=said):
                shop.app.using(wrong)


async def test_an_asynchronous_connection_is_not_for_synchronous_verbs(shop: Shop, database: Database) -> None:
    async with database.somebody(shop.url) as caller:
        await caller.execute("SELECT 1")
        with pytest.raises(SetupError, match="await"):
            await asyncio.to_thread(
                lambda: shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            )


async def test_a_read_only_transaction_is_refused(shop: Shop, database: Database) -> None:
    begin = {"postgres": "SET TRANSACTION READ ONLY", "mysql": "START TRANSACTION READ ONLY"}[database.name]
    async with database.somebody(shop.url) as caller, shop.app:
        await caller.execute(begin)
        with pytest.raises(SetupError, match="read-only"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
async def test_a_limit_of_the_session_on_what_is_read_is_refused(shop: Shop, database: Database) -> None:
    async with database.somebody(shop.url) as caller, shop.app:
        await caller.execute("SET sql_select_limit = 5")
        with pytest.raises(SetupError, match="sql_select_limit"):
            await caller.verb(shop.app, "cancel_group", "order-1")
        await caller.execute("SET sql_select_limit = DEFAULT")
        assert (await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")).ok


async def test_of_many_tasks_the_earliest_is_told(database: Database, store: Any) -> None:
    """They are written in parts, of which the first has it."""
    tasks = [new(str(number), due=At(NOW + number)) for number in range(database.at_once + 1)]
    async with store.transaction() as joined:
        await joined.add(tasks, now=NOW)
        assert joined.wakes == {"t": NOW}


@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
async def test_one_transaction_within_another_is_refused(shop: Shop) -> None:
    async with shop.app:
        store = shop.app.store
        assert isinstance(store, MySqlStore | PostgresStore)
        async with store.transaction():
            with pytest.raises(SetupError, match="a transaction is already open"):
                async with store.transaction():
                    pass
        async with store.transaction() as joined:
            await joined.add([new("k")], now=NOW)


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
async def test_a_handlers_transaction_knows_nothing_of_the_one_before(shop: Shop) -> None:
    async with shop.app:
        store = shop.app.store
        assert isinstance(store, MySqlStore)
        async with store.transaction() as joined:
            await joined.connection.query("SET SESSION sql_mode = '', time_zone = '+03:00', @mine = 1")
            await joined.connection.query("SELECT GET_LOCK('of a handler', 0)")
            first = joined.connection
        assert shop.database.ask(shop.url, "SELECT IS_FREE_LOCK('of a handler')")[0][0] == 1, "while nobody uses it"
        async with store.transaction() as joined:
            assert joined.connection is first
            async with joined.connection.cursor() as cursor:
                await cursor.execute("SELECT @@time_zone, @mine, 'ä'")
                assert await cursor.fetchall() == (("+00:00", None, "ä"),)
            await joined.connection.query("USE information_schema")
        async with store.transaction() as joined, joined.connection.cursor() as cursor:
            await cursor.execute("SELECT DATABASE()")
            assert await cursor.fetchall() != (("information_schema",),)
        with pytest.raises(SetupError, match="inside its block"):
            async with store.transaction() as joined:
                await joined.connection.commit()


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_a_commit_that_was_cut_is_known_to_be_done_or_not(
    act: Act, proxy: FaultProxy, through: Callable[..., Any], shop: Shop
) -> None:
    store = await through()
    outcomes = set()
    for place in range(40):
        await put(store, new(f"k{place}"))
        [held] = (await lease(store, 1)).tasks
        fault = None
        try:
            async with store.transaction() as joined:
                fault = proxy.fault(act, skip=place)
                await shop.database.execute(joined.connection, f"INSERT INTO {shop.orders} VALUES ({place})")
                assert await joined.settle([done(held)], now=NOW) == [True]
            committed = True
        except shop.database.not_done:
            committed = False
        assert fault is not None
        hits = fault.hits
        await proxy.heal()
        effects = shop.database.ask(shop.url, f"SELECT number FROM {shop.orders} WHERE number = {place}")
        assert len(effects) == committed, f"cut at message {place}"
        assert (await store.get([held.ref]) == [None]) is committed
        outcomes.add((committed, bool(hits)))
        if not committed:
            assert await settle_all(store, [done(held)]) == [True]
        if not hits:
            break
    else:
        raise AssertionError("the story has no end")
    assert (False, True) in outcomes
    if act is Act.LOSE_REPLY:
        assert (True, True) in outcomes, "a commit whose answer was lost was found to be done"


# --- what somebody else holds, or undoes


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_verb_waits_so_long_for_a_lock_and_the_transaction_goes_on(
    shop: Shop, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop.others.schedule("order.close", key="1", delay="1h")
    async with shop.app, database.somebody(shop.url) as holder, database.somebody(shop.url) as caller:
        opened: Any = shop.app.store._opened  # type: ignore[attr-defined]
        queries = opened.joined_queries
        begin = queries["begin_verb"].replace("10", "1")
        monkeypatch.setattr(opened, "joined_queries", {**queries, "begin_verb": begin})
        await holder.verb(shop.app, "reschedule", "order.close", "1", delay="2h")
        await caller.execute("SET LOCAL lock_timeout = 0")
        with pytest.raises(StoreUnavailable, match="another transaction holds the task"):
            await caller.verb(shop.app, "cancel", "order.close", "1")
        assert [tuple(row) for row in await caller.execute("SHOW lock_timeout")] == [("0",)]
        await caller.verb(shop.app, "schedule", "order.close", key="2", delay="1h")
        await caller.commit()
        await holder.rollback()
    assert await shop.keys() == ["1", "2"]


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
@pytest.mark.parametrize("kind", ["asyncmy", "aiomysql"])
async def test_after_a_deadlock_the_caller_has_to_roll_back(shop: Shop, database: Database, kind: str) -> None:
    for key in ("1", "2"):
        await shop.others.schedule("order.close", key=key, delay="1h")
    async with shop.app, database.kinds[kind](shop.url) as victim, database.somebody(shop.url) as winner:
        await victim.execute(f"INSERT INTO {shop.orders} VALUES (1)")
        await victim.verb(shop.app, "cancel", "order.close", "1")
        for number in range(10, 30):  # the server undoes who has written less
            await winner.execute(f"INSERT INTO {shop.orders} VALUES ({number})")
        await winner.verb(shop.app, "cancel", "order.close", "2")
        waiting = asyncio.create_task(winner.verb(shop.app, "cancel", "order.close", "1"))
        waits = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"  # innodb_trx is stale while it is read often
        await until(lambda: int(shop.database.ask(shop.url, waits)[0][1]), "the winner to wait for the victim")
        with pytest.raises(StoreUnavailable, match="Deadlock"):
            await victim.verb(shop.app, "cancel", "order.close", "2")
        await waiting
        await winner.rollback()
        await victim.execute(f"INSERT INTO {shop.orders} VALUES (2)")
        for _ in range(2):
            with pytest.raises(SetupError, match="roll back"):
                await victim.verb(shop.app, "schedule", "order.close", key="3", delay="1h")
        await victim.rollback()
        await victim.execute(f"INSERT INTO {shop.orders} VALUES (3)")
        await victim.verb(shop.app, "schedule", "order.close", key="3", delay="1h")
        await victim.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1", "2", "3"])


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_threads_may_share_a_connection(shop: Shop, database: Database) -> None:
    async with database.kinds["psycopg"](shop.url) as caller:

        def schedule(number: int) -> None:
            for place in range(10):
                key = f"{number}-{place}"
                shop.app.sync.using(caller.given).schedule("order.close", key=key, delay="1h")

        await asyncio.gather(*[asyncio.to_thread(schedule, number) for number in range(4)])
        await caller.commit()
    assert len(await shop.keys()) == 40
