"""The verbs on a transaction that is the caller's: task and data are committed together, or not at all.

Two ways in. `transaction()` (see `lanes`) begins one on a connection of our own, and the caller puts statements of
theirs into it; `using(connection)` joins one that the caller began. Both run the very functions that the writer thread
runs, in the thread of the caller: a few short statements, and nobody else can write meanwhile anyhow.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from bide.core.answers import Answer
from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement, Topic
from bide.stores.driver_adapters import Borrowed, borrowed, pause
from bide.stores.sqlite import operations, reading
from bide.stores.sqlite.connection import PATIENCE
from bide.stores.sqlite.errors import is_busy, translate
from bide.stores.sqlite.room import Room
from bide.stores.sqlite.work import Fault, Work

T = TypeVar("T")


class JoinedVerbs:
    """The verbs on one connection. Each is done whole or not at all, and leaves the transaction around it as it is."""

    def __init__(self, connection: sqlite3.Connection, path: str, room: Room, fault: Fault | None = None) -> None:
        self._connection = connection
        self._path = path
        self._room = room
        self._fault = fault
        self.wakes: dict[Topic, Millis] = {}
        """What this transaction makes wake earlier, to be told once it is committed."""

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, for statements of your own."""
        return self._connection

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        self._room.check(tasks)
        return await self._write(partial(operations.add, tasks=tasks, now=now), adding=True) if tasks else []

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write(partial(operations.change, changes=changes, now=now)) if changes else []

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write(partial(operations.settle, outcomes=outcomes, now=now)) if outcomes else []

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return self._read(partial(reading.get, refs=refs))

    async def find(self, where: Filter, page: Page) -> Found:
        return self._read(partial(reading.find, where=where, page=page))

    async def _write(self, call: Callable[[Work], T], *, adding: bool = False) -> T:
        """Run one verb in the open transaction."""
        return self._plainly(partial(self._in_savepoint, call), adding=adding)

    def _read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        return self._plainly(call)

    def _plainly(self, call: Callable[[sqlite3.Cursor], T], *, adding: bool = False) -> T:
        """Run `call` with a cursor that gives plain rows, whatever the caller has their connection make of rows."""
        connection = self._connection
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

    def _in_savepoint(self, call: Callable[[Work], T], cursor: sqlite3.Cursor) -> T:
        work = Work(cursor, fault=self._fault, listening=True)
        cursor.execute("SAVEPOINT bide_verb")
        try:
            result = call(work)
            work.finish()
        except BaseException:
            if self._connection.in_transaction:
                cursor.execute("ROLLBACK TO bide_verb")
                cursor.execute("RELEASE bide_verb")
            raise
        cursor.execute("RELEASE bide_verb")
        for topic, wake_at in (work.wakes or {}).items():
            self.wakes[topic] = min(wake_at, self.wakes.get(topic, wake_at))
        return result


class CallersConnection(JoinedVerbs):
    """The verbs on a connection that the caller opened, in whatever transaction it is in.

    If it is in none, one begins: where the connection commits by itself (`isolation_level=None`) it is over with the
    verb; else, as with any statement on such a connection, it stays open until the caller commits.
    """

    def __init__(self, connection: object, path: str, room: Room, fault: Fault | None = None) -> None:
        self._lent = _wrapper(connection)
        own = connection if self._lent is not None else _checked(connection, path)
        super().__init__(own, path, room, fault)  # type: ignore[arg-type]  # what is below a wrapper is found later

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        await self._find_connection()
        return await super().get(refs)

    async def find(self, where: Filter, page: Page) -> Found:
        await self._find_connection()
        return await super().find(where, page)

    async def _find_connection(self) -> None:
        """Below a wrapper, which may have another one by now."""
        if self._lent is not None:
            self._connection = _checked((await self._lent.driver()).raw, self._path)

    async def _write(self, call: Callable[[Work], T], *, adding: bool = False) -> T:
        await self._find_connection()
        connection = self._connection
        if connection.in_transaction:
            return await super()._write(call, adding=adding)
        await self._begin()
        try:
            result = await super()._write(call, adding=adding)
            if connection.isolation_level is None and getattr(connection, "autocommit", True) is not False:
                self._plainly(lambda cursor: cursor.execute("COMMIT"), adding=adding)
            return result
        except BaseException:
            if connection.in_transaction:
                self._plainly(lambda cursor: cursor.execute("ROLLBACK"))
            raise

    async def _begin(self) -> None:
        """Begin, waiting without SQLite's busy handler: that would stop the event loop, if there is one."""
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


def _wrapper(connection: object) -> Borrowed | None:
    """SQLAlchemy's or Django's."""
    lent = borrowed(connection)
    return None if lent is None or isinstance(connection, sqlite3.Connection) or type(lent) is Borrowed else lent


def _checked(connection: object, path: str) -> sqlite3.Connection:
    """`connection`, if it is one that may be joined. Raises BadInput."""
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
