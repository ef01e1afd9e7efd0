"""Files that are damaged, full, locked or read only, and the checkpoints of the log."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.stores.sqlite.conftest import opened
from tests.waiting import PATIENCE, block, until

from bide.core.errors import BadInput, StoreCorrupt, StoreError, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.events import Event, EventKind
from bide.core.records import Cancel, Filter, OnConflict, Ref, Result, State
from bide.stores.sqlite import SqliteStore, connection, database
from bide.stores.sqlite.connection import PAGE, WriteLock, connect, translate
from bide.stores.sqlite.threads import Checkpointer
from bide.testing.store_suite.base import (
    LEASE,
    NOW,
    do,
    done,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    see,
    settle,
    take,
)
from bide_proofs.servers.disk import Disk


def change(path: str, statement: str) -> None:
    with closing(sqlite3.connect(path)) as opened:
        opened.executescript(statement)


def damage(path: str, column: str, *names: str) -> None:
    of_these = " OR ".join(f"key = '{name}'" for name in names)
    change(path, f"UPDATE bide_task SET {column} = CAST(x'6261ff64' AS TEXT) WHERE {of_these}")


@pytest.mark.parametrize("column", ["key", "id", "group_name", "holder", "error"])
async def test_a_lease_sets_the_damaged_aside_and_takes_the_others(store: SqliteStore, path: str, column: str) -> None:
    await put(store, *(new(name) for name in "abcd"))
    damage(path, column, "b")
    leased = await lease(store, 3)
    assert keys(leased.tasks) == ["a", "c", "d"], "as many as were wanted, for there are so many"
    assert leased.next_wake is None
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert dead.error is not None
    assert dead.error.startswith("damaged row: ")
    assert dead.token > 0
    assert (await lease(store, 3)).tasks == [], "and it does not come again"
    shown = {"key": dead.key, "id": dead.id, "group_name": dead.group, "holder": dead.holder, "error": None}[column]
    assert column == "error" or shown == "ba\\xffd"
    assert await store.purge(now=dead.keep_until or 0, limit=10) == 1


async def test_a_lost_lease_that_is_damaged_is_set_aside_too(store: SqliteStore, path: str) -> None:
    await put(store, *(new(name) for name in "ab"))
    await lease(store, 2)
    damage(path, "holder", "a")
    assert keys((await lease(store, 2, now=NOW + LEASE)).tasks) == ["b"]


async def test_when_all_are_damaged_the_rest_is_still_found(store: SqliteStore, path: str) -> None:
    names: Sequence[str] = [f"{number:03}" for number in range(30)]
    await put(store, *(new(name) for name in names), new("last"))
    damage(path, "id", *names)
    assert keys((await lease(store, 2)).tasks) == ["last"]


async def test_the_damaged_can_be_read_cancelled_and_replaced(store: SqliteStore, path: str) -> None:
    for verb in ("cancel", "replace"):
        await put_one(store)
        damage(path, "id", "k")
        assert (await see(store, Ref("t", "k"))).id == "ba\\xffd"
        if verb == "cancel":
            assert (await do(store, Cancel("t", "k"))).result is Result.CANCELLED
            assert await look(store, Ref("t", "k")) is None
        else:
            [answer] = await store.add([new(on_conflict=OnConflict.REPLACE)], now=NOW)
            assert answer.result is Result.REPLACED
            assert await see(store, Ref("t", "k")) == answer.record


async def test_a_damaged_lease_can_be_settled(store: SqliteStore, path: str) -> None:
    await put_one(store)
    [held] = (await lease(store)).tasks
    damage(path, "holder", "k")
    assert await settle(store, done(held, keep_until=NOW * 2))
    assert (await see(store, held)).holder == "ba\\xffd"


@pytest.mark.parametrize("damaged", ["state = 7 WHERE key = 'b'", "state = -1", "state = 4"])
async def test_a_state_that_there_is_not_is_shown_as_dead(store: SqliteStore, path: str, damaged: str) -> None:
    await put(store, *(new(name) for name in "abcde"))
    change(path, f"UPDATE bide_task SET {damaged}")
    shown = await see(store, Ref("t", "b"))
    assert (shown.state, shown.wake_at) == (State.DEAD, NOW)
    assert all(await store.get([Ref("t", name) for name in "abcde"]))
    assert len(await listed(store, Filter(topic="t"))) == 5


NO_LONGER_STRICT = """
    PRAGMA writable_schema = ON;
    UPDATE sqlite_schema SET sql = replace({0}, 'NOT NULL', '') WHERE name = 'bide_task';
    PRAGMA writable_schema = RESET;
    UPDATE bide_task SET {1} WHERE key = 'b';
    PRAGMA writable_schema = ON;
    UPDATE sqlite_schema SET sql = ({2}) WHERE name = 'bide_task';
    DROP TABLE kept;
