"""A full disk, a locked file, a damaged page: clear errors, and nothing half done."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.waiting import PATIENCE

from bide.core.errors import BadInput, StoreCorrupt, StoreError, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.records import Cancel, Filter, Result
from bide.stores.sqlite import SqliteStore, connection
from bide.stores.sqlite.connection import translate
from bide.testing.store_suite.base import NOW, do, done, listed, new, put, put_one, settle, take


def raised(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite words it")
    error.sqlite_errorcode = code
    error.sqlite_errorname = "SQLITE_SOMETHING"
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised(sqlite3.SQLITE_BUSY), StoreUnavailable),
        (raised(sqlite3.SQLITE_BUSY_SNAPSHOT), StoreUnavailable),
        (raised(sqlite3.SQLITE_LOCKED), StoreUnavailable),
        (raised(sqlite3.SQLITE_FULL), StoreUnavailable),
        (raised(sqlite3.SQLITE_CORRUPT), StoreCorrupt),
        (raised(sqlite3.SQLITE_NOTADB), StoreMismatch),
        (raised(sqlite3.SQLITE_READONLY), StoreUnavailable),
        (raised(sqlite3.SQLITE_CANTOPEN), StoreUnavailable),
        (raised(sqlite3.SQLITE_IOERR), StoreUnavailable),
        (sqlite3.OperationalError("no code at all"), StoreUnavailable),
        (OSError(28, "No space left on device"), StoreUnavailable),
        (OverflowError("Python int too large"), BadInput),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), StoreCorrupt),
        (sqlite3.DatabaseError("unsupported file format"), StoreCorrupt),
        (sqlite3.OperationalError("no such table: bide_token"), StoreCorrupt),
        (StoreFull("already ours"), StoreFull),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_every_error_has_one_meaning(error: Exception, expected: type[Exception]) -> None:
    found = translate(error, "/the/file")
    assert type(found) is expected
    if isinstance(found, StoreError) and not isinstance(error, StoreError):
        assert "/the/file" in str(found)


def test_a_full_disk_refuses_new_work_by_its_own_name() -> None:
    assert type(translate(raised(sqlite3.SQLITE_FULL), "x", adding=True)) is StoreFull


async def test_when_the_file_may_not_grow_new_work_is_refused_whole_and_the_old_still_drains(
    store: SqliteStore,
) -> None:
    await put(store, *(new(str(number)) for number in range(20)))
    writing = store._open().writer._connection
    pages = writing.execute("PRAGMA page_count").fetchone()[0]
    writing.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFull, match="no room for new tasks"):
        await store.add([new(f"large {number}", payload=bytes(100_000)) for number in range(5)], now=NOW)
    assert len(await listed(store, Filter())) == 20, "nothing half done"
    for _ in range(10):
        assert await settle(store, done(await take(store)))
    [remaining, *_] = await listed(store, Filter())
    assert (await do(store, Cancel("t", remaining.key))).result is Result.CANCELLED
    writing.execute("PRAGMA max_page_count = 1000000")
    await put_one(store, new("again", payload=bytes(100_000)))


async def test_below_the_reserve_new_work_is_refused_and_the_old_still_drains(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(path, disk_reserve=1_000_000)
    await store.open()
    await put_one(store)
    monkeypatch.setattr(connection, "free_bytes", lambda folder: 1_000_000)
    monkeypatch.setattr(connection, "_EVERY", 0.0)
    store._open().reserve._check_at = 0.0
    with pytest.raises(StoreFull, match="1000000 bytes free"):  # and the WAL needs room too
        await store.add([new("more")], now=NOW)
    with pytest.raises(StoreFull):
        async with store.transaction() as joined:
            await joined.add([new("more")], now=NOW)
    assert await settle(store, done(await take(store)))
    monkeypatch.setattr(connection, "free_bytes", lambda folder: 10_000_000)
    await put_one(store, new("more"))
    with pytest.raises(StoreFull):
        await store.add([new("as large as the disk", payload=bytes(5_000_000))], now=NOW)
    await store.close()


def test_a_look_at_the_disk_that_takes_its_time_misleads_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def slowly(folder: str) -> int:
        looks.append(folder)
        if len(looks) == 1:
            watched.check()  # another thread comes meanwhile
        return 1 << 60

    monkeypatch.setattr(connection, "free_bytes", slowly)
    monkeypatch.setattr(connection, "kept_bytes", lambda path, reserve: reserve)
    monkeypatch.setattr(connection, "_EVERY", PATIENCE)
    watched = connection.DiskReserve("/the/file", 1_000_000)
    watched.check()
    watched.check()
    assert looks == ["/the"] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of 24 MiB."""
    mounting = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("size", [100, 20_000])
