"""The verbs in a transaction of the caller's: task and data are committed together, or not at all.

There are two ways. `Transactions` begins a transaction on bide's connection, in which the caller can run statements.
`CallersConnection` joins a transaction that the caller began. Both run the writer thread's functions, in the caller's
thread: these are a few short statements, and no other connection can write meanwhile.

BEGIN waits for other writers and COMMIT for the disk, so both run in a separate thread. Each event loop has one such
thread and one connection, because it can have only one transaction open at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from msgspec import Struct, field

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.batches import merge_earliest
from bide.stores.driver_adapters import ConnectionSource, connection_source, pause
from bide.stores.sql.transactions import ended, to_its_end
from bide.stores.sqlite.commit_watch import Notifier
from bide.stores.sqlite.connection import (
    PATIENCE,
    Connection,
    DiskReserve,
    SharedFile,
    connect,
    is_busy,
    patiently,
    translate,
)
from bide.stores.sqlite.operations import Fault, UnitOfWork, Verbs, Write

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_MARK = "bide_joined"
"""A savepoint at the start of the transaction: it is gone if the caller ended that, even if another one was begun."""
_OF_A_SESSION = frozenset({
    sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_VIEW, sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
})  # fmt: skip
"""Statements whose effect outlives a transaction, and must not reach the next borrower."""


class JoinedVerbs(Verbs):
    """The verbs on one connection. Each verb is atomic, and leaves the surrounding transaction open."""

    def __init__(self, connection: sqlite3.Connection, file: Transactions, writer: int = 0) -> None:
        """`writer`: see `UnitOfWork`."""
        self.connection = connection
        """The connection, for statements of your own."""
        self._file = file
        self._writer = writer
        self._path = file.path
        self._events_kept = file.events_kept
        self.wakes: dict[Topic, Millis] = {}
        """The earlier wakes of this transaction; listeners are notified after the commit."""

    async def _write(self, call: Write[A, T], asked: Sequence[A], now: Millis, *, adding: bool = False) -> list[T]:
        if not asked:
            return []
        if adding:
            self._file.reserve.check(asked)
        return self._plainly(lambda cursor: self._in_savepoint(cursor, call, asked, now), adding=adding)

    async def _read(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> T:
        return self._plainly(lambda cursor: call(cursor, *arguments))

    def _plainly(self, call: Callable[[sqlite3.Cursor], T], *, adding: bool = False) -> T:
        """Run `call` with a cursor that returns plain rows, whatever the connection's row and text factories."""
        connection = self.connection
        text_factory = connection.text_factory
        try:
            connection.text_factory = str
            try:
                cursor = sqlite3.Cursor(connection)
                cursor.row_factory = None
                return call(cursor)
            finally:
                connection.text_factory = text_factory
        except sqlite3.ProgrammingError as error:
            raise SetupError(f"{self._path}: the connection cannot be used: {error}") from error
        except Exception as error:
            if is_busy(error):
                raise StoreUnavailable(
                    f"{self._path}: another connection is writing, or has written since this transaction began to "
                    'read; begin it with "BEGIN IMMEDIATE"'
                ) from error
            raise translate(error, self._path, adding=adding) from error

    def _in_savepoint(self, cursor: sqlite3.Cursor, call: Write[A, T], asked: Sequence[A], now: Millis) -> list[T]:
        work = UnitOfWork(cursor, fault=self._file.fault, writer=self._writer)
        cursor.execute("SAVEPOINT bide_verb")
        try:
            result = call(work, asked, now)
            work.finish()
        except BaseException:
            if self.connection.in_transaction:
                cursor.execute("ROLLBACK TO bide_verb")
                cursor.execute("RELEASE bide_verb")
            raise
        cursor.execute("RELEASE bide_verb")
        merge_earliest(self.wakes, work.wakes)
        return result


# --- a transaction on bide's connection


