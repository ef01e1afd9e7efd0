"""The tables of a run in each kind of database: orders, and the effects of their timers."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import unquote, urlsplit

from bide.core.errors import BadInput

PLACED, EFFECT = "placed", "effect"


class Database(ABC):
    """How a client and a handler write, and how the run reads."""

    begins = "BEGIN"
    """The statement that begins a transaction."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    @abstractmethod
    async def connect(self) -> Any:
        """A connection on which each statement is committed by itself, unless a transaction was begun."""

    @abstractmethod
    async def execute(self, connection: Any, statement: str) -> list[Any]:
        """A statement; the rows of a SELECT."""

    @abstractmethod
    async def close(self, connection: Any) -> None: ...

    async def write(self, connection: Any, table: str, number: int) -> None:
        """A row, in the transaction that the connection is in."""
        await self.execute(connection, f"INSERT INTO {self.name}_{table} VALUES ({number:d})")

    async def make(self) -> None:
        """The tables. Effects have no key, so that one that is there twice can be seen."""
        await self._run(f"CREATE TABLE {self.name}_{PLACED} (number integer PRIMARY KEY)")
        await self._run(f"CREATE TABLE {self.name}_{EFFECT} (number integer NOT NULL)")

    async def numbers(self, table: str) -> list[int]:
        """All rows of a table."""
        return [number for (number,) in await self._run(f"SELECT number FROM {self.name}_{table}")]

    async def drop(self) -> None:
        """Remove the tables."""
        for table in (PLACED, EFFECT):
            await self._run(f"DROP TABLE IF EXISTS {self.name}_{table}")

    async def _run(self, statement: str) -> list[Any]:
        connection = await self.connect()
        try:
            return await self.execute(connection, statement)
        finally:
            await self.close(connection)


def database_of(url: str, name: str) -> Database:
    """By the scheme of the store's URL. Raises BadInput for a store that shares no database with its callers."""
    scheme = urlsplit(url).scheme
    if scheme in ("postgresql", "postgres"):
        return _Postgres(url, name)
    if scheme in ("mysql", "mariadb"):
        return _Mysql(url, name)
    if scheme == "sqlite":
        return _Sqlite(url, name)
    raise BadInput("store", scheme, "postgresql:, mysql: or sqlite:, whose tasks share a database with orders")


class _Postgres(Database):
    async def connect(self) -> Any:
        import asyncpg

        from bide.stores.postgres.address import address_of

        return await asyncpg.connect(address_of(self.url).dsn)

    async def execute(self, connection: Any, statement: str) -> list[Any]:
        if statement.startswith("SELECT"):
            return [tuple(row) for row in await connection.fetch(statement)]
        await connection.execute(statement)
        return []

    async def close(self, connection: Any) -> None:
        await connection.close()


class _Mysql(Database):
    async def connect(self) -> Any:
        import asyncmy

        parts = urlsplit(self.url)
        return await asyncmy.connect(
            host=parts.hostname or "localhost", port=parts.port or 3306, user=unquote(parts.username or "root"),
            password=unquote(parts.password or ""), db=unquote(parts.path.removeprefix("/")), autocommit=True,
        )  # fmt: skip

    async def execute(self, connection: Any, statement: str) -> list[Any]:
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
            return [tuple(row) for row in await cursor.fetchall()]

    async def close(self, connection: Any) -> None:
        await connection.ensure_closed()


class _Sqlite(Database):
    begins = "BEGIN IMMEDIATE"

    async def connect(self) -> Any:
        path = unquote(urlsplit(self.url).path.removeprefix("/"))
        return sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)

    async def execute(self, connection: Any, statement: str) -> list[Any]:
        if statement in (self.begins, "COMMIT", "ROLLBACK"):  # which may wait for others
            await asyncio.to_thread(connection.execute, statement)
            return []
        rows: list[Any] = connection.execute(statement).fetchall()
        return rows

    async def close(self, connection: Any) -> None:
        connection.close()
