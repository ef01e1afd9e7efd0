"""The one thread that writes, and how it commits: everything that waits goes into one transaction.

    loop threads            writer thread
    submit ── queue ──▶  take all that waits ─▶ BEGIN ─▶ run each ─▶ COMMIT ─▶ one call into each loop
                             ▲                                                          │
                             └────────── what arrived meanwhile is the next group ◀─────┘

A thread hop costs as much as a commit, and a commit as much as a hundred rows; so both are paid once per group. If
anything in a group fails, all of it is rolled back and each operation runs alone: only the one to blame gets the error.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.sqlite.connection import WriteLock, patiently
from bide.stores.sqlite.errors import translate
from bide.stores.sqlite.work import Fault, Work

T = TypeVar("T")
Call: TypeAlias = Callable[[Work], Any]
Tell: TypeAlias = Callable[[Mapping[Topic, Millis]], None]

_GROUP = 4096
"""Operations in one transaction at most, so that the first does not wait for ever for the last."""


class Operation:
    """One call on its way through the writer."""

    __slots__ = ("adding", "call", "durable", "error", "future", "loop", "result")

    def __init__(self, call: Call, *, durable: bool, adding: bool) -> None:
        self.call = call
        self.durable = durable
        self.adding = adding
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None


class Writer:
    """Owns the write connection. `submit` may be called from any event loop."""

    def __init__(
        self,
        path: str,
        connection: sqlite3.Connection,
        lock: WriteLock,
        *,
        synchronous: str,
        fault: Fault | None,
        tell: Tell,
        need_stop: Callable[[int], bool],
    ) -> None:
        self.listening = False
        """Whether anybody wants to be told of wakes; gathering them is left out otherwise."""
        self._path = path
        self._connection = connection
        self._lock = lock
        self._durable = synchronous
        self._synchronous = ""
        self._fault = fault
        self._tell = tell
        self._need_stop = need_stop
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._closed = False
        self._gate = threading.Lock()
        """So that nothing is put behind the end of the queue, where nobody would take it."""
        self._thread = threading.Thread(target=self._run, name=f"bide writer of {path}", daemon=True)
        self._thread.start()

    async def submit(self, call: Callable[[Work], T], *, durable: bool, adding: bool = False) -> T:
        """Run `call` in a transaction; its result once that is committed (durably, if so asked)."""
        operation = Operation(call, durable=durable, adding=adding)
        with self._gate:
            if self._closed:
                raise StoreUnavailable(f"{self._path}: the store is closed")
            self._queue.put(operation)
        result: T = await operation.future
        return result

    def stop(self) -> None:
        """Finish what was submitted, then end the thread. Blocks; a second call does nothing."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def foreign_version(self) -> int | None:
        """A number that changes whenever another connection has committed; None while we are writing."""
        if not self._lock.try_acquire():
            return None
        try:
            version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
            return version
        finally:
            self._lock.release()

    def _run(self) -> None:
        queue = self._queue
        going = True
        while going:
            first = queue.get()
            group: list[Operation] = []
            if first is None:
                going = False
            else:
                group.append(first)
            while not queue.empty() and len(group) < _GROUP:
                more = queue.get()
                if more is None:
                    going = False
                else:
                    group.append(more)
            if group:
                before = self._connection.total_changes
                try:
                    self._commit(group)
                except Exception as error:  # noqa: BLE001 - nobody else writes, so this thread goes on
                    for operation in group:
                        operation.error = OutcomeUnknown(f"{self._path}: {error}")
                _hand_back(group)
                if self._need_stop(self._connection.total_changes - before):
                    self._make_stop()

    def _commit(self, group: list[Operation]) -> None:
        """Run the group as one transaction; or, when that fails, each of it alone."""
        error = self._transaction(group)
        if error is None:
            return
        if len(group) == 1 or isinstance(error, _NotBegun):
            for operation in group:
                cause = error.cause if isinstance(error, _NotBegun) else error
                operation.error = translate(cause, self._path, adding=operation.adding)
            return
        for operation in group:
            self._commit([operation])

    def _transaction(self, group: list[Operation]) -> Exception | None:
        connection = self._connection
        work = Work(connection.cursor(), fault=self._fault, listening=self.listening)
        try:
            self._lock.acquire()
        except StoreUnavailable as error:
            return _NotBegun(error)
        try:
            try:
                if connection.in_transaction:  # it could not be rolled back
                    connection.execute("ROLLBACK")
                self._be_durable(any(operation.durable for operation in group))
                patiently(connection, "BEGIN IMMEDIATE")
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                return _NotBegun(error)
            try:
                for operation in group:
                    operation.result = operation.call(work)
                work.finish()
                if self._fault is not None:
                    self._fault("before commit")
                connection.execute("COMMIT")
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                # a full disk has rolled back already
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                return error
        finally:
            self._lock.release()
        if self._fault is not None:
            self._fault("after commit")
        if work.wakes:
            self._tell(work.wakes)
        return None

    def _make_stop(self) -> None:
        """Let the WAL start over: see `checkpoint`. Where another process still reads in it, it grows on till later."""
        if not self._lock.try_acquire():
            return
        try:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except sqlite3.Error:  # locked by another process, or the disk is full: whoever writes next is told
            return
        finally:
            self._lock.release()

    def _be_durable(self, durable: bool) -> None:
        """Losing a lease to a power cut is as if its holder had died, so a lease alone does not wait for the disk."""
        wanted = self._durable if durable else "NORMAL"
        if wanted != self._synchronous:
            self._connection.execute(f"PRAGMA synchronous = {wanted}")
            self._synchronous = wanted


class _NotBegun(Exception):
    """The transaction could not even begin: running each operation alone would only wait as long again."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(str(cause))


def _hand_back(group: list[Operation]) -> None:
    """Give the results to their loops: one call into each."""
    loops: dict[asyncio.AbstractEventLoop, list[Operation]] = {}
    for operation in group:
        loops.setdefault(operation.loop, []).append(operation)
    for loop, operations in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, operations)
        except RuntimeError:  # the loop has been closed: nobody waits any more
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
