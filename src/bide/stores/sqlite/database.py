"""An open file: its schema, its connections and the threads that own them, and the checks of `doctor`.

bide's tables can share a file with yours: a file is a bide store if it has the table `bide_meta`. Creating and
migrating the schema take one transaction under the write lock, so that twenty processes that open a new file at once
make one schema.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from msgspec import Struct

from bide.core.errors import BadInput, StoreMismatch, StoreUnavailable
from bide.ports import Finding
from bide.stores.sqlite.commit_watch import Notifier
from bide.stores.sqlite.connection import (
    STOP_BYTES,
    Connection,
    DiskReserve,
    connect,
    create_private,
    enter,
    free_bytes,
    kept_bytes,
    lost_part,
    opened_by_apsw,
    patiently,
    refuse_other_libraries,
    translate,
)
from bide.stores.sqlite.operations import Fault
from bide.stores.sqlite.rows import QUERIES, SCHEMA
from bide.stores.sqlite.threads import Checkpointer, Reader, Writer, resets_safely
from bide.stores.sqlite.transactions import Transactions

# --- an open file

VERSION = 1
"""The version of the schema that this code reads and writes."""

STEPS: Mapping[int, Sequence[str]] = {}
"""The statements that migrate each older version to the next: STEPS[1] migrates version 1 to 2."""

_STRICT_SINCE = (3, 37, 0)
_WRITER_CACHE_KIB = 8 * 1024
_READER_CACHE_KIB = 2 * 1024
_CHECKPOINT_CACHE_KIB = 64
_CHECKPOINT_PAGES = 1000
"""SQLite's default, for files without a `Checkpointer`."""


class Settings(Struct, frozen=True, kw_only=True):
    """The options for opening a file, which are validated here."""

    path: str
    synchronous: str
    disk_reserve: int = 0
    events_kept: int = 0
    watch: str = "poll"
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if not self.path or self.path.startswith(":memory:") or self.path.startswith("file:"):
            raise BadInput("path", self.path, "the path of a file; for tasks that need not survive, use memory:")
        if self.synchronous not in {"full", "normal"}:
            raise BadInput("synchronous", self.synchronous, '"full" or "normal"')
        if self.watch not in {"auto", "inotify", "poll"}:
            raise BadInput("watch", self.watch, '"auto", "inotify" or "poll"')
        if self.disk_reserve < 0:
            raise BadInput("disk_reserve", self.disk_reserve, "a number of bytes, 0 or more")
        if self.events_kept < 0:
            raise BadInput("events_kept", self.events_kept, "a number of events, 0 or more")


class OpenFile:
    """A file from open to close: its connections, and the threads that own them. The constructor opens it, and blocks.

    `is_store`: the file holds bide's tables, which are created if missing. Otherwise the file must exist; it is opened
    for watched tables only, and keeps its journal mode.
    """

    def __init__(self, settings: Settings, *, is_store: bool = True) -> None:
        path = self.path = os.path.abspath(settings.path)
        self.process = os.getpid()
        """The process that opened it: after a fork, the child must not touch its parent's connections."""
        self._closing = ExitStack()
        self._opening = threading.Lock()
        """The guard of each connection until the thread that owns it sets another."""
        self._opening.acquire()
        try:
            refuse_other_libraries(path)
            if is_store:
                _make(path)
            elif not os.path.exists(path):
                raise StoreUnavailable(f"{path}: there is no such file; create the table to be watched first")
            pages = 0 if is_store else _CHECKPOINT_PAGES
            writing = self._connect(_WRITER_CACHE_KIB, pages)
            if is_store:
                _keep_a_log(writing, path)
            shared = enter(path, settings.synchronous)
            self._closing.callback(shared.leave)
            if is_store:
                prepare(writing, path)
                writing.execute("PRAGMA busy_timeout = 0")  # from here on `patiently` does the waiting
            reading = self._connect(_READER_CACHE_KIB, pages)
            self.checkpointer = None
            if is_store:
                self.checkpointer = Checkpointer(path, self._connect(_CHECKPOINT_CACHE_KIB, pages), shared.lock)
                self._closing.callback(self.checkpointer.stop)
            committed = None if self.checkpointer is None else self.checkpointer.committed
            self.reserve = DiskReserve(path, settings.disk_reserve, shared.identity[1:] if is_store else None)
            self.notifier = Notifier(path, settings.watch, writing, shared.lock)
            self._closing.callback(self.notifier.close)
            self.transactions = Transactions(
                path, shared, self.reserve, self.notifier, settings.fault, committed, pages, settings.events_kept
            )
            self._closing.callback(self.transactions.close)
            self.writer = Writer(
                path, writing, shared, self.notifier, fault=settings.fault, checkpointer=self.checkpointer
            )
            self._closing.callback(self.writer.stop)
            self.reader = Reader(path, reading)
            self._closing.callback(self.reader.stop)
        except Exception as error:
            self._closing.close()
            raise translate(error, path, own=is_store) from error
        finally:
            self._opening.release()

    def _connect(self, cache_kib: int, checkpoint_pages: int) -> Connection:
        connection = connect(self.path, cache_kib=cache_kib, checkpoint_pages=checkpoint_pages, guard=self._opening)
        self._closing.callback(connection.close)
        return connection

    def close(self) -> None:
        """Let the threads finish, each before those that it uses, then close the connections.

        Blocks. A second call does nothing.
        """
        self._closing.close()


