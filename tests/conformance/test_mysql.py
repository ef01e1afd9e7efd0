"""The contract of a store, kept by MySQL and MariaDB."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar
from zlib import crc32

import pytest

from bide.stores.mysql import MySqlStore, schema
from bide.testing.store_suite import StoreSuite


class TestMySql(StoreSuite):
    durable: ClassVar[bool] = True

    url: str

    @pytest.fixture(autouse=True)
    def _own_schemas(self, mysql_url: str, mysql_schema: str) -> None:
        self.url = f"{mysql_url}?schema={mysql_schema}"

    async def make_store(self, tmp_path: Path) -> MySqlStore:
        url = f"{self.url}_{crc32(str(tmp_path).encode()):x}"
        await schema.migrate(url)
        return MySqlStore(url, clock="caller")
