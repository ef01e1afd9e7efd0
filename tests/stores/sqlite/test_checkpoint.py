"""The WAL is written back beside the writer, and does not grow without end."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.waiting import until, wait_until

from bide.core.records import Filter
from bide.stores.sqlite import SqliteStore, database
from bide.stores.sqlite.connection import PAGE, WriteLock, connect
from bide.stores.sqlite.threads import KICK_PAGES, Checkpointer
from bide.testing.store_suite.base import listed, new, put


@pytest.fixture
def writing(path: str) -> Iterator[sqlite3.Connection]:
    with closing(connect(path)) as opened:
        opened.execute("PRAGMA journal_mode = WAL")
        database.prepare(opened, path)
        yield opened


@pytest.mark.parametrize("mark_first", [True, False])
def test_it_writes_back_what_was_committed(path: str, writing: sqlite3.Connection, mark_first: bool) -> None:
    with closing(connect(path)) as own:
        checkpointer = Checkpointer(path, own, WriteLock(path), mark_first=mark_first)
        before = os.stat(path).st_size
        writing.execute("CREATE TABLE other AS SELECT randomblob(100000)")
        checkpointer._changes = 10_000
        checkpointer._checkpoint()
        assert os.stat(path).st_size > before
        marked = writing.execute("SELECT value FROM bide_meta WHERE name = 'checkpoints'").fetchone()
        assert marked == (1 if mark_first else 0,)
        checkpointer.stop()


def test_it_does_not_start_while_it_cannot_mark(path: str, writing: sqlite3.Connection) -> None:
    with closing(connect(path)) as own:
        checkpointer = Checkpointer(path, own, WriteLock(path), mark_first=True)
        writing.execute("BEGIN IMMEDIATE")
        before = os.stat(path).st_size
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            checkpointer._checkpoint()
        writing.execute("ROLLBACK")
        assert os.stat(path).st_size == before
        checkpointer.stop()


def test_it_begins_when_enough_was_committed(
    path: str, writing: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connect(path)) as own:
        checkpointer, begun = Checkpointer(path, own, WriteLock(path)), list[int]()
        monkeypatch.setattr(checkpointer, "_checkpoint", lambda: begun.append(checkpointer._changes))
        checkpointer.committed(0)
        checkpointer.committed(1)
        checkpointer.committed(10 * KICK_PAGES)
        wait_until(lambda: not checkpointer._busy, "the checkpoint")
        assert begun == [1 + 10 * KICK_PAGES]
        checkpointer.stop()


@pytest.mark.parametrize("mark_first", [True, False])
def test_a_long_wal_that_is_not_caught_up_starts_over(
    path: str, writing: sqlite3.Connection, mark_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connect(path)) as own, closing(connect(path)) as reading:
        checkpointer = Checkpointer(path, own, WriteLock(path), mark_first=mark_first)
        checkpointer._stop_bytes = 10 * PAGE
        restart, restarts = checkpointer._restart, list[int]()

        def note() -> None:
            restarts.append(checkpointer._wal_pages)
            restart()

        monkeypatch.setattr(checkpointer, "_restart", note)
        writing.execute("CREATE TABLE other AS SELECT randomblob(100000)")
        checkpointer._checkpoint()
        assert restarts == [], "all of it is in the file"
        reading.execute("BEGIN")
        reading.execute("SELECT count(*) FROM bide_task").fetchone()
        writing.execute("INSERT INTO other SELECT randomblob(100000)")
        checkpointer._checkpoint()
        assert restarts == [checkpointer._wal_pages], "somebody still reads in it"
        reading.execute("ROLLBACK")
        restart()
        assert checkpointer._wal_pages == 0
        size = os.stat(f"{path}-wal").st_size
        writing.execute("INSERT INTO other SELECT randomblob(1000)")
        assert os.stat(f"{path}-wal").st_size == size, "it is written from the start again"
        checkpointer.stop()


async def test_a_long_load_leaves_a_short_wal_and_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "tasks.db")
    store = SqliteStore(path, synchronous="normal")
    await store.open()
    for batch in range(12):
        await put(store, *(new(f"{batch} {number}", payload=bytes(4_000)) for number in range(500)))
    checkpointer = store._open().checkpointer
    assert checkpointer is not None
    await until(lambda: not checkpointer._busy, "the checkpoint")
    assert os.stat(path).st_size > 6_000 * 4_000 / 2
    await store.close()
    assert os.listdir(tmp_path) == ["tasks.db"]
    await store.open()
    assert len(await listed(store, Filter(), limit=10_000)) == 6_000
    await store.close()
