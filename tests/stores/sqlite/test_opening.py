"""Which files are opened, created, migrated or refused, and with what words; which versions of SQLite are safe."""

# ruff: noqa: ASYNC220, ASYNC222, ASYNC240 - a test may wait for a file or a process

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stores.sqlite.conftest import opened
from tests.waiting import PATIENCE, until

from bide import Bide
from bide.core.errors import BadInput, StoreMismatch, StoreUnavailable
from bide.core.records import Filter, Ref
from bide.stores.sqlite import SqliteStore, connection, database
from bide.stores.sqlite.database import OpenFile, mapped_libraries
from bide.stores.sqlite.threads import resets_safely
from bide.testing.store_suite.base import listed, look, new, put_one


async def test_a_new_file_gets_the_schema_of_this_code(path: str) -> None:
    store = SqliteStore(path)
    assert await store.schema_version() == (0, database.VERSION)
    assert not os.path.exists(path), "asking makes nothing"
    await store.migrate()
    assert await store.schema_version() == (database.VERSION, database.VERSION)
    assert sorted(os.listdir(os.path.dirname(path))) == ["tasks.db"], "closed, it is one file"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
async def test_a_new_file_is_its_owners_alone_and_one_that_is_there_stays_as_it_is(path: str, umask: int) -> None:
    folder, before = os.path.dirname(path), os.umask(umask)
    try:
        store = SqliteStore(path)
        await store.open()
        await put_one(store)
        modes = {name: stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) for name in os.listdir(folder)}
        assert modes == dict.fromkeys(["tasks.db", "tasks.db-shm", "tasks.db-wal"], 0o600)
        assert not [finding for finding in await store.diagnose() if "mode" in finding.what and not finding.ok]
        await store.close()
        os.chmod(path, 0o644)
        await store.open()
        [found] = [finding for finding in await store.diagnose() if "mode" in finding.what]
        assert (found.ok, found.what) == (False, "file mode 0644")
        assert "chmod o=" in found.advice
        await store.close()
    finally:
        os.umask(before)


async def test_a_path_may_be_relative_and_stays_the_same_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    async with opened("tasks.db") as store:
        monkeypatch.chdir("/")
        await put_one(store)
        assert len(await listed(store, Filter())) == 1


async def test_an_app_keeps_its_file_when_it_is_opened_again_elsewhere(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    app = Bide("sqlite:///tasks.db")
    async with app:
        await app.schedule("t", key="k", delay="1h")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    async with app:
        assert await app.get("t", "k")


@pytest.mark.parametrize("refused", ["", ":memory:", "file:tasks.db?mode=memory"])
def test_what_is_no_path_is_refused(refused: str) -> None:
    with pytest.raises(BadInput, match="path"):
        SqliteStore(refused)


@pytest.mark.parametrize(
    ("name", "value"), [("synchronous", "off"), ("watch", "telepathy"), ("disk_reserve", -1), ("events_kept", -1)]
)
def test_a_wrong_setting_is_named(path: str, name: str, value: object) -> None:
    with pytest.raises(BadInput, match=name):
        SqliteStore(path, **{name: value})  # type: ignore[arg-type]


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"the folder .*nowhere does not exist") as caught:
        await SqliteStore(tmp_path / "nowhere" / "tasks.db").open()
    cause = caught.value.__cause__
    assert cause is not caught.value
    assert cause is None or cause.__cause__ is None, "whoever walks along the causes comes to an end"


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await SqliteStore(tmp_path).open()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailable, match=r"cannot be opened|may not be written"):
            await SqliteStore(tmp_path / "tasks.db").open()
    finally:
        tmp_path.chmod(0o700)


async def test_what_is_not_a_database_is_refused_and_left_as_it_was(path: str) -> None:
    text = b"Dear diary, today I was mistaken for a database. " * 100
    Path(path).write_bytes(text)
    with pytest.raises(StoreMismatch, match="not an SQLite database"):
        await SqliteStore(path).open()
    assert Path(path).read_bytes() == text


async def test_a_file_of_a_newer_version_is_refused_by_both_names(path: str) -> None:
    await SqliteStore(path).migrate()
    with closing(sqlite3.connect(path, isolation_level=None)) as later:
        later.execute("UPDATE bide_meta SET value = 99 WHERE name = 'version'")
    store = SqliteStore(path)
    with pytest.raises(StoreMismatch, match=rf"version 99, this code knows {database.VERSION}"):
        await store.open()
    assert await store.schema_version() == (99, database.VERSION)


