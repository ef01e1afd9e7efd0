"""The contract of a store, kept by PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import asyncpg
import pytest
from tests.servers.fixtures import Borrowed
from tests.waiting import PATIENCE

from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of
from bide.testing.store_suite import StoreSuite


class TestPostgres(StoreSuite):
    durable: ClassVar[bool] = True
    tells_what_is_taken: ClassVar[bool] = True

    schemas: Borrowed
    own: str
    """The schema of the store that was made last, for a table of the caller's."""

    @pytest.fixture(autouse=True)
    def _clean_schemas(self, postgres_schemas: Borrowed) -> None:
        self.schemas = postgres_schemas

    async def make_store(self, tmp_path: Path) -> PostgresStore:
        url = self.schemas.url(tmp_path)
        self.own = f'"{address_of(url).schema}"'
        return PostgresStore(url, clock="caller", silence=PATIENCE)

    @asynccontextmanager
    async def _connected(self, tmp_path: Path) -> AsyncIterator[Any]:
        """A connection of the caller's."""
        connection = await asyncpg.connect(address_of(self.schemas.url(tmp_path)).dsn)
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def _transaction(self, tmp_path: Path) -> AsyncIterator[Any]:
        async with self._connected(tmp_path) as connection, connection.transaction():
            yield connection

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[Any]:
        return self._transaction(tmp_path)

    async def write_text(self, connection: Any, text: str) -> None:
        await connection.execute(f"CREATE TABLE IF NOT EXISTS {self.own}.texts (text text)")
        await connection.execute(f"INSERT INTO {self.own}.texts VALUES ($1)", text)

    async def texts(self, tmp_path: Path) -> list[str]:
        async with self._connected(tmp_path) as connection:
            if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{self.own}.texts"):
                return []
            return [text for (text,) in await connection.fetch(f"SELECT text FROM {self.own}.texts")]
