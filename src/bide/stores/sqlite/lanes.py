"""Transactions of our own that a caller's statements take part in: one at a time for each event loop.

The commit waits for the disk and the beginning for other writers, so both happen in a thread: one thread and one
connection per event loop, since only one transaction of a loop can be open anyhow. Between the two, the caller's
statements and our verbs run on the loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from bide.core.errors import SetupError, StoreUnavailable
from bide.stores.sqlite.connection import WriteLock, connect, patiently
from bide.stores.sqlite.errors import translate
from bide.stores.sqlite.joined import JoinedVerbs
from bide.stores.sqlite.room import Room
from bide.stores.sqlite.work import Fault, Work

T = TypeVar("T")
_MARK = "bide_joined"
"""A savepoint that the transaction begins with: it is gone if somebody ended that one, even if they began another."""
CACHE_KIB = 1024
_OF_A_SESSION = frozenset({
    sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_VIEW, sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
})  # fmt: skip
"""What outlives a transaction, and is not the next one's."""


class LentConnection(sqlite3.Connection):
    """A connection inside a transaction that is not the borrower's to end."""

    spent = False
    """Whether something was done that is the session's: then nobody else gets it."""

    def watch(self) -> None:
        def note(action: int, *_: object) -> int:
            if action in _OF_A_SESSION:
                self.spent = True
            return sqlite3.SQLITE_OK

        self.set_authorizer(note)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SetupError(
            "this transaction is committed when its block is left, and rolled back when that is by an error: "
            "do not commit, roll back, run scripts or close here"
        )

    commit = rollback = executescript = close = __enter__ = _refuse


class JoinedTransaction(JoinedVerbs):
    """The verbs while the transaction is open."""

    over = False

    async def _write(self, call: Callable[[Work], T], *, adding: bool = False) -> T:
        self._check()
        return await super()._write(call, adding=adding)

    def _read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        self._check()
        return super()._read(call)

    def _check(self) -> None:
        if self.over:
            raise SetupError(f"{self._path}: this transaction has ended; use the store, or begin another")
        if not self._connection.in_transaction:
            raise _ended(self._path)


class Lane:
    """The thread and the connection of one event loop."""

    def __init__(self, path: str, synchronous: str, lock: WriteLock) -> None:
        self.turn = asyncio.Lock()
        self.owner: asyncio.Task[Any] | None = None
        self.connection: LentConnection | None = None
        self._path = path
        self._synchronous = synchronous
        self._lock = lock
        self._locked = False
        self.closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bide transactions on {path}")

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread, to its end: a cancellation is passed on when it is done."""
        if self.closed:
            raise StoreUnavailable(f"{self._path}: the store was closed, and this transaction came to nothing")
        future = asyncio.get_running_loop().run_in_executor(self._thread, call)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    def begin(self) -> LentConnection:
        if self.connection is None:
            connection = connect(self._path, cache_kib=CACHE_KIB, factory=LentConnection)
            assert isinstance(connection, LentConnection)
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.watch()
            self.connection = connection
        self._lock.acquire()
        self._locked = True
        patiently(self.connection, "BEGIN IMMEDIATE")
        self.connection.execute(f"SAVEPOINT {_MARK}")
        return self.connection

    def commit(self) -> None:
        assert self.connection is not None
        try:
            self.connection.execute(f"RELEASE {_MARK}")
        except sqlite3.OperationalError as error:
            raise _ended(self._path) from error
        patiently(self.connection, "COMMIT")  # in a file without a WAL every reader of another's is in its way

    def leave(self) -> None:
        """Roll back what was not committed, and let others write."""
        connection = self.connection
        try:
            if connection is not None:
                connection.row_factory = None
                connection.text_factory = str
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                connection.isolation_level = None
        except BaseException:
            assert connection is not None
            connection.spent = True
            raise
        finally:
            if connection is not None and connection.spent:
                self.connection = None
                sqlite3.Connection.close(connection)
            if self._locked:
                self._locked = False
                self._lock.release()

    def close(self) -> None:
        """End the thread. Blocks; a transaction that is open comes to nothing."""
        self.closed = True
        self._thread.shutdown(wait=True)
        self.leave()
        if self.connection is not None:
            sqlite3.Connection.close(self.connection)
            self.connection = None


class Lanes:
    """The lanes of all event loops."""

    def __init__(
        self,
        path: str,
        synchronous: str,
        lock: WriteLock,
        room: Room,
        fault: Fault | None,
        committed: Callable[[JoinedTransaction, int], None],
    ) -> None:
        self._path = path
        self._synchronous = synchronous
        self._lock = lock
        self._room = room
        self._fault = fault
        self._committed = committed
        self._guard = threading.Lock()
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[JoinedTransaction]:
        """A transaction, committed when left without an error."""
        lane = self._lane()
        if lane.owner is not None and lane.owner is asyncio.current_task():
            raise SetupError(f"{self._path}: a transaction within a transaction; use the one that is open")
        async with lane.turn:
            lane.owner = asyncio.current_task()
            joined: JoinedTransaction | None = None
            try:
                connection = await self._run(lane, lane.begin)
                changes = connection.total_changes
                joined = JoinedTransaction(connection, self._path, self._room, self._fault)
                yield joined
                joined.over = True
                await self._run(lane, lane.commit)
                self._committed(joined, connection.total_changes - changes)
            finally:
                if joined is not None:
                    joined.over = True
                lane.owner = None
                if not lane.closed:
                    await self._run(lane, lane.leave)

    async def _run(self, lane: Lane, call: Callable[[], T]) -> T:
        try:
            return await lane.run(call)
        except Exception as error:
            raise translate(error, self._path) from error

    def _lane(self) -> Lane:
        loop = asyncio.get_running_loop()
        with self._guard:
            lane = self._lanes.get(loop)
            if lane is None:
                for gone in [one for one in self._lanes if one.is_closed()]:
                    self._lanes.pop(gone).close()
                lane = self._lanes[loop] = Lane(self._path, self._synchronous, self._lock)
            return lane

    def close(self) -> None:
        """End the threads. Blocks; transactions that are still open come to nothing."""
        for lane in list(self._lanes.values()):
            lane.close()


def _ended(path: str) -> SetupError:
    return SetupError(
        f"{path}: the transaction was committed or rolled back inside its block, so the task could not be completed "
        "with it; leave that to the end of the block"
    )