async def test_a_disk_smaller_than_the_reserve_drains_to_the_last_task(small_disk: Path, size: int) -> None:
    store, full = SqliteStore(str(small_disk / "tasks.db")), False
    stored: list[str] = []
    await store.open()
    try:
        while not full:
            names = [str(len(stored) + more) for more in range(100)]
            try:
                await put(store, *(new(name, payload=bytes(size)) for name in names))
                stored += names
            except StoreFull:
                full = True
        assert len(stored) >= 200
        for name in stored[:2000]:
            assert (await do(store, Cancel("t", name))).ok
    finally:
        await store.close()


async def test_a_file_that_was_removed_takes_no_new_work(
    store: SqliteStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_EVERY", 0.0)
    os.rename(path, f"{path}.away")
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        await store.add([new("lost")], now=NOW)
    os.rename(f"{path}.away", path)
    await put_one(store)


async def test_a_rollback_that_fails_is_an_error_and_not_the_end_of_the_writer(store: SqliteStore) -> None:
    database = store._open()

    def deny(action: int, what: str | None, *_: object) -> int:
        refused = action == sqlite3.SQLITE_TRANSACTION and what == "ROLLBACK"
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def fail(work: object) -> None:
        raise ZeroDivisionError

    database.writer._connection.set_authorizer(deny)
    for _ in range(2):
        with pytest.raises(StoreError):
            await database.writer.submit(fail, durable=False)
    database.writer._connection.set_authorizer(None)
    await put_one(store)


@contextmanager
def locked(path: str) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_a_file_locked_for_long_is_unavailable_and_readable(
    store: SqliteStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_one(store)
    monkeypatch.setattr(connection.patiently, "__kwdefaults__", {"patience": 0.01})
    with locked(path):
        with pytest.raises(StoreUnavailable, match="another process keeps the file locked"):
            await store.add([new("more")], now=NOW)
        assert len(await listed(store, Filter())) == 1, "readers do not wait for a writer"
    await put_one(store, new("more"))


def overwrite(path: str, pages: list[int]) -> None:
    with open(path, "r+b") as file:
        for page in pages:
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 200)


async def test_a_damaged_page_is_an_error_that_says_so(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    await put(store, *(new(str(number)) for number in range(500)))
    await store.close()
    with closing(sqlite3.connect(path)) as opened:
        roots = opened.execute("SELECT rootpage FROM sqlite_master WHERE name IN ('bide_task', 'bide_task_time')")
        overwrite(path, [root for (root,) in roots])
    await store.open()
    with pytest.raises(StoreCorrupt, match="the file is damaged"):
        await store.lease({"t": 100}, now=NOW, until=NOW + 1000, holder="w")
    with pytest.raises(StoreCorrupt, match="the file is damaged"):
        await listed(store, Filter(topic="t"))
    await store.close()


async def test_text_that_is_no_text_and_numbers_that_are_too_large_harm_only_their_caller(store: SqliteStore) -> None:
    with pytest.raises(BadInput, match="text"):
        await store.add([new("lone \ud800")], now=NOW)
    with pytest.raises(BadInput, match="number"):
        await store.add([new("k")], now=2**70)
    await put_one(store)


async def test_a_value_of_a_wrong_type_harms_only_its_caller(store: SqliteStore) -> None:
    for payload in ("text", 5, object()):
        with pytest.raises(BadInput, match="task"):
            await store.add([new(payload=payload)], now=NOW)  # type: ignore[arg-type]
    await put_one(store)
