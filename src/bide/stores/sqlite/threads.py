"""The threads of an open file: one writes, one reads, and one writes the WAL back.

    loop threads            writer thread
    submit ── queue ──▶  take all queued ─▶ BEGIN ─▶ run each ─▶ COMMIT ─▶ one call into each loop
                             ▲                                                          │
                             └──── operations that arrived meanwhile: the next group ◀──┘

A thread hop costs as much as a commit, and a commit as much as a hundred rows, so each group pays both once. If an
operation in a group fails, the whole group is rolled back and each operation runs alone, so that only the faulty one
gets the error.

The reader has a separate connection: in WAL mode readers and the writer do not wait for each other.

**Checkpoints.** By default SQLite checkpoints in the commit that passes a thousand pages, which takes tens of
milliseconds. Here the writer only counts, and wakes the `Checkpointer`'s thread, which writes the WAL back into the
file. A PASSIVE checkpoint blocks no writer, but under a writer that never pauses the WAL never starts over. So above a
certain size the thread takes the lock for a short RESTART, which only writes back what was added meanwhile.

SQLite before 3.51.3 has a race (see `resets_safely`) in checkpoints that start when nothing is left to write back. bide
never starts such a checkpoint: on these versions it commits one row right before each checkpoint. Until the checkpoint
has written that row back, no commit can make the WAL start over.

SQLite reports the pages in the WAL only through a checkpoint, and the size of the WAL's file is no measure, because the
file is reused from its start. So the writer counts rows and commits, and each checkpoint corrects the pages per row:
one to three if keys are random, a fortieth if they rise.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from msgspec import Struct

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.stores.sqlite.commit_watch import Notifier
from bide.stores.sqlite.connection import (
    PAGE,
    STOP_BYTES,
    Connection,
    SharedFile,
    WriteLock,
    disk_bytes,
    free_bytes,
    is_busy,
    kept_bytes,
    patiently,
    translate,
)
from bide.stores.sqlite.operations import Fault, UnitOfWork
from bide.stores.sqlite.rows import QUERIES

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GROUP = 4096
"""The most operations in one transaction, so that the first does not wait too long for the last."""


class Operation(Struct, eq=False):
    """A call on its way through a thread."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    durable: bool
    adding: bool
    result: Any = None
    error: Exception | None = None


