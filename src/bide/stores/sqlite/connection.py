"""Connections to a file, the meaning of SQLite's errors, and the disk space that is kept free.

POSIX locks belong to a process, and closing any descriptor of a file releases all of them. An SQLite library accounts
for that, but two copies of it (apsw and pysqlite3 bundle their own) do not know of each other: one releases the other's
locks, and two concurrent writers lose acknowledged data. So a process must use a file through one library only. Within
the process, one connection at a time holds the `WriteLock`.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from msgspec import Struct, field

from bide.core.errors import BadInput, BideError, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.payloads import payload_sizes

# --- errors

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT})
_FORBIDDEN = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
_OF_THE_FILE = _BUSY | _FULL | _DAMAGED | _FORBIDDEN | {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN}

_PART_IS_GONE = re.compile(
    "no such (table|index|column)|has no column|malformed|Could not decode|unsupported file format"
)
_NOT_STORABLE = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError, sqlite3.DataError)
"""The errors for a value of a wrong type, or one too large for SQLite."""


def code_of(error: BaseException) -> int:
    """SQLite's primary result code (for an IOERR, the extended code) if it is about the file or its lock, else 0."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_IOERR:
        return code
    return primary if primary in _OF_THE_FILE else 0


def lost_part(connection: sqlite3.Connection | sqlite3.Cursor, what: str) -> StoreCorrupt:
    """The error for a file whose pages are sound but in which part of bide's data is missing."""
    return _damaged(connection.execute("PRAGMA database_list").fetchone()[2], what)


def _damaged(path: str, what: object) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path}: the file is damaged ({what}); stop all users of it, look with 'PRAGMA integrity_check', "
        "and restore a backup or save what can be saved with '.recover'"
    )


def is_busy(error: BaseException) -> bool:
    """True if another connection holds the requested lock."""
    return code_of(error) in _BUSY


def full(path: str, why: str) -> StoreFull:
    return StoreFull(f"{path}: no room for new tasks ({why}); what is there still drains: free some disk space")


def translate(error: Exception, path: str, *, adding: bool = False, own: bool = True) -> Exception:
    """The error to raise from `error`: unchanged if it is not the database's, a copy if it is bide's.

    `own`: false for a statement on a watched table, where a missing column is no damage to the store.
    """
    if isinstance(error, BideError):
        return copy(error)  # raised from itself, it would be its own cause, and a walk along the causes would not end
    if isinstance(error, UnicodeEncodeError):
        return BadInput("text", error.object, "text that UTF-8 can hold: no lone surrogates")
    if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes the damaged data, which may not be UTF-8
        return _damaged(path, error)
    if isinstance(error, OverflowError):
        return BadInput("number", str(error), "integers of at most 64 bits")
    if isinstance(error, OSError):
        return StoreUnavailable(f"{path}: {error}")
    if not isinstance(error, sqlite3.Error):
        return error
    if own and isinstance(error, sqlite3.IntegrityError) and not adding:
        return _damaged(path, error)  # values read from a row cannot be written back
    if isinstance(error, _NOT_STORABLE) and "closed" not in str(error):
        return BadInput("task", str(error), "fields of the types that the record declares")
    code = code_of(error)
    if code in _BUSY:
        return StoreUnavailable(f"{path}: another connection keeps the file locked ({error}); nothing was done")
    if code in _FULL:
        return full(path, str(error)) if adding else StoreUnavailable(f"{path}: the disk is full ({error})")
    if code in _DAMAGED or (own and not code and _PART_IS_GONE.search(str(error))):
        return _damaged(path, error)
    if code == sqlite3.SQLITE_NOTADB:
        return StoreMismatch(f"{path}: not an SQLite database; give another path, or move that file away")
    why = ""
    if code in _FORBIDDEN:
        why = f"may not be written ({error}); the file and its folder must be writable"
    elif code == sqlite3.SQLITE_CANTOPEN:
        why = f"cannot be opened ({error}); does the folder exist, and may we write there?"
    return StoreUnavailable(f"{path}: {why or error}")


# --- connections

PATIENCE = 5.0
"""Seconds that an operation waits for another process to release the file."""

PAGE = 4096
STOP_BYTES = 64 * 1024 * 1024
"""The size of the WAL above which writers pause until it starts over, and to which its file is then truncated."""

_FIRST_SLEEP, _LONGEST_SLEEP = 0.0002, 0.005


class Connection(sqlite3.Connection):
    """A connection that a forked child can close, see `_close_inherited`."""

    path = ""
    guard: threading.Lock | None = None
    """Held by the thread that uses the connection."""

    def close(self) -> None:
        with _open_files_lock:  # a child that is forked amid a close would inherit locks without a connection to close
            super().close()


