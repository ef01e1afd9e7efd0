"""The two threads that a call hops to: one writes, and one reads.

    loop threads            writer thread
    submit ── queue ──▶  take all that waits ─▶ BEGIN ─▶ run each ─▶ COMMIT ─▶ one call into each loop
                             ▲                                                          │
                             └────────── what arrived meanwhile is the next group ◀─────┘

A thread hop costs as much as a commit, and a commit as much as a hundred rows; so both are paid once per group. If
anything in a group fails, all of it is rolled back and each operation runs alone: only the one to blame gets the error.

The reader has a connection of its own: in WAL mode it waits for no writer, and no writer for it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from msgspec import Struct

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.stores.sqlite.connection import SharedFile, patiently, translate
from bide.stores.sqlite.operations import Fault, UnitOfWork
from bide.stores.sqlite.watch import Notifier

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GROUP = 4096
"""Operations in one transaction at most, so that the first does not wait too long for the last."""


class Operation(Struct, eq=False):
    """One call on its way through a thread."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    durable: bool
    adding: bool
    result: Any = None
    error: Exception | None = None


class _Thread:
    """A thread that owns a connection, and takes operations until it is stopped."""

    def __init__(self, path: str, connection: sqlite3.Connection, name: str) -> None:
        self._path = path
        self._connection = connection
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._closed = False
        self._gate = threading.Lock()
        """So that nothing is put behind the end of the queue, where it would never be taken."""
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
        """Finish what was submitted, then end the thread. Blocks; a second call does nothing."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError


class Reader(_Thread):
    """Owns a connection that cannot write. `submit` may be called from any event loop."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA query_only = ON")
        super().__init__(path, connection, "reader")

    async def submit(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> T:
        """Run `call` in one read transaction: it sees one state of the file."""
        result: T = await self._put(call, arguments)
        return result

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            try:
                operation.result = self._read(operation)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                operation.error = translate(error, self._path)
            _hand_back([operation])

    def _read(self, operation: Operation) -> Any:
        cursor = self._connection.cursor()
        if self._connection.in_transaction:  # it could not be rolled back
            cursor.execute("ROLLBACK")
        cursor.execute("BEGIN")
        try:
            return operation.call(cursor, *operation.arguments)
        finally:
            cursor.execute("ROLLBACK")


class Writer(_Thread):
    """Owns the write connection. `submit` may be called from any event loop.

    `committed` is called with the number of rows after each commit.
    """

    def __init__(
        self,
        path: str,
        connection: sqlite3.Connection,
        file: SharedFile,
        notifier: Notifier,
        *,
        fault: Fault | None = None,
        committed: Callable[[int], None] | None = None,
    ) -> None:
        self._lock = file.lock
        self._durable = file.synchronous.upper()
        self._synchronous = ""
        self._notifier = notifier
        self._fault = fault
        self._committed = committed
        super().__init__(path, connection, "writer")

    async def submit(
        self, call: Callable[[UnitOfWork, *Ts], T], *arguments: *Ts, durable: bool = True, adding: bool = False
    ) -> T:
        """Run `call` in a transaction; its result once that is committed (durably, if so asked)."""
        result: T = await self._put(call, arguments, durable, adding)
        return result

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
                except Exception as error:  # noqa: BLE001 - no other thread writes, so this one goes on
                    for operation in group:
                        operation.error = OutcomeUnknown(f"{self._path}: {error}")
                _hand_back(group)
                if self._committed is not None:
                    self._committed(self._connection.total_changes - before)

    def _commit(self, group: list[Operation]) -> None:
        """Run the group as one transaction; or, when that fails, each of it alone.

        Not when it could not even begin: running each operation alone would only wait as long again.
        """
        begun = False
        try:
            with self._lock:
                self._begin(any(operation.durable for operation in group))
                begun = True
                work = self._transaction(group)
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            if begun and len(group) > 1:
                for operation in group:
                    self._commit([operation])
            else:
                for operation in group:
                    operation.error = translate(error, self._path, adding=operation.adding)
            return
        work.point("after commit")
        if work.wakes:
            self._notifier.notify(work.wakes)

    def _begin(self, durable: bool) -> None:
        connection = self._connection
        if connection.in_transaction:  # it could not be rolled back
            connection.execute("ROLLBACK")
        # Losing a lease to a power cut is as if its holder had died: a lease alone does not wait for the disk.
        wanted = self._durable if durable else "NORMAL"
        if wanted != self._synchronous:
            connection.execute(f"PRAGMA synchronous = {wanted}")
            self._synchronous = wanted
        patiently(connection, "BEGIN IMMEDIATE")

    def _transaction(self, group: list[Operation]) -> UnitOfWork:
        """Run the group and commit, or roll back."""
        connection = self._connection
        try:
            work = UnitOfWork(connection.cursor(), fault=self._fault, listening=bool(self._notifier))
            for operation in group:
                operation.result = operation.call(work, *operation.arguments)
            work.finish()
            work.point("before commit")
            connection.execute("COMMIT")
        except Exception:
            if connection.in_transaction:  # a full disk has rolled back already
                connection.execute("ROLLBACK")
            raise
        return work


def _hand_back(group: list[Operation]) -> None:
    """Give the results to their loops: one call into each."""
    loops: dict[asyncio.AbstractEventLoop, list[Operation]] = {}
    for operation in group:
        loops.setdefault(operation.loop, []).append(operation)
    for loop, operations in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve, operations)
        except RuntimeError:  # the loop has been closed: no caller waits any more
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