class _Thread:
    """A thread that owns a connection and runs operations until it is stopped."""

    def __init__(self, path: str, connection: Connection, name: str) -> None:
        self._path = path
        self._connection = connection
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._closed = False
        self._gate = threading.Lock()
        """Keeps operations from being queued behind the end marker, where they would never run."""
        self._thread = threading.Thread(target=self._run, name=f"bide {name} of {path}", daemon=True)
        self._thread.start()

    def _put(
        self, call: Callable[..., Any], arguments: tuple[Any, ...], durable: bool = False, adding: bool = False
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._gate:
            if self._closed:
                raise StoreUnavailable(f"{self._path}: the store is closed")
            self._queue.put(Operation(call, arguments, loop, future, durable, adding))
        return future

    def stop(self) -> None:
        """Finish the submitted operations, then end the thread. Blocks; a second call does nothing."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError


class Reader(_Thread):
    """Owns a connection that cannot write. `submit` may be called from any event loop."""

    def __init__(self, path: str, connection: Connection) -> None:
        connection.execute("PRAGMA query_only = ON")
        self._guard = connection.guard = threading.Lock()
        super().__init__(path, connection, "reader")

    def submit(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> asyncio.Future[T]:
        """Run `call` in one read transaction, so that it sees one state of the file."""
        return self._put(call, arguments)

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            try:
                with self._guard:
                    operation.result = self._read(operation)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                operation.error = translate(error, self._path)
            _hand_back([operation])

    def _read(self, operation: Operation) -> Any:
        cursor = self._connection.cursor()
        if self._connection.in_transaction:  # the last rollback failed
            cursor.execute("ROLLBACK")
        cursor.execute("BEGIN")
        try:
            return operation.call(cursor, *operation.arguments)
        finally:
            cursor.execute("ROLLBACK")


class Writer(_Thread):
    """Owns the write connection. `submit` may be called from any event loop."""

    def __init__(
        self,
        path: str,
        connection: Connection,
        file: SharedFile,
        notifier: Notifier,
        *,
        fault: Fault | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._lock = file.lock
        connection.guard = file.lock.guard
        self._durable = file.synchronous.upper()
        self._synchronous = ""
        self._notifier = notifier
        self._fault = fault
        self._checkpointer = checkpointer
        self._payload_bytes = 0
        """The bytes of payloads written since the checkpointer was last told of a commit."""
        super().__init__(path, connection, "writer")

    def submit(
        self, call: Callable[[UnitOfWork, *Ts], T], *arguments: *Ts, durable: bool = True, adding: bool = False
    ) -> asyncio.Future[T]:
        """Run `call` in a transaction; the result comes after the commit (a durable one if `durable`)."""
        return self._put(call, arguments, durable, adding)

    def _run(self) -> None:
        queue = self._queue
        going = True
        while going:
            group: list[Operation] = []
            while (operation := queue.get()) is not None:
                group.append(operation)
                if queue.empty() or len(group) == _GROUP:
                    break
            going = operation is not None
            if group:
                before = self._connection.total_changes
                try:
                    self._commit(group)
                except Exception as error:  # noqa: BLE001 - no other thread writes, so this one must continue
                    for operation in group:
                        operation.error = OutcomeUnknown(f"{self._path}: {error}")
                _hand_back(group)
                if self._checkpointer is not None:
                    self._checkpointer.committed(self._connection.total_changes - before + self._payload_bytes // PAGE)
                    self._payload_bytes = 0
                    self._checkpointer.keep_up()

    def _commit(self, group: list[Operation]) -> None:
        """Run the group as one transaction or, if that fails, each operation alone.

        If the transaction could not begin, all operations fail: each alone would only wait as long again.
        """
        begun = False
        try:
            with self._lock:
                self._begin(any(operation.durable for operation in group))
                begun = True
                work = self._transaction(group)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if begun and len(group) > 1:
                for operation in group:
                    self._commit([operation])
            else:
                for operation in group:
                    operation.error = translate(error, self._path, adding=operation.adding)
            return
        self._payload_bytes += work.payload_bytes
        work.point("after commit")
        if work.wakes:
            self._notifier.notify(work.wakes)

    def _begin(self, durable: bool) -> None:
        connection = self._connection
        if connection.in_transaction:  # the last rollback failed
            connection.execute("ROLLBACK")
        # A lease lost in a power cut is like a holder's death, so a group of leases does not wait for the disk.
        wanted = self._durable if durable else "NORMAL"
        if wanted != self._synchronous:
            connection.execute(f"PRAGMA synchronous = {wanted}")
            self._synchronous = wanted
        patiently(connection, "BEGIN IMMEDIATE")

    def _transaction(self, group: list[Operation]) -> UnitOfWork:
        """Run the group and commit, or roll back."""
        connection = self._connection
        try:
            work = UnitOfWork(
                connection.cursor(), fault=self._fault, writer=self._notifier.number, others=self._notifier.others
            )
            for operation in group:
                operation.result = operation.call(work, *operation.arguments)
            work.finish()
            work.point("before commit")
            connection.execute("COMMIT")
        except Exception:
            if connection.in_transaction:  # SQLite itself rolls back on a full disk
                connection.execute("ROLLBACK")
            raise
        return work


def _hand_back(group: list[Operation]) -> None:
    """Hand the results to their loops, by one call into each loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Operation]] = {}
    for operation in group:
        loops.setdefault(operation.loop, []).append(operation)
    for loop, operations in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, operations)
        except RuntimeError:  # the loop was closed, so no caller waits any more
            continue