def connect(
    path: str,
    *,
    cache_kib: int = 1024,
    checkpoint_pages: int = 0,
    guard: threading.Lock | None = None,
    factory: type[Connection] = Connection,
) -> Connection:
    """A connection that begins no transaction by itself.

    `checkpoint_pages`: a commit that leaves this many pages in the WAL writes them back; 0: never, because a thread of
    the open store does it. `guard`: of the connection; the caller holds it.
    """
    if _closing is not None:
        _closing.join(PATIENCE)
        if _inherited:
            raise StoreUnavailable(
                f"{path}: this process was forked while another thread of its parent was in SQLite, which cannot be "
                "used here: fork at another time, or start the process by spawn"
            )
    with _open_files_lock:
        connection = sqlite3.connect(
            path,
            timeout=PATIENCE,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=factory,
        )
        connection.path, connection.guard = path, guard
        _connections.add(connection)
    connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
    connection.execute(f"PRAGMA journal_size_limit = {STOP_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{cache_kib}")
    return connection


def create_private(path: str) -> None:
    """Create an empty file that only its owner may read, whatever the umask, unless the file exists.

    SQLite gives its side files the same mode. A reader of the file could read every payload and stored token data.
    """
    with _open_files_lock:  # a connection of this process would lose its locks as this descriptor is closed
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # it exists, or SQLite reports why it cannot be created
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)


def patiently(connection: sqlite3.Connection, statement: str, *, patience: float = PATIENCE) -> Any:
    """Run `statement`, retrying while another connection holds the lock; return the first row of its answer.

    Sleeps 0.1 to 5 ms between tries, with jitter. SQLite's busy handler sleeps up to 100 ms, too late for a worker.
    """
    deadline = 0.0
    sleep = _FIRST_SLEEP
    while True:
        try:
            return connection.execute(statement).fetchone()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            now = time.monotonic()
            if deadline == 0.0:
                deadline = now + patience
            elif now >= deadline:
                raise
        time.sleep(sleep * random.uniform(0.5, 1.0))
        sleep = min(sleep * 1.5, _LONGEST_SLEEP)


class WriteLock(Struct, eq=False):
    """The right to write to the file, which one connection of this process holds at a time.

    SQLite's own lock can only be polled; between threads of one process a plain lock is enough. There are two locks,
    one to queue for the turn and one to write, so that a busy writer thread cannot overtake a waiting transaction.
    """

    path: str
    restarts: int = 0
    """How often it was held for a restart of the WAL, which takes some 10 ms."""
    loop_thread: int = 0
    """The thread whose event loop must run before it is released, while a transaction of that loop holds it."""
    _line: threading.Lock = field(default_factory=threading.Lock)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self) -> None:
        """Wait for the right to write. Any thread may release it. Raises StoreUnavailable when patience ends."""
        if self._line.acquire(timeout=PATIENCE):
            try:
                if self.guard.acquire(timeout=PATIENCE):
                    return
            finally:
                self._line.release()
        raise StoreUnavailable(
            f"{self.path}: a transaction of this process has been open for more than {PATIENCE:.0f} s, and no "
            "other can write meanwhile; nothing was done"
        )

    def try_acquire(self) -> bool:
        return self.guard.acquire(blocking=False)

    def release(self) -> None:
        self.guard.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SharedFile(Struct, eq=False):
    """A database file open in this process, with the state that all stores on it share: a lock, and its durability."""

    identity: tuple[int, int, int]
    """Process, device and inode."""
    synchronous: str
    lock: WriteLock
    stores: int = 0

    def leave(self) -> None:
        """Note that a store has closed; after the last one, the file can be opened with other settings."""
        with _open_files_lock:
            self.stores -= 1
            if self.stores == 0:
                del _open_files[self.identity]


_open_files: dict[tuple[int, int, int], SharedFile] = {}
"""The only state here that outlives a store: two stores on one file share its locks and must agree on its durability.
The process id is part of the key, so that a forked child starts without entries."""
_open_files_lock = threading.Lock()


def enter(path: str, synchronous: str) -> SharedFile:
    """Register a store on the file, until `leave`. Raises StoreMismatch if it is open with another `synchronous`."""
    status = os.stat(path)
    identity = (os.getpid(), status.st_dev, status.st_ino)
    if identity[1:] in _locks_unknown:
        raise StoreUnavailable(
            f"{path}: this process was forked while its parent was amid a transaction on the file, so "
            "its locks would not hold: fork at another time, or start the process by spawn"
        )
    with _open_files_lock:
        file = _open_files.setdefault(identity, SharedFile(identity, synchronous, WriteLock(path)))
        if file.synchronous != synchronous:
            raise StoreMismatch(
                f"{path}: this process has it open with synchronous={file.synchronous!r}; "
                f"give that instead of {synchronous!r}, or share one store"
            )
        file.stores += 1
        return file


# --- forks

_FORK_PATIENCE = 2.0
"""Seconds for which a fork waits for the end of what other threads do with their connections."""
_CLOSE_PATIENCE = 0.2
"""Seconds for which a forked child waits for the close of what it inherited, which takes a few milliseconds."""
_forking = threading.Lock()
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_guards: list[threading.Lock] = []
"""Held by the forking thread until the fork is done."""
_locks_unknown: set[tuple[int, int]] = set()
"""Device and inode of each file on which this process inherited a connection that could not be closed."""
_inherited: list[Connection] = []
"""The connections of the parent that are still to be closed."""
_closing: threading.Thread | None = None
"""The thread that closes them."""


