"""A client that places orders, each with its timer in one transaction; or a worker that carries out their timers.

`Tables` are the orders, and the effects of their timers, in each kind of database; `judge` compares them with what the
clients said.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from bide.app import Bide
from bide.core.errors import BadInput, StoreError
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.harness.processes import Parent, ready, run, say, spec_of

TOPIC = "orders.close"
LEASE = 2.0
"""Seconds after which what a dead worker held comes back."""
_LONGEST_DELAY = 1.0
_SIDE_BY_SIDE = 4
PLACED, EFFECT = "placed", "effect"
BEGUN, COMMITTED, ROLLED_BACK = "begun", "committed", "rolled back"
"""The words of a client about an order."""
KINDS = ("lost_order", "kept_order", "not_fired", "fired_twice", "fired_uncommitted", "left", "process_ended")


class Driver(NamedTuple):
    """How one kind of database is spoken to."""

    connect: Callable[[str], Awaitable[Any]]
    """Open a connection that commits each statement by itself, unless a transaction was begun."""
    execute: Callable[[Any, str], Awaitable[list[Any]]]
    """Run a statement; the rows of a SELECT."""
    begins: str = "BEGIN"


class Tables:
    """Two tables of a run. Raises BadInput for a store that shares no database with its callers."""

    def __init__(self, url: str, name: str) -> None:
        scheme = urlsplit(url).scheme
        if scheme not in _DRIVERS:
            raise BadInput("store", scheme, "postgresql:, mysql: or sqlite:, whose tasks share a database with orders")
        self.driver = _DRIVERS[scheme]
        self._url = url
        self._name = name

    async def connect(self) -> Any:
        """A connection of the caller's own."""
        return await self.driver.connect(self._url)

    async def write(self, connection: Any, table: str, number: int) -> None:
        """A row, in the transaction that the connection is in."""
        await self.driver.execute(connection, f"INSERT INTO {self._name}_{table} VALUES ({number:d})")

    async def make(self) -> None:
        """Effects have no key, so that one that is there twice can be seen."""
        await self._run(f"CREATE TABLE {self._name}_{PLACED} (number integer PRIMARY KEY)")
        await self._run(f"CREATE TABLE {self._name}_{EFFECT} (number integer NOT NULL)")

    async def numbers(self, table: str) -> list[int]:
        """All rows of a table."""
        return [number for (number,) in await self._run(f"SELECT number FROM {self._name}_{table}")]

    async def drop(self) -> None:
        for table in (PLACED, EFFECT):
            await self._run(f"DROP TABLE IF EXISTS {self._name}_{table}")

    async def _run(self, statement: str) -> list[Any]:
        connection = await self.connect()
        try:
            return await self.driver.execute(connection, statement)
        finally:
            ending = connection.close()
            if ending is not None:  # that of asyncpg is waited for
                await ending


async def _connect_postgres(url: str) -> Any:
    import asyncpg

    from bide.stores.postgres.connection import address_of

    return await asyncpg.connect(address_of(url).dsn)


async def _execute_postgres(connection: Any, statement: str) -> list[Any]:
    return [tuple(row) for row in await connection.fetch(statement)]


async def _connect_mysql(url: str) -> Any:
    import asyncmy

    parts = urlsplit(url)
    return await asyncmy.connect(
        host=parts.hostname or "localhost", port=parts.port or 3306, user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""), db=unquote(parts.path.removeprefix("/")), autocommit=True,
    )  # fmt: skip


async def _execute_mysql(connection: Any, statement: str) -> list[Any]:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return [tuple(row) for row in await cursor.fetchall()]


async def _connect_sqlite(url: str) -> Any:
    path = unquote(urlsplit(url).path.removeprefix("/"))
    return sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)


async def _execute_sqlite(connection: Any, statement: str) -> list[Any]:
    if statement in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):  # which may wait for others
        await asyncio.to_thread(connection.execute, statement)
        return []
    rows: list[Any] = connection.execute(statement).fetchall()
    return rows


_POSTGRES = Driver(_connect_postgres, _execute_postgres)
_MYSQL = Driver(_connect_mysql, _execute_mysql)
_DRIVERS: Mapping[str, Driver] = {
    "postgresql": _POSTGRES, "postgres": _POSTGRES, "mysql": _MYSQL, "mariadb": _MYSQL,
    "sqlite": Driver(_connect_sqlite, _execute_sqlite, begins="BEGIN IMMEDIATE"),
}  # fmt: skip


def judge(
    said: Mapping[int, str],
    orders: Iterable[int],
    effects: Sequence[int],
    left: Iterable[str] = (),
    ended: Iterable[str] = (),
) -> dict[str, list[str]]:
    """All that is wrong, by kind. `said`: of an order the last word of its client; `effects`: an order for each row."""
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
    """The first line of its standard input."""

    url: str
    tables: str
    orders: list[int] | None = None
    """Of a client: those that it places. A worker has none."""


def app_on(url: str) -> Bide:
    """With the shipped defaults but for leases, whatever the environment says.

    On a slow machine workers are killed again and again before they have done anything: no task is dead for that.
    """
    return Bide(url, settings=Settings(lease=int(LEASE * 1000), losses=1_000_000, keep_done=0, keep_cancelled=0))


async def _work(spec: Spec, parent: Parent) -> None:
    app, tables = app_on(spec.url), Tables(spec.url, spec.tables)

    @app.handler(TOPIC)
    async def close(task: Task[Any]) -> None:
        async with task.transaction() as connection:
            await tables.write(connection, EFFECT, int(task.key))

    async with app, app.worker():
        ready()
        await parent.over.wait()


async def _place(spec: Spec, parent: Parent) -> None:
    tables, chance, left = Tables(spec.url, spec.tables), random.Random(), iter(spec.orders or ())
    execute, begins = tables.driver.execute, tables.driver.begins

    async def place(connection: Any) -> None:
        for number in left:
            say(order=(number, BEGUN))
            await execute(connection, begins)
            try:
                await tables.write(connection, PLACED, number)
                delay = timedelta(seconds=chance.uniform(0, _LONGEST_DELAY))
                await app.using(connection).schedule(TOPIC, key=f"{number}", group=f"order-{number}", delay=delay)
            except StoreError:  # on SQLite others may write for long
                await execute(connection, "ROLLBACK")
                say(order=(number, ROLLED_BACK))
                continue
            commits = chance.random() < 0.5
            await execute(connection, "COMMIT" if commits else "ROLLBACK")
            say(order=(number, COMMITTED if commits else ROLLED_BACK))

    async with app_on(spec.url) as app:
        ready()
        await asyncio.gather(*[place(await tables.connect()) for _ in range(_SIDE_BY_SIDE)])


if __name__ == "__main__":
    given = spec_of(Spec)
    run(lambda parent: (_work if given.orders is None else _place)(given, parent))
