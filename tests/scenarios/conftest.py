"""What the scenarios share: a business database, and time that passes over tasks in the same file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from bide import Bide
from bide.stores.sqlite import SqliteStore
from bide.testing.time_machine import TimeMachine


class FileTimeMachine(TimeMachine):
    """A time machine whose tasks rest in a SQLite file, so that handlers can join its transactions."""

    def __init__(self, app: Bide, path: Path) -> None:
        super().__init__(app)
        self._store = SqliteStore(path)  # type: ignore[assignment]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The one file for the business tables and the tasks."""
    return tmp_path / "business.db"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """The business database; it begins a transaction with the first change, as sqlite3 does by itself."""
    with closing(sqlite3.connect(path)) as connection:
        yield connection


@pytest_asyncio.fixture
async def file_time(bide_app: Bide, path: Path) -> AsyncIterator[TimeMachine]:
    """Like `bide_time`, over the business database's own file."""
    async with FileTimeMachine(bide_app, path) as machine:
        yield machine
