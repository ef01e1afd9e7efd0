"""The tables of the run in each kind of database: orders, and the effects of their timers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from bide.core.errors import BadInput

PLACED, EFFECT = "placed", "effect"


class Database(Protocol):
    """How a client and a handler write, and how the run reads."""

    async def connect(self) -> Any: ...

    async def begin(self, connection: Any) -> None: ...

    async def write(self, connection: Any, table: str, number: int) -> None:
        """A row, in the transaction that the connection is in."""
        ...

    async def end(self, connection: Any, how: str) -> None:
        """COMMIT or ROLLBACK."""
        ...

    async def run(self, *statements: str) -> list[Any]:
        """On a connection of its own, each committed by itself; the rows of the last."""
        ...


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


def tables(name: str) -> Sequence[str]:
    """What makes them. Effects have no key, so that one that is there twice can be seen."""
    return (
        f"CREATE TABLE {name}_{PLACED} (number integer PRIMARY KEY)",
        f"CREATE TABLE {name}_{EFFECT} (number integer NOT NULL)",
    )


class _Postgres:
    def __init__(self, url: str, name: str) -> None:
        from bide.stores.postgres.address import address_of

        self._dsn = address_of(url).dsn
        self._name = name

    async def connect(self) -> Any:
        import asyncpg

        return await asyncpg.connect(self._dsn)

    async def begin(self, connection: Any) -> None:
        await connection.execute("BEGIN")

    async def write(self, connection: Any, table: str, number: int) -> None:
        await connection.execute(f"INSERT INTO {self._name}_{table} VALUES ($1)", number)

    async def end(self, connection: Any, how: str) -> None:
        await connection.execute(how)

    async def run(self, *statements: str) -> list[Any]:
        connection = await self.connect()
        try:
            rows: list[Any] = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return [tuple(row) for row in rows]
        finally:
            await connection.close()


class _Mysql:
    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        self._place = {
            "host": parts.hostname or "localhost",
            "port": parts.port or 3306,
            "user": unquote(parts.username or "root"),
            "password": unquote(parts.password or ""),
            "db": unquote(parts.path.removeprefix("/")),
        }
        self._name = name

    async def connect(self) -> Any:
        import asyncmy

        return await asyncmy.connect(**self._place, autocommit=True)

    async def begin(self, connection: Any) -> None:
        await connection.begin()

    async def write(self, connection: Any, table: str, number: int) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute(f"INSERT INTO {self._name}_{table} VALUES (%s)", (number,))

    async def end(self, connection: Any, how: str) -> None:
        await (connection.commit() if how == "COMMIT" else connection.rollback())

    async def run(self, *statements: str) -> list[Any]:
        connection = await self.connect()
        try:
            async with connection.cursor() as cursor:
                for statement in statements:
                    await cursor.execute(statement)
                return [tuple(row) for row in await cursor.fetchall()]
        finally:
            await connection.ensure_closed()


class _Sqlite:
    def __init__(self, url: str, name: str) -> None:
        self._path = unquote(urlsplit(url).path.removeprefix("/"))
        self._name = name

    async def connect(self) -> Any:
        return sqlite3.connect(self._path, isolation_level=None, timeout=60, check_same_thread=False)

    async def begin(self, connection: Any) -> None:
        await asyncio.to_thread(connection.execute, "BEGIN IMMEDIATE")

    async def write(self, connection: Any, table: str, number: int) -> None:
        connection.execute(f"INSERT INTO {self._name}_{table} VALUES (?)", (number,))

    async def end(self, connection: Any, how: str) -> None:
        await asyncio.to_thread(connection.execute, how)

    async def run(self, *statements: str) -> list[Any]:
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=60)) as connection:
            rows: list[Any] = []
            for statement in statements:
                rows = connection.execute(statement).fetchall()
            return rows
