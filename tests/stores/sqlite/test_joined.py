"""Transactions that tasks and the caller's data share: both or neither, and clear words for what cannot be."""

# ruff: noqa: ASYNC240 - a test may look at a path

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing

import apsw
import pytest
from tests.waiting import forever

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import At, In
from bide.core.records import Filter, Move, Page, Ref, Result, State
from bide.stores.sqlite import SqliteStore, connection, transactions
from bide.testing.store_suite.base import KEPT, NOW, SECOND, done, listed, look, new, put, put_one, see, take


def theirs(path: str, **options: object) -> sqlite3.Connection:
    opened = sqlite3.connect(path, **options)  # type: ignore[call-overload]
    opened.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)")
    opened.commit()
    assert isinstance(opened, sqlite3.Connection)
    return opened


def orders(path: str) -> list[int]:
    with closing(theirs(path)) as opened:
        return [number for (number,) in opened.execute("SELECT number FROM orders ORDER BY number")]


async def test_what_a_handler_sets_in_its_session_is_not_the_next_ones(store: SqliteStore) -> None:
    async with store.transaction() as open_one:
        first = open_one.connection
        first.execute("SELECT count(*) FROM bide_task").fetchone()
    async with store.transaction() as open_one:
        assert open_one.connection is first, "what is of the transaction alone leaves nothing behind"
        first.execute("CREATE TEMP TABLE bide_task (number)")
        first.execute("PRAGMA query_only = ON")
        first.isolation_level = "DEFERRED"
    async with store.transaction() as open_one:
        await open_one.add([new("k")], now=NOW)
        assert open_one.connection.isolation_level is None
    assert [task.key for task in await listed(store, Filter())] == ["k"]


