"""Calls that join a transaction of the caller's on PostgreSQL, and their plans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import asyncpg
import psycopg
import pytest
import pytest_asyncio
from tests.cancelling import each_await
from tests.stores.postgres.connections import KINDS, by_asyncpg, by_psycopg, sqlalchemys
from tests.stores.postgres.test_plans import Surveyed, offences
from tests.stores.sql.callers import by_sqlalchemy_async
from tests.stores.sql.database import Postgres
from tests.stores.sql.fixtures import OpensStore, Shop
from tests.waiting import until

from bide import BadInput, Bide, OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.records import Lease, NewTask, Record, Ref
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.schema import SCHEMA
from bide.stores.sql import transactions
from bide.stores.sql.transactions import MOST
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import LEASE, NOW, done, look, new, put, put_one, take


async def test_within_a_pipeline_of_psycopg_it_says_what_to_do(shop: Shop) -> None:
    async with by_psycopg()(shop.url) as caller:

        def work() -> None:
            with caller.given.pipeline():
                caller.given.execute(f"INSERT INTO {shop.orders} VALUES (1)")
                with pytest.raises(SetupError, match="pipeline"):
                    shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            caller.given.commit()

        await caller.run(work)
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])


async def test_a_psycopg_that_has_no_raw_cursor_yet(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psycopg, "RawCursor")
    async with by_psycopg()(shop.url) as caller:
        new = [shop.app.new("order.close", "100 % of $1, %s", key=key, delay="1h") for key in ("1", "a%(p1)s $2")]
        assert [answer.result for answer in await caller.verb(shop.app, "schedule_many", new)] == ["created"] * 2
        assert (await caller.verb(shop.app, "fire_now", "order.close", "1")).result == "moved"
        await caller.commit()
    found = await shop.others.get("order.close", "a%(p1)s $2")
    assert found is not None
    assert found.payload == "100 % of $1, %s"


async def test_the_server_was_started_again_and_the_connection_is_newer_than_what_is_known(
    database: Postgres, own_server: Any, own_url: str
) -> None:
    database.migrate(own_url)
    app = Bide(own_url)
    async with app:
        own_server.kill()
        own_server.start()
        async with by_asyncpg(own_url) as caller:
            await caller.verb(app, "schedule", "order.close", key="1", delay="1h")
            await caller.commit()
        assert await app.get("order.close", "1") is not None


async def test_codecs_that_change_our_values_are_refused(shop: Shop) -> None:
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("json", schema="pg_catalog", encoder=str, decoder=str)
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("int8", schema="pg_catalog", encoder=str, decoder=str, format="text")
        with pytest.raises(BadInput, match="codecs"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


async def test_the_session_below_an_async_one_is_refused(shop: Shop) -> None:
    async with KINDS["SQLAlchemy AsyncSession, asyncpg"](shop.url) as caller, shop.app:
        with pytest.raises(BadInput, match="the AsyncSession or AsyncConnection itself"):
            await shop.app.using(caller.given.sync_session).schedule("order.close", key="1", delay="1h")


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg async", "SQLAlchemy AsyncSession, asyncpg"])
async def test_a_verb_that_is_cancelled_leaves_the_transaction_usable(
    database: Postgres, shop: Shop, kind: str
) -> None:
    await shop.others.schedule("order.close", key="held", delay="1h")
    async with KINDS[kind](shop.url) as caller, by_asyncpg(shop.url) as holder, shop.app:
        await holder.verb(shop.app, "fire_now", "order.close", "held")
        await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
        waiting = asyncio.ensure_future(caller.verb(shop.app, "cancel", "order.close", "held"))
        await until(lambda: database.ask(shop.url, "SELECT FROM pg_locks WHERE NOT granted"), "it to wait for the lock")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
        await caller.commit()
        await holder.rollback()
    assert (await shop.rows(), await shop.keys()) == (1, ["1", "held"])


async def test_the_first_verbs_of_a_session_may_be_concurrent_and_cancelled(shop: Shop) -> None:
    async with shop.app:
        for point in each_await():
            async with KINDS["SQLAlchemy AsyncSession, asyncpg"](shop.url) as caller:
                await point.cancel(shop.app.using(caller.given).get("order.close", "1"))
                schedule = partial(caller.verb, shop.app, "schedule", "order.close", delay="1h")
                await asyncio.gather(schedule(key=f"{point}"), schedule(key=f"{point}, too"))
                await caller.rollback()
        async with KINDS["SQLAlchemy AsyncSession, asyncpg"](shop.url) as caller:
            await asyncio.gather(*(caller.verb(shop.app, "get", "order.close", key) for key in "12"))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_at_a_stricter_level_what_somebody_has_changed_since_is_refused(shop: Shop, level: str) -> None:
    await shop.others.schedule("order.close", key="1", delay="1h")
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert await caller.verb(shop.app, "get", "order.close", "1") is not None
        await shop.others.reschedule("order.close", "1", delay="2h")
        await shop.others.schedule("order.close", key="2", delay="2h")
        with pytest.raises(StoreUnavailable, match="begin the transaction again") as raised:
            await caller.verb(shop.app, "cancel", "order.close", "1")
        assert getattr(raised.value.__cause__, "sqlstate", None) == "40001"
        with pytest.raises(StoreUnavailable, match="begin the transaction again"):
            await caller.verb(shop.app, "schedule", "order.close", key="2", delay="1h")
        assert (await caller.verb(shop.app, "schedule", "order.close", key="3", delay="1h")).result == "created"
        await caller.commit()
    assert await shop.keys() == ["1", "2", "3"]


async def test_a_rolled_back_wake_does_not_swallow_the_next(shop: Shop) -> None:
    async with by_sqlalchemy_async(sqlalchemys("asyncpg"), session=False)(shop.url) as caller, shop.app:
        heard: list[str] = []
        listening = await shop.others.store.listen(["order.close"], lambda topic, wake: heard.append(topic))  # type: ignore[attr-defined]
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="500ms")
        await caller.rollback()
        await shop.app.schedule("order.close", key="1", delay="500ms")
        await until(lambda: bool(heard), "notifications of what was scheduled after all")
        await listening.close()


ROWS = 200_000
JOINED = (
    "insert_tasks", "move_tasks", "lock_tasks", "write_tasks", "settle_done", "tasks_by_names", "page_by_name",
    "page_by_group", "page_of_state_0", "next_topic", "next_topic_of_group",
)  # fmt: skip
"""What a joined verb may run."""


@pytest_asyncio.fixture
async def callers(own_url: str) -> AsyncIterator[Any]:
    """A connection as it is when nobody has set anything, to empty tables that nobody will analyze by himself.

    To a server where nobody else is: after many changes of its catalogs a server makes every plan anew.
    """
    await SCHEMA.migrate(own_url)
    address = address_of(own_url)
    made = await asyncpg.connect(address.dsn)
    names = Names(address.schema, address.prefix)
    await made.execute(names.write("ALTER TABLE {task} SET (autovacuum_enabled = off)"))
    yield Surveyed(made, queries_of(address.schema, address.prefix, joined=True), names)
    await made.close()


async def test_no_statement_scans_the_table(callers: Surveyed) -> None:
    await callers.fill(ROWS)
    for statement in ("SELECT", "ANALYZE {task}"):
        await callers.execute(statement)
        await callers.forget()
        wrong = {query: found for query in JOINED if (found := offences(await callers.plan(query)))}
        assert not wrong, statement


async def test_plans_are_not_kept_from_an_empty_table(callers: Surveyed) -> None:
    """The server keeps one plan for all arguments, once it has planned five times; a verb wants none of these."""
    for query in (kept := ("write_tasks", "settle_done")):
        for _ in range(8):
            await callers.plan(query)
    await callers.fill(ROWS)
    unplanned, planned = [offences(await callers.plan(query)) for query in kept]
    assert planned, "else there was no need"
    assert not unplanned, "it finds rows by position, which needs no plan for their number"
    await callers.connection.execute("SET plan_cache_mode = force_custom_plan")
    wrong = {query: found for query in JOINED if (found := offences(await callers.plan(query)))}
    assert not wrong


async def test_a_verb_plans_anew_and_leaves_that_setting_as_it_was(url: str, store: Any) -> None:
    own = await asyncpg.connect(address_of(url).dsn)
    modes: list[str] = []
    joined = store.using(own)

    async def look(call: Any) -> None:
        modes.extend(await own.fetchval("SELECT ARRAY[current_setting('plan_cache_mode')]"))

    for before in ("auto", "force_generic_plan"):
        await own.execute(f"SET plan_cache_mode = {before}")
        async with own.transaction():
            await joined.read(look)
            assert await own.fetchval("SHOW plan_cache_mode") == before
        assert await own.fetchval("SHOW plan_cache_mode") == before
    assert modes == ["force_custom_plan"] * 2
    await own.close()


Opens = Callable[..., Any]


@pytest_asyncio.fixture
async def effects(url: str) -> AsyncIterator[Effects]:
    connection = await asyncpg.connect(address_of(url).dsn)
    effects = Effects(connection, f'"{address_of(url).schema}".effects')
    await connection.execute(f"CREATE TABLE {effects.name} (number integer)")
    yield effects
    await connection.execute(f"DROP TABLE {effects.name} CASCADE")
    await connection.close()


class Effects:
    """A table of the handler's, looked at from outside."""

    def __init__(self, connection: Any, name: str) -> None:
        self.connection = connection
        self.name = name

    async def write(self, connection: Any) -> None:
        await connection.execute(f"INSERT INTO {self.name} VALUES (1)")

    async def count(self) -> int:
        return int(await self.connection.fetchval(f"SELECT count(*) FROM {self.name}"))