"""


@pytest.mark.parametrize(
    "damaged", ["payload = 'text'", "payload = NULL", "token = NULL", "due_at = 'soon'", "attempt = 1.5", "id = NULL"]
)
async def test_values_of_other_types_are_set_aside(store: SqliteStore, path: str, damaged: str) -> None:
    await put(store, *(new(name) for name in "abcd"))
    await store.close()
    kept = "CREATE TABLE kept AS SELECT sql FROM sqlite_schema WHERE name = 'bide_task';"
    change(path, kept + NO_LONGER_STRICT.format("replace(sql, 'STRICT', '')", damaged, "SELECT sql FROM kept"))
    await store.open()
    assert (await see(store, Ref("t", "b"))).key == "b"
    assert len(await listed(store, Filter(topic="t"))) == 4
    assert keys((await lease(store, 4)).tasks) == ["a", "c", "d"]
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert (dead.key, dead.error) == ("b", "damaged row: values of other types than the columns declare")


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM bide_token", "DROP TABLE bide_token", "ALTER TABLE bide_task RENAME COLUMN payload TO body"],
)
async def test_what_is_gone_of_the_tables_is_said_to_be(store: SqliteStore, path: str, statement: str) -> None:
    await put_one(store)
    change(path, statement)
    with pytest.raises(StoreCorrupt, match="is damaged") as caught:
        await lease(store, 1)
    assert path in str(caught.value)


async def test_a_version_that_is_gone_is_said_to_be(store: SqliteStore, path: str) -> None:
    await store.close()
    change(path, "DELETE FROM bide_meta")
    with pytest.raises(StoreCorrupt, match="the version of its schema is gone"):
        await store.open()


@pytest.mark.parametrize("damaged", ["kind = 'odd'", "what = CAST(x'ff' AS TEXT)", "topic = CAST(x'ff' AS TEXT)"])
async def test_an_event_that_cannot_be_read_hides_no_other(store: SqliteStore, path: str, damaged: str) -> None:
    events = [Event(at=NOW + n, topic="t", key="k", id="i", kind=EventKind.DEAD, what="bad") for n in range(3)]
    await store.record(events)
    change(path, f"UPDATE bide_event SET {damaged} WHERE at = {NOW + 1}")
    assert await store.events() == [events[2], events[0]]
    assert await store.events(Ref("t", "k")) == [events[2], events[0]]


@pytest.mark.parametrize("topics", ["x'c1'", "x'91a1ff'", "x'05'"])
async def test_a_worker_that_cannot_be_read_stops_no_other(store: SqliteStore, path: str, topics: str) -> None:
    change(path, f"INSERT INTO bide_worker VALUES ('odd', {topics}, {NOW * 2})")
    assert await store.announce("w", ["t"], NOW * 2, now=NOW) == {"w": ["t"], "odd": []}


async def test_a_topic_that_is_no_text_is_said_to_be_damage(store: SqliteStore, path: str) -> None:
    await put(store, new("a"), new("b", topic="u"))
    change(path, "UPDATE bide_task SET topic = CAST(x'ff' AS TEXT) WHERE key = 'a'")
    with pytest.raises(StoreCorrupt, match="is damaged"):
        await store.tally()
    assert keys((await lease(store, 1, topic="u")).tasks) == ["b"], "and the other topics go on"


@pytest.mark.parametrize("column", ["attempt", "failures", "losses"])
async def test_a_count_that_cannot_go_on_is_set_aside(store: SqliteStore, path: str, column: str) -> None:
    await put(store, *(new(name) for name in "abc"))
    change(path, f"UPDATE bide_task SET {column} = {2**63 - 1} WHERE key = 'b'")
    assert keys((await lease(store, 3)).tasks) == ["a", "c"]
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert dead.key == "b"


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
    async with opened(path, disk_reserve=1_000_000) as store:
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
    disk, place = Disk(24 << 20), tmp_path / "disk"
    disk.make(place)
    if not disk.mounted:
        pytest.skip(disk.refused)
    yield place
    disk.remove()


@pytest.mark.parametrize("delay", [0.0, 0.05])
@pytest.mark.parametrize("size", [100, 20_000])
async def test_a_disk_smaller_than_the_reserve_drains_to_the_last_task(
    small_disk: Path, size: int, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while checkpoints come late, as their thread does on a busy machine."""
    checkpoint = Checkpointer._checkpoint

    def late(self: Checkpointer) -> None:
        block(delay, why="the thread of checkpoints gets no processor")
        checkpoint(self)

    monkeypatch.setattr(Checkpointer, "_checkpoint", late)
    store, full = SqliteStore(str(small_disk / "tasks.db")), False
    stored: list[str] = []
    await store.open()
    try:
        while not full:
            names = [str(len(stored) + more) for more in range(50)]  # they fit into one transaction
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
        with pytest.raises(StoreUnavailable, match="another connection keeps the file locked"):
            await store.add([new("more")], now=NOW)
        assert len(await listed(store, Filter())) == 1, "readers do not wait for a writer"
    await put_one(store, new("more"))


async def test_what_cannot_be_stored_harms_only_its_caller(store: SqliteStore) -> None:
    with pytest.raises(BadInput, match="text"):
        await store.add([new("lone \ud800")], now=NOW)
    with pytest.raises(BadInput, match="number"):
        await store.add([new("k")], now=2**70)
    for payload in ("text", 5, object()):
        with pytest.raises(BadInput, match="task"):
            await store.add([new(payload=payload)], now=NOW)  # type: ignore[arg-type]
    await put_one(store)


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
    await put(store, new("the next commit asks for what that checkpoint has left"))
    await until(lambda: not checkpointer._busy, "the rest")
    assert os.stat(path).st_size > 6_000 * 4_000 / 2
    await store.close()
    assert os.listdir(tmp_path) == ["tasks.db"]
    await store.open()
    assert len(await listed(store, Filter(), limit=10_000)) == 6_001
    await store.close()
