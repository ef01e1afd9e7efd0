"""The common part of strategies on Redis, PostgreSQL, MariaDB or MySQL, and files of SQLite: connections and names."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from bide_lab.strategy import Strategy

_CONNECTIONS = 64
"""To Redis, of one process; who finds none free waits for one."""
_PATIENCE = 30.0
"""Seconds to connect: a machine that plays many cells at once may be slow, and that is no fault of a strategy."""


class RedisStrategy(Strategy):
    """One connection pool, and keys that all begin with the cell's prefix."""

    needs: ClassVar[Sequence[str]] = ("redis",)
    redis: Any
    """A plain asyncio client of redis-py."""

    async def open(self) -> None:
        from redis.asyncio import BlockingConnectionPool, Redis

        # without a time-out of the client's, so that a blocking pop may wait for as long as it likes
        pool = BlockingConnectionPool.from_url(
            self.setting.urls["redis"], max_connections=_CONNECTIONS, timeout=None,
            socket_timeout=None, socket_connect_timeout=_PATIENCE,
        )  # fmt: skip
        self.redis = await self.closing.enter_async_context(Redis.from_pool(pool))

    def key(self, name: str) -> str:
        return f"{self.setting.prefix}:{name}"

    async def popped(self, queue: str) -> AsyncIterator[str]:
        """Members of a list, each as soon as it is there."""
        while True:
            yield (await self.redis.blpop([queue], 0))[1].decode()

    async def clear(self) -> None:
        await unlink(self.redis, f"{self.setting.prefix}:*")


async def unlink(redis: Any, pattern: str) -> None:
    """Delete all keys that match, some at a time."""
    keys = [key async for key in redis.scan_iter(match=pattern, count=1000)]
    for begin in range(0, len(keys), 1000):
        await redis.unlink(*keys[begin : begin + 1000])


class _Tables(Strategy):
    """One connection pool, and tables whose names all begin with the cell's prefix."""

    connections: ClassVar[int]
    """Of one process, at most."""
    pool: Any
    """The driver's."""

    def table(self, name: str) -> str:
        return f"{self.setting.prefix}_{name}"


class PostgresStrategy(_Tables):
    """A pool of asyncpg."""

    needs: ClassVar[Sequence[str]] = ("postgres",)
    connections: ClassVar[int] = 8

    async def open(self) -> None:
        self.pool = await postgres_pool(self, self.connections, command_timeout=60)

    async def clear(self) -> None:
        found = await self.pool.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND starts_with(tablename, $1)",
            f"{self.setting.prefix}_",
        )
        for one in found:
            await self.pool.execute(f'DROP TABLE "{one["tablename"]}"')


async def postgres_pool(owner: Strategy, connections: int, **more: float) -> Any:
    """One that is closed with its owner."""
    import asyncpg

    pool = await asyncpg.create_pool(owner.setting.urls["postgres"], min_size=1, max_size=connections, **more)
    owner.closing.push_async_callback(pool.close)
    return pool


def changed(status: str) -> bool:
    """True if a statement changed a row, by the answer of PostgreSQL: "UPDATE 1"."""
    return not status.endswith(" 0")


class MysqlStrategy(_Tables):
    """A pool of asyncmy."""

    needs: ClassVar[Sequence[str]] = ("mysql",)
    connections: ClassVar[int] = 4

    async def open(self) -> None:
        self.pool = await self.pool_of(self.setting.urls[self.needs[0]])

    async def pool_of(self, url: str, place: str = "") -> Any:
        """Connections to the server of a URL, or to `place`, HOST:PORT, as the same user; closed with the strategy."""
        import asyncmy

        more = {"database": urlsplit(url).path.removeprefix("/"), "autocommit": True}
        if place:
            host, _, port = place.partition(":")
            more |= {"host": host, "port": int(port)}
        pool: Any = await asyncmy.create_pool(**{**mysql_server(url), **more}, minsize=1, maxsize=self.connections)
        self.closing.push_async_callback(pool.wait_closed)
        self.closing.callback(pool.close)
        return pool

    async def change(self, statement: str, *values: Any) -> int:
        """Rows that it changed."""
        async with self.pool.acquire() as connection, connection.cursor() as cursor:
            return int(await cursor.execute(statement, values))

    async def change_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for all rows, as the driver folds them."""
        async with self.pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.executemany(statement, rows)

    async def rows(self, statement: str, *values: Any, pool: Any = None) -> Sequence[Sequence[Any]]:
        """All that it finds, asked on a connection of `pool` if that is given."""
        async with (pool or self.pool).acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            found: Sequence[Sequence[Any]] = await cursor.fetchall()
            return found

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A cursor; committed at the end of the block, and rolled back if that is left in another way."""
        async with self.pool.acquire() as connection:
            await connection.begin()
            try:
                async with connection.cursor() as cursor:
                    yield cursor
                await connection.commit()
            except BaseException:
                connection.close()  # the server rolls back, and no half-read answer is left to the next
                raise

    async def clear(self) -> None:
        for (one,) in await self.rows("SHOW TABLES LIKE %s", f"{self.setting.prefix}\\_%"):
            await self.change(f"DROP TABLE `{one}`")


def sqlite_file(owner: Strategy, name: str) -> sqlite3.Connection:
    """A file of the cell, on a connection that is closed with its owner, and that threads may share.

    Statements on it take tens of microseconds: a thread for each would cost more than it saves.
    """
    file = sqlite3.connect(owner.setting.folder / name, timeout=10.0, isolation_level=None, check_same_thread=False)
    owner.closing.enter_context(closing(file))
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    return file


def mysql_server(url: str) -> Mapping[str, Any]:
    """The server and the user of a URL, as the driver takes them."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname or "127.0.0.1", "port": parts.port or 3306,
        "user": unquote(parts.username or "root"), "password": unquote(parts.password or ""),
    }  # fmt: skip
