"""Strategies on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from bide_lab.strategy import Setting, Strategy


class PostgresStrategy(Strategy):
    """One connection pool, and tables whose names all begin with the cell's prefix."""

    needs: ClassVar[Sequence[str]] = ("postgres",)
    connections: ClassVar[int] = 8
    """Of one process, at most."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.pool: Any = None
        """An asyncpg pool."""

    async def open(self) -> None:
        import asyncpg

        self.pool = await asyncpg.create_pool(
            self.setting.urls["postgres"], min_size=1, max_size=self.connections, command_timeout=60
        )

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()

    def table(self, name: str) -> str:
        return f"{self.setting.prefix}_{name}"

    async def clear(self) -> None:
        found = await self.pool.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND starts_with(tablename, $1)",
            f"{self.setting.prefix}_",
        )
        for one in found:
            await self.pool.execute(f'DROP TABLE "{one["tablename"]}"')


def changed(status: str) -> bool:
    """Whether a statement changed a row, by what the server says of it: "UPDATE 1"."""
    return not status.endswith(" 0")
