"""A full disk, a locked file, a damaged page: clear errors, and nothing half done."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from tests.waiting import PATIENCE

from bide.core.errors import BadInput, StoreCorrupt, StoreError, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.records import Cancel, Filter, Result
from bide.stores.sqlite import SqliteStore, connection, room
from bide.stores.sqlite.errors import translate
from bide.testing.store_suite.acts import NOW, do, done, listed, new, put, put_one, settle, take


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
    if isinstance(found, StoreError) and found is not error:
        assert "/the/file" in str(found)


def test_a_full_disk_refuses_new_work_by_its_own_name() -> None:
    assert type(translate(raised(sqlite3.SQLITE_FULL), "x", adding=True)) is StoreFull


async def test_when_the_file_may_not_grow_new_work_is_refused_whole_and_the_old_still_drains(
    store: SqliteStore,
) -> None:
    await put(store, *(new(str(number)) for number in range(20)))
    assert store._database is not None
    writing = store._database._connections[0]
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
    monkeypatch.setattr(room, "free_bytes", lambda folder: 999_999)
    monkeypatch.setattr(room, "_EVERY", 0.0)
    assert store._database is not None
    store._database.room._look_again = 0.0
    with pytest.raises(StoreFull, match="999999 bytes free, 1000000 are kept"):
        await store.add([new("more")], now=NOW)
    with pytest.raises(StoreFull):
        async with store.transaction() as joined:
            await joined.add([new("more")], now=NOW)
    assert await settle(store, done(await take(store)))
    monkeypatch.setattr(room, "free_bytes", lambda folder: 1_000_000)
    await put_one(store, new("more"))
    await store.close()


def test_a_look_at_the_disk_that_takes_its_time_misleads_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def slowly(folder: str) -> int:
        looks.append(folder)
        if len(looks) == 1:
            watched.check()  # another thread comes meanwhile
        return 1_000_000

    monkeypatch.setattr(room, "free_bytes", slowly)
    monkeypatch.setattr(room, "_EVERY", PATIENCE)
    watched = room.Room("/the/file", 1_000_000)
    watched.check()
    watched.check()
    assert looks == ["/the"] * 2


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
