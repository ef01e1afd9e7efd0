"""The thread that writes the WAL back into the file, so that no commit has to stand still for it.

SQLite's own way is that whoever commits past a thousand pages also checkpoints: some commit then takes tens of
milliseconds. Here the writer only counts, and wakes this thread. What it does (PASSIVE) hinders nobody; but a writer
that never pauses also never lets the WAL start over, so past a size this thread takes the lock, and with that makes a
short stop (`RESTART`), for the little that was written meanwhile.

SQLite before 3.51.3 has a race there (see `resets_safely`), for checkpoints that start when nothing is left
to write back. Such a one is never started: on these versions a commit of one row comes right before each checkpoint,
and until that row is written back too, which is this checkpoint's own work, no commit can let the WAL start over.

How much is in the WAL cannot be asked of SQLite without a checkpoint, and the size of its file says nothing, since that
is used again from the start. So the writer counts rows and commits, and each checkpoint corrects how many pages that
was: a row is one to three pages where keys are random, and a fortieth of one where they rise.
"""

from __future__ import annotations

import sqlite3
import threading

from bide.core.errors import StoreUnavailable
from bide.stores.sqlite.connection import PAGE, STOP_BYTES, WriteLock, patiently
from bide.stores.sqlite.disk_reserve import disk_bytes
from bide.stores.sqlite.errors import is_busy
from bide.stores.sqlite.rows import QUERIES

KICK_PAGES = 1024
"""Pages (4 MiB) in the WAL after which it is written back: SQLite's own figure. Fewer on a small disk."""
_OF_A_COMMIT = 3
"""Pages of a commit, however few rows it writes: a row and its places in two indexes."""
_RESETS_SAFELY = (((3, 44, 6), (3, 45, 0)), ((3, 50, 7), (3, 51, 0)), ((3, 51, 3), (1000, 0, 0)))


def resets_safely(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """True if this SQLite has the WAL-reset race closed (3.51.3, and what that was carried back to).

    Before, a checkpoint that starts when there is nothing left to write back, at the instant at which a commit lets
    the WAL start over, could take the new commit for one that is in the file already: it was then lost.
    """
    return any(first <= version < end for first, end in _RESETS_SAFELY)


class Checkpointer:
    """Owns a connection for checkpoints. Each writer calls `committed` after its commit."""

    def __init__(
        self, path: str, connection: sqlite3.Connection, lock: WriteLock, *, mark_first: bool | None = None
    ) -> None:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA synchronous = NORMAL")
        size = disk_bytes(path)
        self._kick_pages = max(32, min(KICK_PAGES, size // (24 * PAGE)))
        self._stop_bytes = min(STOP_BYTES, size // 8)
        self._lock = lock
        self._mark_first = not resets_safely() if mark_first is None else mark_first
        self._connection = connection
        self._kick = threading.Semaphore(0)
        self._closing = False
        self._busy = False
        self._changes = 0
        self._commits = 0
        self._pages_per_change = 1.0
        self._wal_pages = 0
        """Pages in the WAL when it was last looked at."""
        self._thread = threading.Thread(target=self._run, name=f"bide checkpoints of {path}", daemon=True)
        self._thread.start()

    def committed(self, changes: int) -> None:
        """So many rows were committed. Now and then a count is lost, when two threads commit: it is a guess anyhow."""
        if changes == 0:
            return
        self._changes += changes
        self._commits += 1
        if self._busy or self._changes * self._pages_per_change + _OF_A_COMMIT * self._commits < self._kick_pages:
            return
        self._busy = True
        self._kick.release()

    def stop(self) -> None:
        """End the thread. Blocks."""
        self._closing = True
        self._kick.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._kick.acquire()
            if self._closing:
                return
            try:
                self._checkpoint()
            except StoreUnavailable:  # an open transaction: the next commit asks again
                pass
            except sqlite3.Error as error:
                if not is_busy(error):
                    # Whatever it is (a full disk, say), the next commit meets it too, and somebody there is told.
                    self._changes = self._commits = 0
            self._busy = False

    def _checkpoint(self) -> None:
        changes, commits = self._changes, self._commits
        if self._mark_first:
            with self._lock:
                self._mark()
        _, pages, written = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        new = pages - self._wal_pages if pages >= self._wal_pages else pages
        if changes:
            measured = max(new - _OF_A_COMMIT * commits, 0) / changes
            self._pages_per_change = max(0.01, (self._pages_per_change + measured) / 2)
        self._wal_pages = pages
        self._changes -= changes
        self._commits -= commits
        if pages * PAGE > self._stop_bytes and (written < pages or self._changes):
            with self._lock:
                self._restart()

    def _mark(self) -> None:
        patiently(self._connection, QUERIES["mark_checkpoint"], patience=0.1)

    def _restart(self) -> None:
        """Let the WAL start over. Where another process still reads in it, it grows on till later."""
        if self._mark_first:
            self._mark()
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        if not busy:
            self._changes = self._commits = self._wal_pages = 0
