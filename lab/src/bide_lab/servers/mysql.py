"""Strategies on MariaDB or MySQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from bide_lab.strategy import Setting, Strategy


class MysqlStrategy(Strategy):
    """One connection pool, and tables whose names all begin with the cell's prefix."""

    needs: ClassVar[Sequence[str]] = ("mysql",)
    connections: ClassVar[int] = 4
    """Of one process, at most."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.pool: Any = None
        """An asyncmy pool."""

    async def open(self) -> None:
        self.pool = await self.pool_of(urlsplit(self.setting.urls[self.needs[0]]))

    async def pool_of(self, parts: SplitResult, place: str = "") -> Any:
        """Connections to what a URL names, or to `place`, HOST:PORT, as the same user."""
        import asyncmy

        host, _, port = place.partition(":")
        return await asyncmy.create_pool(
            host=host or parts.hostname or "127.0.0.1", port=int(port or 0) or parts.port or 3306,
            user=unquote(parts.username or "root"), password=unquote(parts.password or ""),
            database=parts.path.removeprefix("/"), autocommit=True, minsize=1, maxsize=self.connections,
        )  # fmt: skip

    async def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            await self.pool.wait_closed()

    def table(self, name: str) -> str:
        return f"{self.setting.prefix}_{name}"

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