async def test_a_cancelled_handler_leaves_nothing_behind(store: SqliteStore) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with store.transaction() as open_one:
            await open_one.add([new("never")], now=NOW)
            inside.set()
            await forever()

    for _ in range(5):
        handler = asyncio.create_task(work())
        await inside.wait()
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        inside.clear()
    for turns in range(8):  # wherever it is on its way in
        handler = asyncio.create_task(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
    await put_one(store)
    assert [record.key for record in await listed(store, Filter())] == ["k"]


async def test_several_event_loops_share_a_store_and_its_transactions(store: SqliteStore) -> None:
    async def work(name: str) -> None:
        for number in range(10):
            record = await put_one(store, new(f"{name} {number}"))
            assert await see(store, record) == record
            async with store.transaction() as open_one:
                await open_one.add([new(f"{name} {number} joined")], now=NOW)

    threads = [threading.Thread(target=asyncio.run, args=(work(str(number)),)) for number in range(3)]
    for thread in threads:
        thread.start()
    await work("here")
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    assert len(await listed(store, Filter())) == 80


@pytest.mark.parametrize(
    "end",
    [
        lambda lent: lent.commit(),
        lambda lent: lent.rollback(),
        lambda lent: lent.close(),
        lambda lent: lent.executescript("SELECT 1"),
        lambda lent: lent.__enter__(),
    ],
)
async def test_the_lent_connection_refuses_to_end_the_transaction(
    store: SqliteStore, end: Callable[[sqlite3.Connection], object]
) -> None:
    async with store.transaction() as open_one:
        await open_one.add([new("kept")], now=NOW)
        with pytest.raises(SetupError, match="do not commit"):
            end(open_one.connection)
    assert await look(store, Ref("t", "kept"))


@pytest.mark.parametrize("statements", [["COMMIT"], ["ROLLBACK"], ["COMMIT", "BEGIN"], ["ROLLBACK", "BEGIN IMMEDIATE"]])
async def test_a_transaction_that_was_ended_inside_is_an_error(store: SqliteStore, statements: list[str]) -> None:
    async def work() -> None:
        async with store.transaction() as open_one:
            for statement in statements:
                open_one.connection.execute(statement)

    with pytest.raises(SetupError, match="committed or rolled back inside"):
        await work()
    await put_one(store)


async def test_what_was_lent_is_of_no_use_afterwards(store: SqliteStore) -> None:
    async with store.transaction() as open_one:
        open_one.connection.row_factory = sqlite3.Row
        open_one.connection.text_factory = bytes
        await open_one.add([new()], now=NOW)
        assert (await open_one.get([Ref("t", "k")]))[0] == (await open_one.find(Filter(), Page())).tasks[0]
    with pytest.raises(SetupError, match="has ended"):
        await open_one.add([new("late")], now=NOW)
    with pytest.raises(SetupError, match="has ended"):
        await open_one.get([Ref("t", "k")])
    async with store.transaction() as another:
        assert another.connection.row_factory is None
        assert another.connection.text_factory is str


async def test_a_transaction_within_a_transaction_is_an_error_and_no_deadlock(store: SqliteStore) -> None:
    async with store.transaction():
        with pytest.raises(SetupError, match="a transaction is already open"):
            async with store.transaction():
                pass


async def test_a_call_past_an_open_transaction_ends_by_itself(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.02)
    async with store.transaction() as open_one:
        await open_one.add([new("inside")], now=NOW)
        with pytest.raises(StoreUnavailable, match="a transaction of this process has been open"):
            await put_one(store, new("outside"))
    assert [record.key for record in await listed(store, Filter())] == ["inside"]


@pytest.mark.parametrize("isolation", ["", "IMMEDIATE"])
async def test_the_callers_connection_is_joined_and_the_caller_commits(
    store: SqliteStore, path: str, isolation: str
) -> None:
    await put(store, new(), new("other", due=In(SECOND)))
    held = await take(store)
    with closing(theirs(path, isolation_level=isolation)) as own:
        own.row_factory = sqlite3.Row
        own.text_factory = bytes
        verbs = store.using(own)
        assert verbs.connection is own
        own.execute("INSERT INTO orders VALUES (1)")
        assert await verbs.settle([done(held, keep_until=KEPT)], now=NOW) == [True]
        [moved] = await verbs.change([Move("t", "other", At(NOW + 5))], now=NOW)
        assert moved.result is Result.MOVED
        own.rollback()
        assert orders(path) == []
        assert await see(store, held) == held
        assert await verbs.settle([done(held, keep_until=KEPT)], now=NOW) == [True], "and it may come first"
        assert own.in_transaction
        own.execute("INSERT INTO orders VALUES (1)")
        own.commit()
        assert own.row_factory is sqlite3.Row
        assert own.text_factory is bytes
    assert orders(path) == [1]
    assert (await see(store, held)).state is State.DONE


async def test_on_a_connection_that_commits_by_itself_each_verb_is_whole(store: SqliteStore, path: str) -> None:
    with closing(theirs(path, isolation_level=None)) as own:
        verbs = store.using(own)
        await verbs.add([new("one")], now=NOW)
        assert not own.in_transaction
        assert await look(store, Ref("t", "one"))
        with pytest.raises(BadInput):
            await verbs.add([new("two"), new("lone \ud800")], now=NOW)
        assert not own.in_transaction
        assert await look(store, Ref("t", "two")) is None
        own.execute("BEGIN")
        await verbs.add([new("three")], now=NOW)
        own.execute("ROLLBACK")
        assert await look(store, Ref("t", "three")) is None
        assert own.execute("PRAGMA busy_timeout").fetchone() == (5000,), "its own setting is as it was"


async def test_a_joined_connection_waits_without_stopping_the_loop(
    store: SqliteStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(theirs(path, isolation_level=None)) as own:
        async with store.transaction() as open_one:
            await open_one.add([new("first")], now=NOW)
            waiting = asyncio.create_task(store.using(own).add([new("second")], now=NOW))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        monkeypatch.setattr(transactions, "PATIENCE", 0.01)
        async with store.transaction():
            with pytest.raises(StoreUnavailable, match="keeps the file locked"):
                await store.using(own).add([new("third")], now=NOW)
    assert len(await listed(store, Filter())) == 2


async def test_a_commit_that_fails_leaves_no_transaction_open(store: SqliteStore, path: str) -> None:
    with closing(theirs(path, isolation_level=None)) as own:
        own.executescript("""
            PRAGMA foreign_keys = ON;
            CREATE TABLE line (number REFERENCES orders DEFERRABLE INITIALLY DEFERRED);
            CREATE TRIGGER written AFTER INSERT ON bide_task BEGIN INSERT INTO line VALUES (404); END;
        """)
        with pytest.raises(BadInput, match="FOREIGN KEY"):
            await store.using(own).add([new("refused")], now=NOW)
        assert not own.in_transaction
        own.execute("DROP TRIGGER written")
        await store.using(own).add([new("answered")], now=NOW)
    assert [task.key for task in await listed(store, Filter())] == ["answered"]


async def test_a_transaction_that_began_with_reading_may_come_too_late(store: SqliteStore, path: str) -> None:
    with closing(theirs(path, isolation_level=None, timeout=0)) as own:
        own.execute("BEGIN")
        own.execute("SELECT * FROM orders").fetchall()
        await put_one(store)
        with pytest.raises(StoreUnavailable, match="BEGIN IMMEDIATE"):
            await store.using(own).add([new("late")], now=NOW)


async def test_connections_that_cannot_be_joined_are_refused_with_the_reason(store: SqliteStore, path: str) -> None:
    elsewhere = f"{path}-elsewhere"
    other_library = apsw.Connection(elsewhere)
    with pytest.raises(BadInput, match="two SQLite libraries"):
        store.using(other_library)
    other_library.close()
    for target in (elsewhere, ":memory:"):
        with closing(sqlite3.connect(target)) as foreign, pytest.raises(BadInput, match="the store's own file"):
            store.using(foreign)
    closed = sqlite3.connect(path)
    closed.close()
    with pytest.raises(BadInput, match="an open connection"):
        store.using(closed)
    with closing(sqlite3.connect(os.path.relpath(path))) as same:
        store.using(same)


async def test_a_connection_closed_meanwhile_is_an_error(store: SqliteStore, path: str) -> None:
    own = sqlite3.connect(path)
    verbs = store.using(own)
    own.close()
    with pytest.raises(SetupError, match="cannot be used"):
        await verbs.get([Ref("t", "k")])


async def test_closing_the_store_ends_an_open_transaction_without_effect(path: str) -> None:
    store = SqliteStore(path)
    await store.open()

    async def work() -> None:
        async with store.transaction() as open_one:
            await open_one.add([new("never")], now=NOW)
            await store.close()

    with pytest.raises(StoreUnavailable, match="was rolled back"):
        await work()
    await store.open()
    assert await listed(store, Filter()) == []
    await put_one(store)
    await store.close()