async def completed(store: PostgresStore, held: Record, effects: Effects) -> None:
    async with store.transaction() as joined:
        await effects.write(joined.connection)
        assert await joined.settle([done(held)], now=NOW) == [True]


async def test_a_handler_may_take_its_time(store: Any) -> None:
    async with store.transaction() as joined:
        settings = dict(await joined.connection.fetch("SELECT name, setting FROM pg_settings"))
    assert settings["idle_in_transaction_session_timeout"] == "0"
    assert settings["enable_seqscan"] == "on"
    assert settings["transaction_isolation"] == "read committed"


async def test_what_one_handler_sets_takes_and_makes_is_not_the_next_ones(effects: Effects, store: Any) -> None:
    schema = effects.name.partition(".")[0]
    await effects.connection.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO pg_monitor; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO pg_monitor"
    )
    async with store.transaction() as joined:
        await joined.connection.execute("SET ROLE pg_monitor; SET work_mem = '64kB'; CREATE TEMP TABLE mine ()")
        await joined.connection.fetch("SELECT pg_advisory_lock(77)")
        await joined.connection.add_listener("theirs", print)
        pid = await joined.connection.fetchval("SELECT pg_backend_pid()")
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND pid = $1"
    assert await effects.connection.fetchval(locks, pid) == 0, "while nobody uses it"
    async with store.transaction() as joined:
        assert await joined.connection.fetchval("SELECT pg_backend_pid()") == pid
        assert await joined.connection.fetchval("SELECT current_user = session_user")
        assert await joined.connection.fetchval("SHOW work_mem") != "64kB"
        assert await joined.connection.fetchval("SELECT to_regclass('pg_temp.mine')") is None
        assert await joined.connection.fetch("SELECT pg_listening_channels()") == []
        assert await joined.connection.fetchval("SHOW tcp_keepalives_count") == "4"


