"""An open store on a file of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bide.stores.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tasks.db")


@pytest_asyncio.fixture
async def store(path: str) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(path)
    await opened.open()
    yield opened
    await opened.close()
