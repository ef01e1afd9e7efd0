"""A business table in each kind of database, and an app whose tasks rest beside it."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
import pytest_asyncio

from bide import Bide, Sql, TableSource
from bide.core.instants import Millis, as_datetime
from bide.engine.tables import TableLoop
from bide.stores.postgres import schema
from bide.testing.clock import ManualClock

START: Millis = 1_800_000_000_000


class Place(ABC):
    """A database with a table of posts: status 1 is a draft, 2 scheduled, 3 published."""

    url: str
    table = "posts"
    holds_rows = True
    """Whether rows can be locked one by one; else one transaction keeps all others from writing."""

    def __init__(self) -> None:
        self.exits = AsyncExitStack()

    @abstractmethod
    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement by itself, with $1, $2, ... in it; the rows."""

    @abstractmethod
    def time(self, millis: Millis) -> Any:
        """An instant as a due column holds it."""

    @abstractmethod
    async def create(self, *, index: bool = True) -> None: ...

    def source(self, **options: Any) -> TableSource:
        given: dict[str, Any] = {
            "table": self.table, "due": "due", "where": "status = 2", "columns": ["title"],
            "changes": {"status": 3, "times": Sql("times + 1")},
        }  # fmt: skip
        return TableSource(**given | options)

    async def add(self, number: int, due: Millis | None, *, status: int = 2, title: str = "") -> None:
        await self.run(
            f"INSERT INTO {self.table} (id, title, status, due) VALUES ($1, $2, $3, $4)",
            number, title or f"post {number}", status, None if due is None else self.time(due),
        )  # fmt: skip

    async def add_many(self, first: int, count: int, due: Millis) -> None:
        await self.run(
            f"INSERT INTO {self.table} (id, title, status, due) WITH RECURSIVE n (n) AS "
            "(SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < $1 - 1) SELECT n + $2, 'many', 2, $3 FROM n",
            count, first, self.time(due),
        )  # fmt: skip

    async def states(self) -> dict[int, tuple[int, int]]:
        """Status and times fired, by number."""
        rows = await self.run(f"SELECT id, status, times FROM {self.table} ORDER BY id")
        return {number: (status, times) for number, status, times in rows}

    async def app(self, **options: Any) -> Bide:
        """An app whose tasks rest in the same database; open until the test ends."""
        app = Bide(self.url, **options)
        await app.open()
        self.exits.push_async_callback(app.close)
        return app

    async def loop(self, app: Bide) -> TableLoop:
        """The loop over the app's one table, for a test that moves the clock."""
        [loop] = app.table_loops()
        await loop.open()
        self.exits.push_async_callback(loop.stop, 0)
        return loop


class Sqlite(Place):
    holds_rows = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "blog.db"
        self.url = f"sqlite:///{quote(str(self.path))}"
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self.exits.callback(self._connection.close)

    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        given = {str(place): value for place, value in enumerate(values, 1)}
        return self._connection.execute(sql, given).fetchall()

    def time(self, millis: Millis) -> Any:
        return as_datetime(millis).isoformat(timespec="milliseconds")

    async def create(self, *, index: bool = True) -> None:
        self._connection.execute(
            "CREATE TABLE posts (id INTEGER PRIMARY KEY, title TEXT CHECK (title <> 'cursed' OR status < 3), "
            "status INTEGER, due TEXT, times INTEGER DEFAULT 0, wall TEXT, stamp INTEGER)"
        )
        self._connection.execute("CREATE TABLE log (id INTEGER)")
        if index:
            self._connection.execute("CREATE INDEX posts_due ON posts (due) WHERE status = 2")


class Postgres(Place):
    def __init__(self, url: str, own: str) -> None:
        super().__init__()
        self.plain = url
        self.url = f"{url}?schema={own}"
        self.own = own
        self.table = f"{own}.posts"
        self._connection: Any = None

    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = await asyncpg.connect(self.plain)
            self.exits.push_async_callback(self._connection.close)
        return [tuple(row) for row in await self._connection.fetch(sql, *values)]

    def time(self, millis: Millis) -> Any:
        return as_datetime(millis)

    async def create(self, *, index: bool = True) -> None:
        await schema.migrate(self.url)
        await self.run(
            f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, title text CHECK (title <> 'cursed' OR status < 3), "
            "status integer, due timestamptz, times integer DEFAULT 0, wall timestamp, stamp bigint)"
        )
        await self.run(f"CREATE TABLE {self.own}.log (id bigint)")
        if index:
            await self.run(f"CREATE INDEX posts_due ON {self.table} (due) WHERE status = 2")


def naive(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A database without the table."""
    place: Place
    if request.param == "sqlite":
        place = Sqlite(tmp_path)
    else:
        place = Postgres(request.getfixturevalue("postgres_url"), request.getfixturevalue("postgres_schema"))
    async with place.exits:
        yield place


@pytest_asyncio.fixture
async def place(empty: Place) -> Place:
    """A database with the table and its index."""
    with suppress(NotImplementedError):
        await empty.create()
    return empty