async def test_connections_that_nobody_needs_are_let_go(
    url: str, open_store: OpensStore, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "KEPT", 0.1)
    store = await open_store(url)
    async with store.transaction() as joined:
        pid = await joined.connection.fetchval("SELECT pg_backend_pid()")
    there = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1"
    assert await effects.connection.fetchval(there, pid) == 1

    async def gone() -> Any:
        return not await effects.connection.fetchval(there, pid)

    await until(gone, "its connection to be ended")


async def test_so_many_at_a_time_and_the_others_wait(store: Any) -> None:
    open_now, most, release = 0, 0, asyncio.Event()

    async def transact() -> None:
        nonlocal open_now, most
        async with store.transaction():
            open_now += 1
            most = max(most, open_now)
            if open_now == MOST:
                asyncio.get_running_loop().call_later(0.05, release.set)  # no other is to get in by then
            await release.wait()
            open_now -= 1

    await asyncio.gather(*[transact() for _ in range(MOST + 5)])
    assert most == MOST


async def test_a_long_one_does_not_hold_up_the_leases_of_others_nor_its_own(store: Any) -> None:
    await put(store, new("a"), new("b"))
    first, second = await take(store), await take(store)
    effect = asyncio.Event()

    async def long() -> None:
        async with store.transaction() as joined:
            await joined.connection.execute("SELECT 1")
            await effect.wait()
            assert await joined.settle([done(first)], now=NOW + 10) == [True]

    running = asyncio.ensure_future(long())
    leases = [Lease(one.topic, one.key, one.token) for one in (first, second)]
    assert await store.extend(leases, now=NOW + 5, until=NOW + 5 + LEASE) == [True, True]
    assert not running.done()
    effect.set()
    await running
    assert await look(store, first) is None


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
async def test_who_ends_it_inside_is_told(effects: Effects, how: str, store: Any) -> None:
    await put_one(store)
    held = await take(store)

    async def end_it() -> None:
        async with store.transaction() as joined:
            await effects.write(joined.connection)
            await joined.connection.execute(how)
            await joined.settle([done(held)], now=NOW)

    with pytest.raises(SetupError, match="inside its block"):
        await end_it()
    assert await look(store, held) == held
    await completed(store, held, effects)


