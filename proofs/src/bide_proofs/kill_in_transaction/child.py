"""A client that places orders, each with its timer in one transaction; or a worker that runs their timers.

`Tables` holds the orders and the effects of their timers, in each kind of database; `judge` compares them with the
clients' reports.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from bide.app import Bide
from bide.core.errors import BadInput, StoreError
from bide.core.tasks import Task
from bide.settings import Settings
from bide.wiring import address_of
from bide_bench.sql_server import POSTGRES, SCHEMES, MysqlServer, PostgresServer, SqlServer
from bide_bench.worker import send
from bide_proofs.harness.processes import ready, spec_of, told_to_end

TOPIC = "orders.close"
LEASE = 2.0
"""Seconds after which the tasks of a dead worker are due again."""
_LONGEST_DELAY = 1.0
_SIDE_BY_SIDE = 4
PLACED, EFFECT = "placed", "effect"
BEGUN, COMMITTED, ROLLED_BACK = "begun", "committed", "rolled back"
"""The states of an order that a client reports."""
KINDS = ("lost_order", "kept_order", "not_fired", "fired_twice", "fired_uncommitted", "left", "process_ended")


class SqliteFile:
    """A file, with the interface of the benchmark's `SqlServer`."""

    @staticmethod
    @asynccontextmanager
    async def connected(path: str) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)) as connection:
            yield connection

    @staticmethod
    async def ask(connection: sqlite3.Connection, statement: str) -> Sequence[Any]:
        if statement in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):  # these may wait for other processes
            await asyncio.to_thread(connection.execute, statement)
            return ()
        return connection.execute(statement).fetchall()


class Tables:
    """The two tables of a run. Raises BadInput for a store that shares no database with its callers."""

    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        self.begins = "BEGIN"
        self._kind: type[SqlServer] | type[SqliteFile]
        self._address: Any
        if parts.scheme in SCHEMES:
            self._kind, quote = (PostgresServer, '"') if parts.scheme in POSTGRES else (MysqlServer, "`")
            self._address = address_of(url)
            self._name = f"{quote}{self._address.schema}{quote}.{name}"
        elif parts.scheme == "sqlite":
            self._kind, self._name, self.begins = SqliteFile, name, "BEGIN IMMEDIATE"
            self._address = unquote(parts.path.removeprefix("/"))
        else:
            accepted = "postgresql:, mysql: or sqlite:, whose tasks share a database with orders"
            raise BadInput("store", parts.scheme, accepted)

    def connected(self) -> AbstractAsyncContextManager[Any]:
        """A caller's own connection, which commits each statement unless a transaction was begun."""
        return self._kind.connected(self._address)

    async def ask(self, connection: Any, statement: str) -> Sequence[Any]:
        """The rows of a statement, in the connection's current transaction."""
        return await self._kind.ask(connection, statement)

    async def write(self, connection: Any, table: str, number: int) -> None:
        """Insert a row, in the connection's current transaction."""
        await self.ask(connection, f"INSERT INTO {self._name}_{table} VALUES ({number:d})")

    async def make(self) -> None:
        """Create the tables. Effects have no key, so that a duplicate is visible."""
        async with self.connected() as connection:
            await self.ask(connection, f"CREATE TABLE {self._name}_{PLACED} (number integer PRIMARY KEY)")
            await self.ask(connection, f"CREATE TABLE {self._name}_{EFFECT} (number integer NOT NULL)")

    async def numbers(self, table: str) -> list[int]:
        """All rows of a table."""
        async with self.connected() as connection:
            return [number for (number,) in await self.ask(connection, f"SELECT number FROM {self._name}_{table}")]

    async def drop(self) -> None:
        async with self.connected() as connection:
            for table in (PLACED, EFFECT):
                await self.ask(connection, f"DROP TABLE IF EXISTS {self._name}_{table}")


def judge(
    said: Mapping[int, str],
    orders: Iterable[int],
    effects: Sequence[int],
    left: Iterable[str] = (),
    ended: Iterable[str] = (),
) -> dict[str, list[str]]:
    """The failures, by kind. `said` has the last report about each order; `effects` has an order for each row."""
    there = set(orders)
    fired = Counter(effects)
    wrong: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number, word in said.items():
        if word == COMMITTED and number not in there:
            wrong["lost_order"].append(f"order {number} is not there, though its commit was answered")
        if word == ROLLED_BACK and number in there:
            wrong["kept_order"].append(f"order {number} is there, though it was rolled back")
    wrong["not_fired"] += [f"the timer of order {number} did not fire" for number in sorted(there - fired.keys())]
    for number, times in sorted(fired.items()):
        if times > 1:
            wrong["fired_twice"].append(f"order {number} has {times} effects")
        if number not in there:
            wrong["fired_uncommitted"].append(f"the timer of order {number} fired, and there is no such order")
    wrong["left"] += [f"task {key} is still there" for key in left]
    wrong["process_ended"] += list(ended)
    return wrong


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of a process: the first line of its standard input."""

    url: str
    tables: str
    orders: list[int] | None = None
    """For a client, the orders that it places; None for a worker."""


def app_on(url: str) -> Bide:
    """Make an app with the shipped defaults except for leases, whatever the environment says.

    On a slow machine, workers may be killed repeatedly before they have done anything; no task may be dead for that.
    """
    return Bide(url, settings=Settings(lease=int(LEASE * 1000), losses=1_000_000, keep_done=0, keep_cancelled=0))


async def _work(spec: Spec) -> None:
    app, tables = app_on(spec.url), Tables(spec.url, spec.tables)

    @app.handler(TOPIC)
    async def close(task: Task[Any]) -> None:
        async with task.transaction() as connection:
            await tables.write(connection, EFFECT, int(task.key))

    async with app, app.worker():
        ready()
        await told_to_end()


async def _place(spec: Spec) -> None:
    tables, chance, left = Tables(spec.url, spec.tables), random.Random(), iter(spec.orders or ())

    async def place(connection: Any) -> None:
        for number in left:
            send(order=(number, BEGUN))
            await tables.ask(connection, tables.begins)
            try:
                await tables.write(connection, PLACED, number)
                delay = timedelta(seconds=chance.uniform(0, _LONGEST_DELAY))
                await app.using(connection).schedule(TOPIC, key=f"{number}", group=f"order-{number}", delay=delay)
            except StoreError:  # on SQLite, other processes may write for a long time
                await tables.ask(connection, "ROLLBACK")
                send(order=(number, ROLLED_BACK))
                continue
            commits = chance.random() < 0.5
            await tables.ask(connection, "COMMIT" if commits else "ROLLBACK")
            send(order=(number, COMMITTED if commits else ROLLED_BACK))

    async with app_on(spec.url) as app:
        ready()
        async with AsyncExitStack() as stack:
            own = [await stack.enter_async_context(tables.connected()) for _ in range(_SIDE_BY_SIDE)]
            await asyncio.gather(*map(place, own))


if __name__ == "__main__":
    given = spec_of(Spec)
    asyncio.run((_work if given.orders is None else _place)(given))
