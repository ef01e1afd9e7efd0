"""Tables of others in SQLite, and how changes of theirs are noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.stores.sqlite.conftest import opened
from tests.waiting import block, until

from bide import Bide, Row, Sql, StoreUnavailable, TableSource
from bide.core.errors import BadInput
from bide.core.instants import In, instant
from bide.engine.delivery.tables import TableLoop
from bide.stores.sqlite import SqliteStore
from bide.stores.sqlite.commit_watch import Polling, signal_of
from bide.testing.clock import ManualClock
from bide.testing.store_suite.base import NOW, SECOND, new, put_one

NOON = instant("2027-07-16T12:00:00Z")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "blog.db"


@pytest.fixture
def blog(file: Path) -> Iterator[sqlite3.Connection]:
    """A file in the journal mode that SQLite gives it, without anything of bide's."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE posts (id PRIMARY KEY, status INTEGER DEFAULT 2, due, published TEXT)")
        connection.execute("CREATE INDEX posts_by_due ON posts (due) WHERE status = 2")
        yield connection


@asynccontextmanager
async def watching(file: Path, clock: ManualClock, *, handler: Any = None, **options: Any) -> AsyncIterator[TableLoop]:
    app = Bide("memory:", clock=clock)
    given: dict[str, Any] = {"changes": {"status": 3}, **options}
    source = TableSource(table="posts", due="due", where="status = 2", database=f"sqlite:///{file}", **given)
    watch = app.watch(source)
    if handler is not None:
        watch.handler(handler)
    async with app, AsyncExitStack() as stack:
        [loop] = app.table_loops()
        await loop.open()
        stack.push_async_callback(loop.stop, 0)
        yield loop


FORMS = [
    ("2027-07-16T12:00:00Z", None), ("2027-07-16T12:00:00+00:00", None), ("2027-07-16 12:00:00", None),
    ("2027-07-16 12:00:00.000", None), ("2027-07-16T12:00", None), ("2027-07-16T12:00:00.000000+00:00", None),
    ("2027-07-16T14:00:00+02:00", None), ("2027-07-16 14:00:00", "Europe/Berlin"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "zone"), FORMS)
async def test_every_form_of_a_time(blog: sqlite3.Connection, file: Path, text: str, zone: str | None) -> None:
    clock = ManualClock(NOON - 86_400_000)
    blog.execute("INSERT INTO posts (id, due) VALUES (1, ?)", (text,))
    options = {} if zone is None else {"zone": ZoneInfo(zone)}
    async with watching(file, clock, **options) as loop:
        for before in (86_400_000, 3_600_000, 60_000, 999, 1):
            clock.advance(NOON - before - clock.now())
            assert await loop.run_once() == (0, NOON), before
        clock.advance(1)
        assert await loop.run_once() == (1, None)


async def test_text_that_does_not_sort_as_time_does_is_not_early(blog: sqlite3.Connection, file: Path) -> None:
    """As text "12:00:00.500Z" comes before "12:00:00Z": the later of the two is what a look finds."""
    blog.execute("INSERT INTO posts (id, due) VALUES ('half', '2027-07-16T12:00:00.500Z')")
    blog.execute("INSERT INTO posts (id, due) VALUES ('full', '2027-07-16T12:00:00Z')")
    clock = ManualClock(NOON)
    async with watching(file, clock) as loop:
        assert await loop.run_once() == (0, NOON + 500)
        clock.advance(499)
        await loop.run_once()
        assert blog.execute("SELECT count(*) FROM posts WHERE id = 'half' AND status = 3").fetchone() == (0,)
        clock.advance(1)
        await loop.run_once()
        assert blog.execute("SELECT count(*) FROM posts WHERE status = 3").fetchone() == (2,), "late by less than 1 s"