def _pause_users() -> None:
    _forking.acquire()
    deadline = time.monotonic() + _FORK_PATIENCE
    here = threading.get_ident()
    while True:
        _open_files_lock.acquire()
        # a transaction on the event loop of this thread cannot end meanwhile
        unending = {file.lock.guard for file in _open_files.values() if file.lock.loop_thread == here}
        missing = {connection.guard for connection in _connections} - unending - {None, *_guards}
        if not missing or time.monotonic() >= deadline:
            return  # with the lock, so that no connection is added before the fork
        _open_files_lock.release()
        left = (guard for guard in missing if guard is not None)
        _guards.extend(guard for guard in left if guard.acquire(timeout=max(0.0, deadline - time.monotonic())))


def _let_users_go_on() -> None:
    while _guards:
        _guards.pop().release()
    _open_files_lock.release()
    _forking.release()


def _close_inherited() -> None:
    """In a forked child, close the parent's connections.

    While one is open, SQLite counts the parent's locks on the file, which the child does not have, as the child's. It
    would then take none for its own connections, so another process could delete a WAL with acknowledged tasks of the
    child. Only connections that are neither in use nor in a transaction are closed, so this rolls nothing back.

    A thread does it, because it may block for ever: if another thread was in SQLite during the fork, even for another
    file, SQLite's mutexes stay locked in the child. A child that does not use SQLite must not wait for them.
    """
    global _closing
    for connection in _connections:
        with suppress(sqlite3.ProgrammingError, OSError):  # it is closed already, or the file is gone
            if connection.guard in _guards and not connection.in_transaction:
                _inherited.append(connection)
            else:
                status = os.stat(connection.path)
                _locks_unknown.add((status.st_dev, status.st_ino))
    _connections.clear()
    _let_users_go_on()
    if _inherited:
        _closing = threading.Thread(target=_close_all, name="bide closes what was inherited", daemon=True)
        _closing.start()
        _closing.join(_CLOSE_PATIENCE)


def _close_all() -> None:
    while _inherited:
        sqlite3.Connection.close(_inherited[-1])
        _inherited.pop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_users, after_in_parent=_let_users_go_on, after_in_child=_close_inherited)


# --- other libraries


def refuse_other_libraries(path: str) -> None:
    """Raise StoreMismatch if apsw has the file open in this process."""
    if opened_by_apsw(path):
        raise StoreMismatch(
            f"{path}: apsw has this file open in this process. apsw carries its own SQLite library, and two of them on "
            "one file lose each other's locks, and with them acknowledged writes: use the standard library's sqlite3 "
            "for that file here, or another process"
        )


def opened_by_apsw(path: str) -> bool:
    """True if apsw is loaded and has a connection to this file."""
    apsw = sys.modules.get("apsw")
    if apsw is None or not os.path.exists(path):
        return False
    for connection in apsw.connections():
        try:
            name = connection.db_filename("main")
        except apsw.Error:  # the connection is closing
            continue
        if name and os.path.exists(name) and os.path.samefile(name, path):
            return True
    return False


# --- the reserve of disk space

_EVERY = 1.0
"""The most seconds between checks, which cost three system calls."""
_FASTEST = 512 * 1024 * 1024
"""Bytes per second, more than any disk writes: a nearly full disk is checked again before it can be full."""


class DiskReserve(Struct, eq=False):
    """Refuses new tasks while the disk still has room to finish the existing ones."""

    path: str
    reserve: int
    identity: tuple[int, int] | None = None
    """Device and inode of the open file; None: do not check that the file still exists."""
    _check_at: float = 0.0
    _free: int = 0
    _kept: int = 0

    def check(self, tasks: Sequence[Any] = ()) -> None:
        """Raise StoreFull if these tasks would leave fewer free bytes than are kept, StoreUnavailable if the file is
        gone."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_file()
            # In this order, so that a caller on another thread also checks until the first check is over.
            self._free, self._kept = free_bytes(os.path.dirname(self.path)), kept_bytes(self.path, self.reserve)
            self._check_at = now + min(_EVERY, max(0, self._free - self._kept) / _FASTEST)
        size = sum(payload_sizes(tasks))
        if self._free - 2 * size < self._kept:
            raise full(self.path, f"{self._free} bytes free, {self._kept} are kept for what is there")
        self._free -= 2 * size  # once in the WAL and once in the file

    def _check_file(self) -> None:
        if self.identity is None:
            return
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self.identity:
            raise StoreUnavailable(
                f"{self.path}: the file was removed or replaced while it is open here, so writes would be lost: "
                "open it again, or restart this process"
            )


def kept_bytes(path: str, reserve: int) -> int:
    """Bytes that are not for new tasks: the reserve, or a quarter of a small disk; and the size of the WAL, which the
    file has to make room for."""
    if reserve == 0:
        return 0
    try:
        held = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        held = 0
    return min(reserve, disk_bytes(path) // 4) + held


def disk_bytes(path: str) -> int:
    """The size of the file system that holds a file."""
    found = os.statvfs(os.path.dirname(path))
    return found.f_blocks * found.f_frsize


def free_bytes(folder: str) -> int:
    """Bytes that an unprivileged user may still write in the folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