async def test_a_failed_statement_that_was_passed_over_is_told_of(store: Any) -> None:

    async def fail(*tasks: NewTask) -> None:
        async with store.transaction() as joined:
            with pytest.raises(asyncpg.DivisionByZeroError):
                await joined.connection.execute("SELECT 1 / 0")
            if tasks:
                await joined.add(tasks, now=NOW)

    with pytest.raises(SetupError, match="an earlier statement"):
        await fail(new("k"))
    with pytest.raises(SetupError, match="a statement inside failed"):
        await fail()


async def test_a_constraint_that_the_commit_looks_at_is_the_handlers_own_error(effects: Effects, store: Any) -> None:
    await put_one(store)
    held = await take(store)
    await effects.connection.execute(f"ALTER TABLE {effects.name} ADD UNIQUE (number) DEFERRABLE INITIALLY DEFERRED")
    await effects.write(effects.connection)
    with pytest.raises(asyncpg.UniqueViolationError):
        await completed(store, held, effects)
    assert await look(store, held) == held
    assert await effects.count() == 1


async def test_a_handler_may_have_savepoints_and_is_told_when_it_is_over(effects: Effects, store: Any) -> None:

    async def fail(joined: Any) -> None:
        async with joined.connection.transaction():
            await effects.write(joined.connection)
            await joined.add([new("undone")], now=NOW)
            await joined.connection.execute("SELECT 1 / 0")

    for _ in range(2):
        async with store.transaction() as joined:
            await effects.write(joined.connection)
            with pytest.raises(asyncpg.DivisionByZeroError):
                await fail(joined)
            async with joined.connection.transaction():
                await joined.add([new("k")], now=NOW)
    assert await effects.count() == 2
    assert await look(store, Ref("t", "undone")) is None
    assert await look(store, Ref("t", "k")) is not None
    async with store.transaction() as joined:
        pass
    with pytest.raises(SetupError, match="has ended"):
        await joined.add([new("k")], now=NOW)


async def test_a_cancelled_handler_leaves_nothing_open_and_a_commit_is_not_given_up(
    effects: Effects, store: Any
) -> None:
    await put_one(store)
    held = await take(store)
    slow = Slow(effects)

    async def work() -> None:
        async with store.transaction() as joined:
            await slow.write(joined.connection)
            await joined.settle([done(held)], now=NOW)
            if slow.sleeps:
                await joined.connection.execute("SELECT pg_sleep(600)")

    async def asleep(statement: str) -> Any:
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query LIKE $1"
        return await effects.connection.fetchval(sleeping, statement)

    cancelled = asyncio.ensure_future(work())
    await until(lambda: asleep("%pg_sleep(600)%"), "the handler to be under way")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await effects.count() == 0
    assert await look(store, held) == held
    slow.sleeps = False
    await effects.connection.execute(slow.at_commit)
    committing = asyncio.ensure_future(work())
    await until(lambda: asleep("COMMIT%"), "the commit to be under way")
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert await effects.count() == 1, "it was under way, and came to its end"
    assert await look(store, held) is None


class Slow:
    """Makes what happens at the commit take a second."""

    def __init__(self, effects: Effects) -> None:
        self.sleeps = True
        self.write = effects.write
        sleep = effects.name.replace("effects", "sleep_at_commit")
        self.at_commit = f"""
            CREATE OR REPLACE FUNCTION {sleep}() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {effects.name} DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION {sleep}()"""


async def test_what_cannot_be_found_out_is_said_to_be_unknown(
    effects: Effects, proxy: FaultProxy, through: Opens
) -> None:
    store = await through()
    await put_one(store)
    held = await take(store)
    opened = store._open()
    opened.connections["settle"].patience = opened.connections["settle"]._silence = 0.5

    def hurry(chunk: Any) -> Act:
        """What comes after this message gives up soon."""
        opened.transactions._silence = 0.5
        return Act.FORWARD

    async def complete() -> None:
        async with store.transaction() as joined:
            await effects.write(joined.connection)
            await joined.settle([done(held)], now=NOW)
            proxy.hook = hurry
            proxy.fault(Act.HOLD, when=lambda data: b"COMMIT;" in data, times=None)

    with pytest.raises(OutcomeUnknown):
        await complete()
    await proxy.heal()