def _make(path: str) -> None:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreUnavailable(f"{path}: the folder {folder} does not exist; create it first")
    create_private(path)


def _keep_a_log(connection: sqlite3.Connection, path: str) -> None:
    mode = patiently(connection, "PRAGMA journal_mode = WAL")[0]
    if mode != "wal":
        raise StoreUnavailable(
            f"{path}: SQLite cannot keep a write-ahead log there (it says {mode!r}); use a local disk"
        )


async def open_in_thread(settings: Settings, *, is_store: bool = True) -> OpenFile:
    """Open a file in a thread; if the caller is cancelled meanwhile, the file is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(None, partial(OpenFile, settings, is_store=is_store))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opening: asyncio.Future[OpenFile]) -> None:
    if opening.cancelled() or opening.exception() is not None:
        return
    try:
        opening.get_loop().run_in_executor(None, opening.result().close)
    except RuntimeError:  # the loop is shutting down and starts no more threads
        opening.result().close()


class StoreFile:
    """The file of an open store, for its watched tables."""

    is_store = True

    def __init__(self, path: str, opened: Callable[[], OpenFile]) -> None:
        self.path = path
        self._opened = opened

    @property
    def opened(self) -> OpenFile:
        return self._opened()

    async def open(self, table: object) -> None:
        self._opened()

    async def close(self, table: object) -> None:
        """Do nothing: the store owns the file and keeps it open."""


class TableFile:
    """A file that is not a store, open while any of its watched tables is."""

    is_store = False

    def __init__(self, path: str, *, synchronous: str = "full") -> None:
        self._settings = Settings(path=os.path.abspath(path), synchronous=synchronous)
        self.path = self._settings.path
        self._tables: set[object] = set()
        self._turn = asyncio.Lock()
        self._opened: OpenFile | None = None

    @property
    def opened(self) -> OpenFile:
        if self._opened is None:
            raise StoreUnavailable(f"{self.path}: not open")
        return self._opened

    async def open(self, table: object) -> None:
        async with self._turn:
            if self._opened is None:
                self._opened = await open_in_thread(self._settings, is_store=False)
            self._tables.add(table)

    async def close(self, table: object) -> None:
        async with self._turn:
            self._tables.discard(table)
            if not self._tables and self._opened is not None:
                opened, self._opened = self._opened, None
                await asyncio.to_thread(opened.close)


# --- the schema


def version_of_file(path: str) -> int:
    """The schema's version in a file, which need not be open and is not created."""
    path = os.path.abspath(path)
    if not os.path.exists(path):
        return 0
    try:
        refuse_other_libraries(path)
        with closing(connect(path, cache_kib=_READER_CACHE_KIB)) as connection:
            connection.execute("PRAGMA query_only = ON")
            return found_version(connection)
    except Exception as error:
        raise translate(error, path) from error


def found_version(connection: sqlite3.Connection | sqlite3.Cursor) -> int:
    """The version of the schema in the file; 0 if there is none."""
    if not connection.execute(QUERIES["has_meta"]).fetchone()[0]:
        return 0
    found = connection.execute(QUERIES["version"]).fetchone()
    if found is None or type(found[0]) is not int:
        raise lost_part(connection, "the version of its schema is gone")
    version: int = found[0]
    return version