def test_an_older_version_is_brought_up_step_by_step(path: str) -> None:
    steps = {
        database.VERSION: ["ALTER TABLE bide_task ADD COLUMN colour TEXT"],
        database.VERSION + 1: ["CREATE INDEX bide_task_colour ON bide_task (colour)", "ANALYZE"],
    }
    with closing(connection.connect(path)) as opened:
        database.prepare(opened, path)
        database.prepare(opened, path, wanted=database.VERSION + 2, steps=steps)
        assert database.found_version(opened) == database.VERSION + 2
        assert opened.execute("SELECT colour FROM bide_task").fetchall() == []
        database.prepare(opened, path, wanted=database.VERSION + 2, steps=steps)


def test_a_step_that_fails_leaves_the_older_version_whole(path: str) -> None:
    steps = {database.VERSION: ["ALTER TABLE bide_task ADD COLUMN colour TEXT", "SELECT no such thing"]}
    with closing(connection.connect(path)) as opened:
        database.prepare(opened, path)
        with pytest.raises(sqlite3.OperationalError):
            database.prepare(opened, path, wanted=database.VERSION + 1, steps=steps)
        assert database.found_version(opened) == database.VERSION
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            opened.execute("SELECT colour FROM bide_task")


def test_without_strict_tables_the_schema_is_the_same_but_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        database.prepare(opened, ":memory:")
        (text,) = opened.execute("SELECT sql FROM sqlite_master WHERE name = 'bide_task'").fetchone()
        assert not text.endswith("STRICT")


async def test_two_stores_of_one_process_must_agree(store: SqliteStore, path: str) -> None:
    same = SqliteStore(path)
    await same.open()
    await put_one(same)
    assert await look(store, Ref("t", "k"))
    await same.close()
    other = SqliteStore(path, synchronous="normal")
    with pytest.raises(StoreMismatch, match=r"open with synchronous='full'.*instead of 'normal'"):
        await other.open()
    await store.close()
    await other.open()
    await other.close()


async def test_a_file_that_apsw_has_open_is_refused(path: str) -> None:
    await SqliteStore(path).migrate()
    theirs = apsw.Connection(path)
    try:
        store = SqliteStore(path)
        with pytest.raises(StoreMismatch, match="apsw has this file open"):
            await store.open()
        with pytest.raises(StoreMismatch, match="apsw has this file open"):
            await store.schema_version()
    finally:
        theirs.close()
    await store.open()
    elsewhere = apsw.Connection(f"{path}-other")
    assert any("2 SQLite libraries" in finding.what for finding in await store.diagnose())
    elsewhere.close()
    await store.close()


_OPEN = """
import asyncio, sys
from bide.stores.sqlite import SqliteStore
from bide.testing.store_suite.base import new, put_one

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    await put_one(store, new(sys.argv[2]))
    await store.close()

asyncio.run(main())
"""


async def test_processes_that_open_a_new_file_at_once_make_one_schema(path: str) -> None:
    started = [subprocess.Popen([sys.executable, "-c", _OPEN, path, str(number)]) for number in range(3)]
    assert [one.wait() for one in started] == [0] * 3
    async with opened(path) as store:
        assert len(await listed(store, Filter())) == 3


async def test_a_child_does_not_touch_its_parents_connections(store: SqliteStore) -> None:
    await put_one(store)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                store._open()
            except StoreUnavailable as error:
                status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert await look(store, Ref("t", "k"))


async def test_it_says_what_it_is(store: SqliteStore, path: str) -> None:
    assert repr(store) == f"<SqliteStore {path} open>"
    findings = await store.diagnose()
    said = {finding.what.split(" ")[0] for finding in findings if finding.ok}
    assert {"schema", "write-ahead", "quick_check:"} <= said
    assert all(finding.ok or finding.advice for finding in findings)
    await put_one(store, new("after"))


async def test_an_opening_that_is_cancelled_leaves_no_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()

    class Noted(OpenFile):
        def __init__(self, settings: Any, *, is_store: bool) -> None:
            super().__init__(settings, is_store=is_store)
            made.set()

    monkeypatch.setattr(database, "OpenFile", Noted)
    opening = asyncio.ensure_future(SqliteStore(path).open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert await asyncio.to_thread(made.wait, PATIENCE)
    await until(lambda: not [one for one in threading.enumerate() if path in one.name], "its threads to end")


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False), ((3, 44, 5), False), ((3, 44, 6), True), ((3, 45, 0), False), ((3, 50, 6), False),
        ((3, 50, 7), True), ((3, 51, 0), False), ((3, 51, 2), False), ((3, 51, 3), True), ((3, 53, 0), True),
    ],
)  # fmt: skip
def test_versions_that_have_the_wal_reset_race_closed(version: tuple[int, int, int], safe: bool) -> None:
    assert resets_safely(version) is safe


def test_the_library_in_use_is_found() -> None:
    assert any("sqlite3" in name for name in mapped_libraries())
