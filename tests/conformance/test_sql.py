"""The contract of a store, kept by PostgreSQL, and by MySQL and MariaDB. The cells are apart, for another process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
import pytest_asyncio
from tests.conformance.others import Others
from tests.servers.clean_schemas import PostgresSchemas
from tests.servers.fixtures import Borrowed
from tests.stores.sql.database import Database, MySql, Postgres
from tests.waiting import PATIENCE

from bide.ports import Store
from bide.stores.postgres import PostgresStore
from bide.testing.store_suite.base import SuiteBase
from bide.testing.store_suite.calls import EveryCell


class SqlSuite(SuiteBase):
    durable: ClassVar[bool] = True
    prepared: ClassVar[set[str]] = set()
    """Where there is a table of the caller's already."""

    database: Database
    schemas: Borrowed
    own: str
    """The table of the caller's beside the store that was made last; MySQL makes none within a transaction."""

    async def make_store(self, tmp_path: Path) -> Store:
        url = self.schemas.url(tmp_path)
        self.own = self.database.beside(url, "texts")
        if url not in self.prepared:
            self.database.ask(url, f"CREATE TABLE IF NOT EXISTS {self.own} (text varchar(100))")
            self.prepared.add(url)
        store: Store = self.database.Store(url, clock="caller", silence=PATIENCE)
        return store

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[Any]:
        return self._transaction(self.schemas.url(tmp_path))

    @asynccontextmanager
    async def _transaction(self, url: str) -> AsyncIterator[Any]:
        async with self.database.somebody(url) as caller:
            try:
                yield caller.given
            except BaseException:
                await caller.rollback()
                raise
            await caller.commit()

    async def write_text(self, connection: Any, text: str) -> None:
        await self.database.execute(connection, f"INSERT INTO {self.own} VALUES ('{text}')")

    async def texts(self, tmp_path: Path) -> list[str]:
        return [text for (text,) in self.database.ask(self.schemas.url(tmp_path), f"SELECT text FROM {self.own}")]


class OnPostgres(SqlSuite):
    tells_what_is_taken: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def _clean_schemas(self, postgres_url: str, postgres_schemas: Borrowed) -> None:
        self.database, self.schemas = Postgres(postgres_url), postgres_schemas


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def open_postgres(
    postgres_url: str, _postgres_schemas: PostgresSchemas
) -> AsyncIterator[tuple[Store, Callable[[], Any]]]:
    """An open store, and what empties it."""
    with closing(Borrowed(_postgres_schemas)) as schemas, psycopg.connect(postgres_url, autocommit=True) as other:
        url = schemas.url()
        rows = Postgres(url).write(url, "DELETE FROM {task}; DELETE FROM {event}")
        store = PostgresStore(url, clock="caller", silence=PATIENCE)
        await store.open()
        yield store, lambda: other.execute(rows.encode())
        await store.close()


class TestPostgres(EveryCell):
    """Each cell finds the same store, empty: on a new connection PostgreSQL takes twenty times as long for the first
    statements as for the same again.
    """

    @pytest.fixture(autouse=True)
    def _open(self, open_postgres: tuple[Store, Callable[[], Any]]) -> None:
        self.kept, self.empty = open_postgres

    @pytest_asyncio.fixture(loop_scope="class")
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        yield self.kept
        self.empty()


class TestPostgresOthers(OnPostgres, Others): ...


class OnMySql(SqlSuite):
    hears_commits: ClassVar[bool] = False
    exact_ends: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _clean_schemas(self, mysql_url: str, mysql_schemas: Borrowed) -> None:
        self.database, self.schemas = MySql(mysql_url), mysql_schemas


class TestMySql(OnMySql, EveryCell): ...


class TestMySqlOthers(OnMySql, Others): ...