def _resolve(operations: list[Operation]) -> None:
    for operation in operations:
        future = operation.future
        if future.done():
            continue
        if operation.error is None:
            future.set_result(operation.result)
        else:
            future.set_exception(operation.error)


# --- checkpoints

KICK_PAGES = 1024
"""Pages (4 MiB) in the WAL after which it is written back: about SQLite's default. Fewer on a small disk."""
_LONGEST_WAIT = 1.0
"""The most seconds for which the writer waits for a checkpoint."""
_OF_A_COMMIT = 3
"""The least pages of a commit, for a row and its entries in two indexes."""
_RESETS_SAFELY = (((3, 44, 6), (3, 45, 0)), ((3, 50, 7), (3, 51, 0)), ((3, 51, 3), (1000, 0, 0)))


def resets_safely(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """True if this SQLite has the fix for the WAL-reset race (3.51.3, and the versions with a backport).

    Without it, a checkpoint may start with nothing left to write back, just as a commit makes the WAL start over. It
    could then take the new commit for one that is already in the file, and the commit was lost.
    """
    return any(first <= version < end for first, end in _RESETS_SAFELY)


class Checkpointer:
    """Owns a connection for checkpoints. Each writer calls `committed` after a commit."""

    def __init__(self, path: str, connection: Connection, lock: WriteLock, *, mark_first: bool | None = None) -> None:
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA synchronous = NORMAL")
        size = disk_bytes(path)
        self._kick_pages = max(32, min(KICK_PAGES, size // (24 * PAGE)))
        self._stop_bytes = min(STOP_BYTES, size // 8)
        self._lock = lock
        self._mark_first = not resets_safely() if mark_first is None else mark_first
        self._connection = connection
        self._guard = connection.guard = threading.Lock()
        """Held for what is done without the write lock."""
        self._kick = threading.Semaphore(0)
        self._closing = False
        self._busy = False
        self._idle = threading.Event()
        self._path, self._folder = path, os.path.dirname(path)
        self._changes = 0
        self._commits = 0
        self._pages_per_change = 1.0
        self._wal_pages = 0
        """Pages in the WAL after the last checkpoint."""
        self._thread = threading.Thread(target=self._run, name=f"bide checkpoints of {path}", daemon=True)
        self._thread.start()

    def committed(self, changes: int) -> None:
        """Count the rows of a commit, and its pages of payload.

        Two concurrent calls may lose a count, which is only an estimate anyway.
        """
        if changes == 0:
            return
        self._changes += changes
        self._commits += 1
        if self._busy or self._changes * self._pages_per_change + _OF_A_COMMIT * self._commits < self._kick_pages:
            return
        self._busy = True
        self._idle.clear()
        self._kick.release()

    def keep_up(self) -> None:
        """On a nearly full disk, wait until the checkpoint under way has ended: the WAL could fill the disk before it.

        Called by the writer's thread after a commit.
        """
        if self._busy and free_bytes(self._folder) < kept_bytes(self._path, 2 * self._stop_bytes):
            self._idle.wait(_LONGEST_WAIT)

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
            except StoreUnavailable:  # a transaction is open: the next commit tries again
                pass
            except sqlite3.Error as error:
                if not is_busy(error):
                    # The next commit meets the same error (such as a full disk), and raises it to its caller.
                    self._changes = self._commits = 0
            self._busy = False
            self._idle.set()

    def _checkpoint(self) -> None:
        changes, commits = self._changes, self._commits
        if self._mark_first:
            with self._lock:
                self._mark()
        with self._guard:
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
        """Let the WAL start over. While another process still reads from it, it keeps growing."""
        self._lock.restarts += 1
        if self._mark_first:
            self._mark()
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        if not busy:
            self._changes = self._commits = self._wal_pages = 0
