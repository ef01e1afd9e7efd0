"""A business table in each kind of database, and an app whose tasks rest beside it."""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import asyncmy
import asyncpg
import pytest
import pytest_asyncio

from bide import Bide, Fixed, Sql, TableSource
from bide.core.instants import Millis, as_datetime
from bide.engine.delivery.tables import TableLoop
from bide.stores.mysql.schema import SCHEMA as MYSQL_SCHEMA
from bide.stores.postgres.schema import SCHEMA
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

    @property
    def log(self) -> str:
        """A table beside it that handlers write into."""
        return self.table.replace("posts", "log")

    @abstractmethod
    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement by itself, with $1, $2, ... in it; the rows."""

    async def changed(self, sql: str, *values: Any) -> int:
        """Run an UPDATE; of how many rows it was."""
        return len(await self.run(f"{sql} RETURNING id", *values))

    @abstractmethod
    def time(self, millis: Millis) -> Any:
        """An instant as a due column holds it."""

    due_type = "timestamptz"
    an_hour_on = "due + interval '1 hour'"
    """An expression: the time of a row, an hour later; or for a row that is due at START."""

    @abstractmethod
    async def create(self, *, index: bool = True) -> None: ...

    async def drop(self) -> None:
        """What `create` made: bide's tables stay there for others."""
        for table in (self.table, self.log):
            await self.run(f"DROP TABLE IF EXISTS {table} CASCADE")

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

    async def add_each(self, dues: Sequence[Millis]) -> None:
        """From number 1 on, in one statement."""
        rows = ", ".join(f"({number}, 'one', 2, '{self.time(due)}')" for number, due in enumerate(dues, 1))
        await self.run(f"INSERT INTO {self.table} (id, title, status, due) VALUES {rows}")

    @abstractmethod
    async def keep(self, title: str) -> None:
        """A trigger keeps rows of this title from being changed, in the way that is least noticed there."""

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

    async def watched(
        self, clock: ManualClock, handler: Any = None, *, concurrency: int = 1, **options: Any
    ) -> TableLoop:
        """The loop over a source with these options, whose rows rest for a minute after a failure."""
        app = await self.app(clock=clock)
        watch = app.watch(self.source(**options), retry=Fixed("1m", tries=9), concurrency=concurrency)
        if handler is not None:
            watch.handler(handler)
        return await self.loop(app)


class Sqlite(Place):
    holds_rows = False
    due_type = "text"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.an_hour_on = f"'{self.time(START + 3_600_000)}'"
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

    async def keep(self, title: str) -> None:
        self._connection.execute(
            f"CREATE TRIGGER keep BEFORE UPDATE ON posts WHEN OLD.title = '{title}' BEGIN SELECT RAISE(IGNORE); END"
        )


class OnServer(Place):
    """In a schema of the test's own."""

    def __init__(self, url: str, own: str) -> None:
        super().__init__()
        self.plain = url
        self.url = f"{url}?schema={own}"
        self.own = own
        self.table = f"{own}.posts"
        self._connection: Any = None


class Postgres(OnServer):
    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = await asyncpg.connect(self.plain)
            self.exits.push_async_callback(self._connection.close)
        return [tuple(row) for row in await self._connection.fetch(sql, *values)]

    def time(self, millis: Millis) -> Any:
        return as_datetime(millis)

    async def create(self, *, index: bool = True) -> None:
        await SCHEMA.migrate(self.url)
        await self.run(
            f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, title text CHECK (title <> 'cursed' OR status < 3), "
            "status integer, due timestamptz, times integer DEFAULT 0, wall timestamp, stamp bigint)"
        )
        await self.run(f"CREATE TABLE {self.log} (id bigint)")
        self.exits.push_async_callback(self.drop)
        if index:
            await self.run(f"CREATE INDEX posts_due ON {self.table} (due) WHERE status = 2")

    async def keep(self, title: str) -> None:
        await self.run(
            f"CREATE OR REPLACE FUNCTION {self.own}.keep() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF OLD.title = '{title}' THEN RETURN NULL; END IF; RETURN NEW; END $$"
        )
        await self.run(
            f"CREATE TRIGGER keep BEFORE UPDATE ON {self.table} FOR EACH ROW EXECUTE FUNCTION {self.own}.keep()"
        )


class Mysql(OnServer):
    due_type = "datetime(3)"
    an_hour_on = "due + INTERVAL 1 HOUR"

    async def _cursor(self, sql: str, values: Sequence[Any]) -> Any:
        if self._connection is None:
            parts = urlsplit(self.plain)
            self._connection = await asyncmy.connect(
                host=parts.hostname, port=parts.port or 3306, user=parts.username, password=parts.password or "",
                autocommit=True,
            )  # fmt: skip
            self.exits.push_async_callback(self._connection.ensure_closed)
        cursor = self._connection.cursor()
        await cursor.execute(re.sub(r"\$\d", "%s", sql), values)
        return cursor

    async def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = await self._cursor(sql, values)
        return list(await cursor.fetchall()) if cursor.description else []

    async def changed(self, sql: str, *values: Any) -> int:
        count: int = (await self._cursor(sql, values)).rowcount
        return count

    def time(self, millis: Millis) -> Any:
        return as_datetime(millis).replace(tzinfo=None)

    async def add_many(self, first: int, count: int, due: Millis) -> None:
        rows = ", ".join(f"({first + place}, 'many', 2, '{self.time(due)}')" for place in range(count))
        await self.run(f"INSERT INTO {self.table} (id, title, status, due) VALUES {rows}")

    async def create(self, *, index: bool = True) -> None:
        await MYSQL_SCHEMA.migrate(self.url)
        indexes = "".join(f", INDEX by_{column} (status, {column})" for column in ("due", "wall", "stamp"))
        await self.run(
            f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, title varchar(99), status integer, due datetime(3), "
            "times integer DEFAULT 0, wall datetime(3), stamp bigint, CHECK (title <> 'cursed' OR status < 3)"
            f"{indexes if index else ''})"
        )
        await self.run(f"CREATE TABLE {self.log} (id bigint)")
        self.exits.push_async_callback(self.drop)

    async def keep(self, title: str) -> None:
        # the tests' user may make no trigger; and no error is known by its number that a subquery with two rows gives
        await self.run(
            f"ALTER TABLE {self.table} ADD COLUMN spoilt int DEFAULT 0, ADD COLUMN checked int "
            f"GENERATED ALWAYS AS (IF(title = '{title}' AND status = 3, 1 DIV spoilt, 0)) STORED"
        )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest_asyncio.fixture(params=["sqlite", "postgres", "mysql"])
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A database without the table."""
    place: Place
    if request.param == "sqlite":
        place = Sqlite(tmp_path)
    else:
        url, _, query = request.getfixturevalue(f"{request.param}_schemas").url().partition("?")
        place = (Mysql if request.param == "mysql" else Postgres)(url, parse_qs(query)["schema"][0])
    async with place.exits:
        yield place


@pytest_asyncio.fixture
async def place(empty: Place) -> Place:
    """A database with the table and its index."""
    await empty.create()
    return empty
