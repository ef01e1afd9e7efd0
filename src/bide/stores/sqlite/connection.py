"""Connections to a file: which library may open it, how a transaction begins, and who goes first within a process.

POSIX locks belong to a process, and closing any descriptor of a file lets go of all of them. One SQLite library knows
that and keeps count; two copies of it (apsw and pysqlite3 carry their own) do not know of each other, so one takes away
the other's locks, and two writers at once lose what was acknowledged. So a file is touched through one of them only.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
import time
from typing import Any

from bide.core.errors import StoreMismatch, StoreUnavailable
from bide.stores.sqlite.errors import is_busy

PATIENCE = 5.0
"""Seconds that an operation waits for another process to let go of the file."""

PAGE = 4096
STOP_BYTES = 64 * 1024 * 1024
"""Size of the WAL past which writers stop for it to start over, and to which its file is then cut."""

_FIRST_SLEEP, _LONGEST_SLEEP = 0.0002, 0.005


def connect(
    path: str,
    *,
    cache_kib: int = 1024,
    checkpoint_pages: int = 0,
    factory: type[sqlite3.Connection] = sqlite3.Connection,
) -> sqlite3.Connection:
    """A connection that begins no transaction by itself. `checkpoint_pages`: after a commit, so many pages in the WAL
    are written back at once; 0: never, since where a store is open a thread does it."""
    connection = sqlite3.connect(
        path, timeout=PATIENCE, isolation_level=None, check_same_thread=False, cached_statements=256, factory=factory
    )
    connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
    connection.execute(f"PRAGMA journal_size_limit = {STOP_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{cache_kib}")
    return connection


def create_private(path: str) -> None:
    """Make an empty file that its owner alone may read, whatever the umask, unless there is one; SQLite gives the
    files beside it the same mode. Whoever reads the store reads every payload, and what is kept of tokens."""
    with _open_files_lock:  # a connection of this process would lose its locks as this descriptor is closed
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # it is there; or SQLite says why it cannot be made
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)


def patiently(connection: sqlite3.Connection, statement: str, *, patience: float = PATIENCE) -> Any:
    """Run `statement`, again and again while somebody else holds the lock; the first row of its answer.

    With our own sleeps of 0.2 to 5 ms, jittered: SQLite's busy handler sleeps up to 100 ms, which is what a worker
    would then be late by.
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
        time.sleep(sleep * random.uniform(0.5, 1.5))
        sleep = min(sleep * 1.5, _LONGEST_SLEEP)


class WriteLock:
    """The right to write to the file, which one connection of this process has at a time.

    SQLite has such a lock too, but waiting for it is polling; between our own threads a plain lock does. Two of them:
    one to stand in line with, one to write under, so that a busy writer thread cannot overtake a waiting transaction.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._line = threading.Lock()
        self._write = threading.Lock()

    def acquire(self) -> None:
        """Wait for the turn to write, which anybody may end. Raises StoreUnavailable once patience is over."""
        if self._line.acquire(timeout=PATIENCE):
            try:
                if self._write.acquire(timeout=PATIENCE):
                    return
            finally:
                self._line.release()
        raise StoreUnavailable(
            f"{self._path}: a transaction of this process has been open for more than {PATIENCE:.0f} s, and nobody "
            "else can write meanwhile; nothing was done"
        )

    def try_acquire(self) -> bool:
        return self._write.acquire(blocking=False)

    def release(self) -> None:
        self._write.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SharedFile:
    """A database file that is open in this process, and what all stores on it share: a lock, and how durable it is."""

    def __init__(self, path: str, synchronous: str, identity: tuple[int, int, int]) -> None:
        self.identity = identity
        """Process, device and inode."""
        self.synchronous = synchronous
        self.lock = WriteLock(path)
        self.stores = 0

    def leave(self) -> None:
        """One store less; the last one lets the file be opened with other settings."""
        with _open_files_lock:
            self.stores -= 1
            if self.stores == 0:
                del _open_files[self.identity]


_open_files: dict[tuple[int, int, int], SharedFile] = {}
"""The one thing here that outlives a store: two stores on one file must know of each other, since they share the file's
locks and must not disagree about durability. The process is part of the name, so that a child after fork starts with
none."""
_open_files_lock = threading.Lock()


def enter(path: str, synchronous: str) -> SharedFile:
    """The file, to be left again. Raises StoreMismatch if it is open here with another `synchronous`."""
    status = os.stat(path)
    identity = (os.getpid(), status.st_dev, status.st_ino)
    with _open_files_lock:
        file = _open_files.setdefault(identity, SharedFile(path, synchronous, identity))
        if file.synchronous != synchronous:
            raise StoreMismatch(
                f"{path}: this process has it open with synchronous={file.synchronous!r}; "
                f"give that instead of {synchronous!r}, or share one store"
            )
        file.stores += 1
        return file


def refuse_other_libraries(path: str) -> None:
    """Raises StoreMismatch if apsw has the file open in this process."""
    if opened_by_apsw(path):
        raise StoreMismatch(
            f"{path}: apsw has this file open in this process. apsw carries its own SQLite library, and two of them on "
            "one file lose each other's locks, and with them acknowledged writes: use the standard library's sqlite3 "
            "for that file here, or another process"
        )


def opened_by_apsw(path: str) -> bool:
    """True if a connection of apsw's, if that is loaded at all, is to this file."""
    apsw = sys.modules.get("apsw")
    if apsw is None or not os.path.exists(path):
        return False
    for connection in apsw.connections():
        try:
            name = connection.db_filename("main")
        except apsw.Error:  # being closed
            continue
        if name and os.path.exists(name) and os.path.samefile(name, path):
            return True
    return False
