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


@pytest.fixture
def bide_app() -> Bide:
    return Bide("memory:")


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
    async with TimeMachine(bide_app, store=SqliteStore(path)) as machine:
        yield machine
