"""The contract of a store, kept by SQLite: with the default durability, and several clients on one file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

from bide.core.records import Ref
from bide.stores.sqlite import SqliteStore
from bide.testing.store_suite import StoreSuite


class TestSqlite(StoreSuite):
    durable: ClassVar[bool] = True
    tells_what_is_taken: ClassVar[bool] = True

    async def make_store(self, tmp_path: Path) -> SqliteStore:
        return SqliteStore(str(tmp_path / "tasks.db"))

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[sqlite3.Connection]:
        return _transaction(tmp_path / "tasks.db")

    async def write_text(self, connection: sqlite3.Connection, text: str) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS texts (text TEXT)")
        connection.execute("INSERT INTO texts VALUES (?)", [text])

    async def texts(self, tmp_path: Path) -> list[str]:
        with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone():
                return []
            return [text for (text,) in connection.execute("SELECT text FROM texts ORDER BY rowid")]

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        async with _transaction(tmp_path / "tasks.db") as connection:
            connection.execute("UPDATE bide_task SET id = CAST(x'fffe' AS TEXT) WHERE topic = ? AND key = ?", ref)


@asynccontextmanager
async def _transaction(path: Path) -> AsyncIterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
