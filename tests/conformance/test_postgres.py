"""The contract of a store, kept by PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar
from zlib import crc32

import pytest

from bide.stores.postgres import PostgresStore, schema
from bide.testing.store_suite import StoreSuite


class TestPostgres(StoreSuite):
    durable: ClassVar[bool] = True

    url: str

    @pytest.fixture(autouse=True)
    def _own_schemas(self, postgres_url: str, postgres_schema: str) -> None:
        self.url = f"{postgres_url}?schema={postgres_schema}"

    async def make_store(self, tmp_path: Path) -> PostgresStore:
        url = f"{self.url}_{crc32(str(tmp_path).encode()):x}"
        await schema.migrate(url)
        return PostgresStore(url, clock="caller")
