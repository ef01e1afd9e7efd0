"""Connections to a file: how they are opened, how a transaction begins, and who goes first within a process."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from typing import Any, TypeAlias

from bide.core.errors import StoreMismatch, StoreUnavailable
from bide.stores.sqlite.errors import is_busy

PATIENCE = 5.0
"""Seconds that an operation waits for another process to let go of the file."""

PAGE = 4096
STOP_BYTES = 64 * 1024 * 1024
"""Size of the WAL past which the writer makes a stop for it to start over, and to which its file is then cut."""

_FIRST_SLEEP, _LONGEST_SLEEP = 0.0002, 0.005


def connect(
    path: str, *, cache_kib: int = 1024, factory: type[sqlite3.Connection] = sqlite3.Connection
) -> sqlite3.Connection:
    """A connection that begins no transaction by itself."""
    connection = sqlite3.connect(
        path, timeout=PATIENCE, isolation_level=None, check_same_thread=False, cached_statements=256, factory=factory
    )
    # Who reaches the WAL's size limit checkpoints inside its own commit: here a thread of its own does it instead.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
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
    """Which of this process's connections may write to the file now.

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


class OpenFile:
    """A database file that stores of this process have open, and the settings it is open with."""

    def __init__(self, identity: Identity, path: str, settings: dict[str, object]) -> None:
        self.settings = settings
        self.lock = WriteLock(path)
        self.stores = 0
        self._identity = identity

    def leave(self) -> None:
        """One store less; the last one lets the file be opened with other settings."""
        with _open_files_lock:
            self.stores -= 1
            if self.stores == 0:
                del _open_files[self._identity]


Identity: TypeAlias = tuple[int, int, int]
"""Of an open file: process, device and inode."""

_open_files: dict[Identity, OpenFile] = {}
"""The one thing here that outlives a store: two stores on one file must know of each other, since they share the file's
locks (POSIX locks belong to the process) and must not disagree about durability. The process is part of the name, so
that a child after fork starts with none."""
_open_files_lock = threading.Lock()


def enter(identity: Identity, path: str, settings: dict[str, object]) -> OpenFile:
    """The entry of an open file, to be left again. Raises StoreMismatch if it is open here with other settings."""
    with _open_files_lock:
        entry = _open_files.get(identity)
        if entry is None:
            entry = _open_files[identity] = OpenFile(identity, path, settings)
        elif entry.settings != settings:
            name = next(name for name in settings if settings[name] != entry.settings[name])
            raise StoreMismatch(
                f"{path}: this process has it open with {name}={entry.settings[name]!r}; "
                f"give that instead of {settings[name]!r}, or share one store"
            )
        entry.stores += 1
        return entry
