"""The contract of a store, kept by MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import asyncmy
import pytest
from tests.servers.fixtures import Borrowed
from tests.waiting import PATIENCE

from bide.stores.mysql import MySqlStore
from bide.stores.mysql.connection import address_of
from bide.testing.store_suite import StoreSuite
from bide_proofs.servers.mariadb import ask


class TestMySql(StoreSuite):
    durable: ClassVar[bool] = True
    hears_commits: ClassVar[bool] = False
    exact_ends: ClassVar[bool] = False

    schemas: Borrowed
    own: str
    """A table of the caller's beside the store that was made last; none can be made within a transaction here."""

    prepared: ClassVar[set[str]] = set()
    """Where that table is."""

    @pytest.fixture(autouse=True)
    def _clean_schemas(self, mysql_schemas: Borrowed) -> None:
        self.schemas = mysql_schemas

    async def make_store(self, tmp_path: Path) -> MySqlStore:
        url = self.schemas.url(tmp_path)
        self.own = f"`{address_of(url).schema}`.texts"
        if url not in self.prepared:
            ask(url, f"CREATE TABLE IF NOT EXISTS {self.own} (text varchar(100)) ENGINE = InnoDB")
            self.prepared.add(url)
        return MySqlStore(url, clock="caller", silence=PATIENCE)

    @asynccontextmanager
    async def _connected(self, tmp_path: Path) -> AsyncIterator[Any]:
        """A connection of the caller's."""
        url = self.schemas.url(tmp_path)
        parts, address = urlsplit(url), address_of(url)
        connection = await asyncmy.connect(
            host=parts.hostname, port=parts.port or 3306, user=parts.username, password=parts.password or "",
            database=address.schema,
        )  # fmt: skip
        try:
            yield connection
        finally:
            await connection.ensure_closed()

    @asynccontextmanager
    async def _transaction(self, tmp_path: Path) -> AsyncIterator[Any]:
        async with self._connected(tmp_path) as connection:
            await connection.begin()
            try:
                yield connection
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[Any]:
        return self._transaction(tmp_path)

    async def write_text(self, connection: Any, text: str) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute(f"INSERT INTO {self.own} VALUES (%s)", [text])

    async def texts(self, tmp_path: Path) -> list[str]:
        async with self._connected(tmp_path) as connection, connection.cursor() as cursor:
            await cursor.execute("SELECT text FROM texts")
            return [text for (text,) in await cursor.fetchall()]
