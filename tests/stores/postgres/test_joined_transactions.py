"""A handler's transaction: the effect and the end of the task are one commit, whatever becomes of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide import Bide, Fixed, OutcomeUnknown, SetupError, Task
from bide.core.records import Lease, NewTask, Record, Ref
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of
from bide.stores.sql import transactions
from bide.stores.sql.transactions import MOST
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import LEASE, NOW, done, look, new, put, put_one, take

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


# --- in the app


async def test_effect_and_completion_are_one_commit_and_what_fails_is_done_again(url: str, effects: Effects) -> None:
    app, seen = Bide(url, keep_done="0s"), []

    @app.handler("order.close", retry=Fixed("1ms", tries=5))
    async def close(task: Task[None]) -> None:
        async with task.transaction() as connection:
            await effects.write(connection)
            await app.schedule("order.archive", key=task.key, delay="1d")
            seen.append((await effects.count(), await app.get("order.archive", "1") is not None))
            if task.attempt < 3:
                raise ConnectionError("away")

    async with app, app.worker(topics=["order.close"]) as worker:
        await close.schedule(None, key="1", delay="0s")
        await worker.until_empty()
        assert seen == [(0, True)] * 3, "inside it is there, and for nobody else"
        assert await effects.count() == 1
        assert await app.get("order.archive", "1") is not None
        assert await app.get("order.close", "1") is None


# --- what the connection is


async def test_a_handler_may_take_its_time(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    async with store.transaction() as joined:
        settings = dict(await joined.connection.fetch("SELECT name, setting FROM pg_settings"))
    assert settings["idle_in_transaction_session_timeout"] == "0"
    assert settings["enable_seqscan"] == "on"
    assert settings["transaction_isolation"] == "read committed"


async def test_what_one_handler_sets_is_not_the_next_ones(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    pids = set()
    for _ in range(3):
        async with store.transaction() as joined:
            assert await joined.connection.fetchval("SHOW work_mem") != "64kB"
            await joined.connection.execute("SET work_mem = '64kB'")
            pids.add(await joined.connection.fetchval("SELECT pg_backend_pid()"))
    assert len(pids) == 1, "it is the same connection all along"


async def test_neither_are_its_role_its_locks_nor_what_else_its_session_has(
    url: str, open_store: OpensStore, effects: Effects
) -> None:
    store = await open_store(url)
    schema = effects.name.partition(".")[0]
    await effects.connection.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO pg_monitor; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO pg_monitor"
    )
    async with store.transaction() as joined:
        await joined.connection.execute(
            "SET ROLE pg_monitor; SELECT pg_advisory_lock(77); CREATE TEMP TABLE mine (number integer)"
        )
        await joined.connection.add_listener("theirs", print)
        pid = await joined.connection.fetchval("SELECT pg_backend_pid()")
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND pid = $1"
    assert await effects.connection.fetchval(locks, pid) == 0, "while nobody uses it"
    async with store.transaction() as joined:
        assert await joined.connection.fetchval("SELECT pg_backend_pid()") == pid
        assert await joined.connection.fetchval("SELECT current_user = session_user")
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


async def test_so_many_at_a_time_and_the_others_wait(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
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


async def test_a_long_one_does_not_hold_up_the_leases_of_others_nor_its_own(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
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


# --- what is not allowed in it


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
async def test_who_ends_it_inside_is_told(url: str, open_store: OpensStore, effects: Effects, how: str) -> None:
    store = await open_store(url)
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


async def test_a_failed_statement_that_was_passed_over_is_told_of(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)

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


async def test_a_constraint_that_the_commit_looks_at_is_the_handlers_own_error(
    url: str, open_store: OpensStore, effects: Effects
) -> None:
    store = await open_store(url)
    await put_one(store)
    held = await take(store)
    await effects.connection.execute(f"ALTER TABLE {effects.name} ADD UNIQUE (number) DEFERRABLE INITIALLY DEFERRED")
    await effects.write(effects.connection)
    with pytest.raises(asyncpg.UniqueViolationError):
        await completed(store, held, effects)
    assert await look(store, held) == held
    assert await effects.count() == 1


async def test_a_handler_may_have_savepoints(url: str, open_store: OpensStore, effects: Effects) -> None:
    store = await open_store(url)

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


async def test_after_its_end_its_verbs_say_so(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    async with store.transaction() as joined:
        pass
    with pytest.raises(SetupError, match="has ended"):
        await joined.add([new("k")], now=NOW)


async def test_a_cancelled_handler_leaves_nothing_open_and_a_commit_is_not_given_up(
    url: str, open_store: OpensStore, effects: Effects
) -> None:
    store = await open_store(url)
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


# --- what becomes of it when the connection breaks


async def test_what_cannot_be_found_out_is_said_to_be_unknown(
    effects: Effects, proxy: FaultProxy, through: Opens
) -> None:
    store = await through()
    await put_one(store)
    held = await take(store)
    opened = store._open()
    opened.connections["keep"].patience = opened.connections["keep"]._silence = 0.5

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
