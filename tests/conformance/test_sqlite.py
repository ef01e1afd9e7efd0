"""The contract of a store, kept by SQLite: with the default durability, and several clients on one file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from bide.stores.sqlite import SqliteStore
from bide.testing.store_suite import StoreSuite


class TestSqlite(StoreSuite):
    durable: ClassVar[bool] = True

    async def make_store(self, tmp_path: Path) -> SqliteStore:
        return SqliteStore(str(tmp_path / "tasks.db"))