class LentConnection(Connection):
    """A connection inside a transaction that the borrower must not end."""

    _spent = False
    """True once the borrower has changed the session; the connection is then not lent again."""

    def note(self, action: int, *_: object) -> int:
        """The connection's authorizer."""
        self._spent = self._spent or action in _OF_A_SESSION
        return sqlite3.SQLITE_OK

    def reset(self) -> bool:
        """Roll back, and undo the borrower's settings; return true if the connection may be lent again."""
        self.row_factory = None
        self.text_factory = str
        if self.in_transaction:
            self.execute("ROLLBACK")
        self.isolation_level = None
        return not self._spent

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SetupError(
            "the end of the block commits this transaction, and an error rolls it back: "
            "do not commit, roll back, run scripts or close here"
        )

    commit = rollback = executescript = close = __enter__ = _refuse


class JoinedTransaction(JoinedVerbs):
    """The verbs while the transaction is open."""

    over = False

    def _plainly(self, call: Callable[[sqlite3.Cursor], T], *, adding: bool = False) -> T:
        if self.over:
            raise SetupError(f"{self._path}: this transaction has ended; use the store, or begin another")
        if not self.connection.in_transaction:
            raise ended(self._path)
        return super()._plainly(call, adding=adding)


class TransactionThread:
    """The thread and the connection of one event loop, for its transactions."""

    def __init__(self, file: Transactions) -> None:
        self.turn = asyncio.Lock()
        self.owner: asyncio.Task[Any] | None = None
        self.connection: LentConnection | None = None
        self._file = file
        self._locked = False
        self._loop_thread = threading.get_ident()
        self.closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bide transactions on {file.path}")

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread to its end; a cancellation is raised after that."""
        if self.closed:
            raise StoreUnavailable(f"{self._file.path}: the store was closed, so this transaction was rolled back")

        async def step() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)

        try:
            return await to_its_end(step())
        except Exception as error:
            raise translate(error, self._file.path) from error

    def begin(self) -> LentConnection:
        lock = self._file.shared.lock
        lock.acquire()
        self._locked, lock.loop_thread = True, self._loop_thread
        if self.connection is None:
            pages = self._file.checkpoint_pages
            connection = connect(self._file.path, checkpoint_pages=pages, guard=lock.guard, factory=LentConnection)
            assert isinstance(connection, LentConnection)
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute(f"PRAGMA synchronous = {self._file.shared.synchronous}")
            connection.set_authorizer(connection.note)
            self.connection = connection
        patiently(self.connection, "BEGIN IMMEDIATE")
        self.connection.execute(f"SAVEPOINT {_MARK}")
        return self.connection

    def commit(self) -> None:
        assert self.connection is not None
        try:
            self.connection.execute(f"RELEASE {_MARK}")
        except sqlite3.OperationalError as error:
            raise ended(self._file.path) from error
        patiently(self.connection, "COMMIT")  # in a file without a WAL, any other connection's reader blocks it

    def leave(self) -> None:
        """Roll back uncommitted work, and release the write lock."""
        usable = False
        try:
            usable = self.connection is not None and self.connection.reset()
        finally:
            if not usable:
                self._drop()
            if self._locked:
                self._locked, self._file.shared.lock.loop_thread = False, 0
                self._file.shared.lock.release()

    def _drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            Connection.close(connection)

    def close(self) -> None:
        """End the thread. Blocks; an open transaction is rolled back."""
        self.closed = True
        self._thread.shutdown(wait=True)
        self.leave()
        self._drop()


class Transactions(Struct, eq=False):
    """The transactions of all event loops."""

    path: str
    shared: SharedFile
    reserve: DiskReserve
    notifier: Notifier
    fault: Fault | None
    committed: Callable[[int], None] | None
    """Called after each commit with the number of rows."""
    checkpoint_pages: int
    events_kept: int
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _threads: dict[asyncio.AbstractEventLoop, TransactionThread] = field(default_factory=dict)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[JoinedTransaction]:
        """A transaction, committed when the block ends without an error."""
        thread = self._thread_of_loop()
        if thread.owner is not None and thread.owner is asyncio.current_task():
            raise SetupError(f"{self.path}: a transaction is already open in this task; use that one")
        async with thread.turn:
            thread.owner = asyncio.current_task()
            try:
                connection = await thread.run(thread.begin)
                changes = connection.total_changes
                joined = JoinedTransaction(connection, self, self.notifier.number)
                try:
                    yield joined
                finally:
                    joined.over = True
                await thread.run(thread.commit)
                if self.committed is not None:
                    self.committed(connection.total_changes - changes)
                if joined.wakes:
                    self.notifier.notify(joined.wakes)
            finally:
                thread.owner = None
                if not thread.closed:
                    await thread.run(thread.leave)

    def _thread_of_loop(self) -> TransactionThread:
        loop = asyncio.get_running_loop()
        with self._guard:
            thread = self._threads.get(loop)
            if thread is None:
                for closed in [one for one in self._threads if one.is_closed()]:
                    self._threads.pop(closed).close()
                thread = self._threads[loop] = TransactionThread(self)
            return thread

    def close(self) -> None:
        """End the threads. Blocks; open transactions are rolled back."""
        for thread in list(self._threads.values()):
            thread.close()


# --- a transaction on the caller's connection


class CallersConnection(JoinedVerbs):
    """The verbs on a connection that the caller opened, in its current transaction.

    If there is none, the verb begins one. On a connection in autocommit mode (`isolation_level=None`) the verb also
    commits it; otherwise, as with any statement on such a connection, it stays open until the caller commits.
    """

    def __init__(self, connection: object, file: Transactions) -> None:
        """Raises BadInput if the connection cannot be joined."""
        source = None if isinstance(connection, sqlite3.Connection) else connection_source(connection)
        self._source = None if type(source) is ConnectionSource else source
        """The SQLAlchemy or Django wrapper, if `connection` is one."""
        own = connection if self._source is not None else _checked(connection, file.path)
        super().__init__(own, file)  # type: ignore[arg-type]  # what is below a wrapper is found later

    async def _find_connection(self) -> sqlite3.Connection:
        """Find the connection below a wrapper, which may have changed it meanwhile."""
        if self._source is not None:
            self.connection = _checked((await self._source.driver()).raw, self._path)
        return self.connection

    async def _read(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> T:
        await self._find_connection()
        return await super()._read(call, *arguments)

    async def _write(self, call: Write[A, T], asked: Sequence[A], now: Millis, *, adding: bool = False) -> list[T]:
        connection = await self._find_connection()
        if connection.in_transaction or not asked:
            return await super()._write(call, asked, now, adding=adding)
        await self._begin()
        try:
            result = await super()._write(call, asked, now, adding=adding)
            if connection.isolation_level is None and getattr(connection, "autocommit", True) is not False:
                self._plainly(lambda cursor: cursor.execute("COMMIT"), adding=adding)
            return result
        except BaseException:
            if connection.in_transaction:
                self._plainly(lambda cursor: cursor.execute("ROLLBACK"))
            raise

    async def _begin(self) -> None:
        """Begin a transaction, waiting without SQLite's busy handler, which would block an event loop."""
        deadline = time.monotonic() + PATIENCE
        while not self._plainly(_try_begin):
            if time.monotonic() >= deadline:
                raise StoreUnavailable(f"{self._path}: another connection keeps the file locked; nothing was done")
            await pause(random.uniform(0.0005, 0.005))


def _try_begin(cursor: sqlite3.Cursor) -> bool:
    (patience,) = cursor.execute("PRAGMA busy_timeout").fetchone()
    cursor.execute("PRAGMA busy_timeout = 0")
    try:
        cursor.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
        return False
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {patience}")
    return True


def _checked(connection: object, path: str) -> sqlite3.Connection:
    """Return `connection` if it may be joined. Raises BadInput."""
    if not isinstance(connection, sqlite3.Connection):
        raise BadInput(
            "connection",
            connection,
            "a connection of the standard library's sqlite3, or of SQLAlchemy's or Django's over it: two SQLite "
            "libraries in one process on one file lose each other's locks, and with them acknowledged writes",
        )
    try:
        cursor = sqlite3.Cursor(connection)
        cursor.row_factory = None
        names = {os.fsdecode(name): file for _, name, file in cursor.execute("PRAGMA database_list").fetchall()}
    except sqlite3.Error as error:
        raise BadInput("connection", connection, f"an open connection that this thread may use ({error})") from error
    main = os.fsdecode(names["main"])
    if not main or not os.path.exists(main) or not os.path.samefile(main, path):
        raise BadInput("connection", main or connection, f"a connection to the store's own file, {path}")
    return connection