def prepare(
    connection: sqlite3.Connection, path: str, *, wanted: int = VERSION, steps: Mapping[int, Sequence[str]] = STEPS
) -> None:
    """Create the schema, or migrate it to `wanted`. Raises StoreMismatch for a newer one."""
    if found_version(connection) == wanted:
        return
    patiently(connection, "BEGIN IMMEDIATE")
    try:
        version = found_version(connection)  # read again: another process may have migrated first
        if version > wanted:
            raise StoreMismatch(
                f"{path}: its schema is version {version}, this code knows {wanted}: it was written by a newer bide; "
                "update this one"
            )
        if version == 0:
            for statement in SCHEMA:
                strict = sqlite3.sqlite_version_info >= _STRICT_SINCE
                connection.execute(statement if strict else statement.removesuffix(" STRICT"))
            version = VERSION
        while version < wanted:
            for statement in steps[version]:
                connection.execute(statement)
            version += 1
        connection.execute(QUERIES["put_version"], (version,))
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


# --- doctor

QUICK_CHECK_BYTES = 256 * 1024 * 1024
"""The largest file that `doctor` reads completely; a larger one takes seconds."""
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs")
_MAPPED = re.compile(r"(/\S*(?:libsqlite3|_sqlite3|/pysqlite3/|/apsw/)\S*\.so\S*)$", re.MULTILINE)


def diagnose(cursor: sqlite3.Cursor, path: str, reserve: int) -> list[Finding]:
    """Check the library, the file, its schema and its disk."""
    version = found_version(cursor)
    wal = os.stat(f"{path}-wal").st_size if os.path.exists(f"{path}-wal") else 0
    mode = stat.S_IMODE(os.stat(path).st_mode)
    free, kept = free_bytes(os.path.dirname(path)), kept_bytes(path, reserve)
    kind = _kind_of_file_system(path)
    return [
        Finding(
            resets_safely(),
            f"SQLite {sqlite3.sqlite_version}",
            "3.51.3 fixes a rare race between a checkpoint and a commit, which other users of the file may hit",
        ),
        _one_library(path),
        Finding(version == VERSION, f"schema version {version}", f"migrate to {VERSION}"),
        Finding(
            wal <= STOP_BYTES,
            f"write-ahead log of {wal} bytes",
            "a process keeps a read transaction open, so the log cannot be reset: find that process",
        ),
        Finding(
            not mode & stat.S_IRWXO,
            f"file mode {mode:04o}",
            f"every user of this machine may read the tasks: chmod o= {path} {path}-wal {path}-shm",
        ),
        Finding(free >= 2 * kept, f"{free} bytes free on the disk", f"new tasks are refused below {kept}"),
        Finding(
            kind not in _REMOTE,
            f"file system {kind or 'not known'}",
            "locks and shared memory fail there: use a local disk",
        ),
        _pages(cursor, path),
    ]


def _one_library(path: str) -> Finding:
    if opened_by_apsw(path):
        advice = "use the standard library's sqlite3 for it in this process"
        return Finding(False, "apsw has this file open too", advice, severe=True)
    libraries = mapped_libraries()
    if len(libraries) > 1:
        what = f"{len(libraries)} SQLite libraries in this process: {', '.join(libraries)}"
        return Finding(
            False, what, "make sure that only one of them ever opens this file: they lose each other's locks"
        )
    return Finding(True, "one SQLite library in this process")


def mapped_libraries() -> list[str]:
    """The SQLite library files mapped into this process; empty if the system does not list them."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            names = set(_MAPPED.findall(maps.read()))
    except OSError:
        return []
    libraries = {name for name in names if "_sqlite3" not in os.path.basename(name).removeprefix("py")}
    shared = any("libsqlite3" in os.path.basename(name) for name in libraries)
    if not shared:  # the standard library's module then contains SQLite itself
        libraries |= {name for name in names if os.path.basename(name).startswith("_sqlite3")}
    return sorted(libraries)


def _kind_of_file_system(path: str) -> str:
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            fields = [line.split() for line in mounts]
    except OSError:
        return ""
    real = os.path.realpath(path)
    above = [(point, kind) for _, point, kind, *_ in fields if os.path.commonpath((real, point)) == point]
    return max(above, key=lambda one: len(one[0]), default=("", ""))[1]


def _pages(cursor: sqlite3.Cursor, path: str) -> Finding:
    if os.stat(path).st_size > QUICK_CHECK_BYTES:
        what = "the file is large and was not read through"
        return Finding(True, what, "look with 'PRAGMA quick_check' now and then")
    (said,) = cursor.execute("PRAGMA quick_check(1)").fetchone()
    return Finding(said == "ok", f"quick_check: {said}", "restore a backup, or use '.recover'", severe=True)
