"""An open store on a file of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.waiting import PATIENCE

from bide.stores.sqlite import SqliteStore, connection, transactions


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tasks.db")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up a lock because the machine is slow; a test of that end sets its own."""
    monkeypatch.setattr(connection, "PATIENCE", PATIENCE)
    monkeypatch.setattr(transactions, "PATIENCE", PATIENCE)
    monkeypatch.setattr(connection.patiently, "__kwdefaults__", {"patience": PATIENCE})


@asynccontextmanager
async def opened(path: str, **options: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, **options)
    await store.open()
    yield store
    await store.close()


@pytest_asyncio.fixture
async def store(path: str) -> AsyncIterator[SqliteStore]:
    async with opened(path) as store:
        yield store