async def test_what_is_no_time_is_never_due_and_holds_up_nobody(
    blog: sqlite3.Connection, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place, wrong in enumerate(["", "0000", "soon", "2027", "20270716T115900", "2027-13-01", 12, b"x", None]):
        blog.execute("INSERT INTO posts (id, due) VALUES (?, ?)", (f"wrong {place}", wrong))
    blog.execute("INSERT INTO posts (id, due) VALUES ('right', '2027-07-16T11:59:00')")
    async with watching(file, ManualClock(NOON), page=1) as loop:
        assert await loop.run_once() == (1, None)
    assert "is not a time in ISO 8601" in caplog.text
    assert blog.execute("SELECT id FROM posts WHERE status = 3").fetchall() == [("right",)]


async def test_the_moment_is_written_in_the_form_of_the_column(blog: sqlite3.Connection, file: Path) -> None:
    blog.execute("INSERT INTO posts (id, due) VALUES (1, '2027-07-16 14:00:00')")
    changes = {"status": 3, "published": Sql(":now")}
    async with watching(file, ManualClock(NOON + 7), zone=ZoneInfo("Europe/Berlin"), changes=changes) as loop:
        assert (await loop.run_once())[0] == 1
    assert blog.execute("SELECT published FROM posts").fetchone() == ("2027-07-16 14:00:00.007",)


async def test_a_handler_in_a_file_that_is_nobody_s_store(blog: sqlite3.Connection, file: Path) -> None:
    async def publish(row: Row) -> None:
        row.connection.execute("UPDATE posts SET published = 'by hand' WHERE id = ?", (row.id,))

    blog.execute("INSERT INTO posts (id, due) VALUES (1, '2027-07-16 11:00:00')")
    async with watching(file, ManualClock(NOON), handler=publish) as loop:
        assert await loop.run_once() == (1, None)
    assert blog.execute("SELECT status, published FROM posts").fetchone() == (3, "by hand")
    assert blog.execute("PRAGMA journal_mode").fetchone() == ("delete",), "it is left as it was"
    assert blog.execute("SELECT name FROM sqlite_master WHERE name LIKE 'bide%'").fetchall() == []


async def test_a_file_that_is_not_there_is_not_made(file: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no such file"):
        async with watching(file, ManualClock(NOON)):
            raise AssertionError("there is nothing to watch")
    assert names_in(tmp_path) == []


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
async def test_columns_that_are_generated(blog: sqlite3.Connection, file: Path, kind: str) -> None:
    blog.execute("DROP TABLE posts")
    blog.execute(f"CREATE TABLE posts (id, status, at TEXT, due TEXT GENERATED ALWAYS AS (at || 'Z') {kind})")
    blog.execute("INSERT INTO posts VALUES (1, 2, '2027-07-16T11:00:00')")
    async with watching(file, ManualClock(NOON), columns=["due"]) as loop:
        assert await loop.run_once() == (1, None)


@pytest.mark.parametrize("change", ["RENAME COLUMN published TO out", "RENAME COLUMN due TO at", "RENAME TO news"])
async def test_what_is_renamed_at_work_is_missed_and_not_read_as_text(
    blog: sqlite3.Connection, file: Path, change: str
) -> None:
    async with watching(file, ManualClock(NOON), handler=print, columns=["published"]) as loop:
        blog.execute("INSERT INTO posts (id, due) VALUES (1, '2027-07-16T10:00:00')")
        blog.execute(f"ALTER TABLE posts {change}")
        with pytest.raises(StoreUnavailable, match="no such"):
            await loop.run_once()


@pytest.mark.parametrize("value", ["''", "'soon'", "x'00'", "9e999"])
async def test_what_is_no_number_is_never_due(
    blog: sqlite3.Connection, file: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    blog.execute("DROP TABLE posts")
    blog.execute("CREATE TABLE posts (id INTEGER PRIMARY KEY, status INT, due INTEGER)")
    blog.execute(f"INSERT INTO posts VALUES (1, 2, {value})")
    async with watching(file, ManualClock(NOON), due_is="seconds") as loop:
        for _ in range(2):
            fired, wake = await loop.run_once()
            assert fired == 0
            assert wake is None or wake > NOON
    assert caplog.text.count("is never due") == (value != "9e999")


@pytest.mark.parametrize(
    "spoil", ["UPDATE posts SET published = '{'", "UPDATE posts SET published = CAST(x'ff' AS TEXT)"]
)
async def test_a_value_that_cannot_be_read_costs_only_that_row(
    blog: sqlite3.Connection, file: Path, spoil: str
) -> None:
    for number in (1, 2, 3):
        blog.execute("INSERT INTO posts VALUES (?, 2, '2027-07-16T11:00:00Z', '{}')", (number,))
    blog.execute(f"{spoil} WHERE id = 1")
    changes = {"status": 3, "published": Sql("json_set(published, '$.at', 1)")}
    async with watching(file, ManualClock(NOON), changes=changes, columns=["published"]) as loop:
        await loop.run_once()
    assert blog.execute("SELECT id FROM posts WHERE status = 3").fetchall() == [(2,), (3,)]


async def test_a_commit_waits_for_readers_of_a_file_without_a_wal(blog: sqlite3.Connection, file: Path) -> None:
    blog.execute("INSERT INTO posts (id, due) VALUES (1, '2027-07-16T11:00:00Z')")
    reader = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    calls: list[int] = []

    async def publish(row: Row) -> None:
        calls.append(row.id)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM posts").fetchall()
        asyncio.get_running_loop().call_later(0.05, reader.rollback)

    with closing(reader):
        async with watching(file, ManualClock(NOON), handler=publish) as loop:
            assert await loop.run_once() == (1, None)
    assert calls == [1]


WAYS = ["inotify", "poll"] if sys.platform == "linux" else ["poll"]


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
@pytest.mark.parametrize("commits", [0, 300], ids=["from the beginning", "after a busy time"])
async def test_an_idle_watcher_waits_for_the_kernel_alone(
    path: str, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bide.stores.sqlite.commit_watch import Inotify

    waits, wait = list[float | None](), Inotify.wait

    def note(signal: Inotify, timeout: float | None) -> bool:
        waits.append(timeout)
        return wait(signal, timeout)

    monkeypatch.setattr(Inotify, "wait", note)
    async with opened(path, watch="inotify") as store:
        listening = await store.listen(["t"], lambda topic, wake: None)
        for number in range(commits):
            await put_one(store, new(f"{number}", due=In(SECOND)))
        await until(lambda: waits[-1:] == [None], "a wait without an end")
        await listening.close()


@pytest.mark.parametrize("way", WAYS)
async def test_another_clients_commit_is_told_once_and_ones_own_head_not_again(path: str, way: str) -> None:
    store, other = SqliteStore(path, watch=way), SqliteStore(path)
    await store.open()
    await other.open()
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
    await put_one(other, new(due=In(50 * SECOND)))
    await until(lambda: heard == [("t", NOW + 50 * SECOND)], "the first task")
    await put_one(other, new("later", due=In(90 * SECOND)))
    await put_one(other, new("of another topic", topic="u"))
    for sooner in range(20):
        await put_one(other, new(f"{sooner}", due=In((20 - sooner) * SECOND)))
        await until(lambda: len(heard) == sooner + 2, "the next head")  # noqa: B023
    assert heard[1:] == [("t", NOW + (20 - sooner) * SECOND) for sooner in range(20)], "the heads, and nothing else"
    await listening.close()
    await other.close()
    await store.close()


async def test_the_watcher_comes_and_goes_with_its_listeners(store: SqliteStore) -> None:
    assert store._open().notifier._watcher is None
    first = await store.listen(["t"], lambda topic, wake: None)
    watcher = store._open().notifier._watcher
    assert watcher is not None
    second = await store.listen(["u"], lambda topic, wake: None)
    assert store._open().notifier._watcher is watcher
    await first.close()
    assert not watcher._stopping
    await second.close()
    await second.close()
    await asyncio.to_thread(watcher.thread.join)
    heard = asyncio.Event()
    third = await store.listen(["t"], lambda topic, wake: heard.set())
    await put_one(store)
    await until(heard.is_set, "the task")
    await third.close()


async def test_a_store_may_be_closed_with_somebody_listening(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    await store.close()
    await listening.close()


def test_without_inotify_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(signal_of(str(tmp_path / "x-wal"), "poll"), Polling)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(signal_of(str(tmp_path / "x-wal"), "auto"), Polling)
    with pytest.raises(BadInput, match="only Linux"):
        signal_of(str(tmp_path / "x-wal"), "inotify")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_the_kernel_tells_of_this_file_alone_also_when_it_is_made_anew(tmp_path: Path) -> None:
    from bide.stores.sqlite.commit_watch import Inotify

    wal = tmp_path / "tasks.db-wal"
    signal = Inotify(str(wal))
    assert not signal.wait(0)
    (tmp_path / "other").write_bytes(b"x")
    assert not signal.wait(0.01)
    wal.write_bytes(b"x")
    assert signal.wait(1)
    signal.drain()
    with wal.open("r+b") as file:
        file.write(b"y")
        file.flush()
        assert signal.wait(1)
        assert not signal.wait(0)
    os.unlink(wal)
    signal.drain()
    wal.write_bytes(b"z")
    assert signal.wait(1)
    signal.stop()
    assert not signal.wait(None)
    signal.close()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_when_the_watches_are_used_up_it_polls(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere" / "tasks.db-wal")
    assert isinstance(signal_of(nowhere, "auto"), Polling)
    with pytest.raises(OSError, match="No such file"):
        signal_of(nowhere, "inotify")


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_that_is_just_waking_up_can_be_stopped(
    path: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of the descriptors when it knows of the end: not while somebody still writes to them to tell it so."""
    async with opened(path, watch=way) as store:
        listening = await store.listen(["t"], lambda topic, wake: None)
        signal = signal_of(f"{path}-wal", way)
        kind, stop = type(signal), type(signal).stop
        signal.close()

        def slow_stop(signal: Any) -> None:
            with contextlib.closing(sqlite3.connect(path)) as other, other:
                other.execute("UPDATE bide_token SET last = last + 1")
            block(0.1, why="the thread gets to know of the end meanwhile")
            stop(signal)

        monkeypatch.setattr(kind, "stop", slow_stop)
        await listening.close()
