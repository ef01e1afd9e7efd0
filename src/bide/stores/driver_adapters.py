"""Adapters for a caller's connection: how to run a statement on each driver and wrapper that bide knows.

No driver is imported. An object of a driver's class can only exist if the driver has been imported, so its classes are
found among the loaded modules. A wrapper (SQLAlchemy, Django) begins its transactions lazily, so the adapter makes it
begin, and then uses the driver's connection below it. The connection's settings stay untouched: the adapter has a
cursor of its own, which returns plain tuples.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import isawaitable
from typing import Any, ClassVar

from bide.core.errors import HAS_TO_BE_AWAITED, BadInput, SetupError

_TAKEN = re.compile(r"\$(\d+)")
_IDLE = 0
"""libpq's status for a connection in no transaction, and for one in no pipeline."""


class Row(tuple[Any, ...]):
    """A row whose values can also be read by column name."""

    __slots__ = ()
    names: ClassVar[Mapping[str, int]] = {}

    def __getitem__(self, place: Any) -> Any:
        return tuple.__getitem__(self, self.names[place] if type(place) is str else place)


@lru_cache(maxsize=256)
def row_of(names: tuple[str, ...]) -> type[Row]:
    """The row class for these columns."""
    return type("Row", (Row,), {"__slots__": (), "names": {name: place for place, name in enumerate(names)}})


class Driver:
    """A driver's connection, as a store uses it. The driver's errors are passed on unchanged."""

    raw: Any
    """The driver's own connection."""
    asynchronous: bool

    @property
    def closed(self) -> bool:
        raise NotImplementedError

    @property
    def in_transaction(self) -> bool:
        """True while a transaction is open, as far as the driver knows."""
        raise NotImplementedError

    @property
    def alone(self) -> bool:
        """True if a statement would commit by itself: no transaction is open, and the statement would begin none."""
        return not self.in_transaction

    async def run(self, statement: str, arguments: Sequence[Any] = ()) -> Sequence[Any]:
        """Run a statement; return its rows, by position and name. Placeholders are the store's own kind ($1, or %s)."""
        raise NotImplementedError

    async def command(self, *statements: str) -> None:
        """Run statements without arguments one after another, in one round trip if the driver can."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connection at once; the server rolls back an open transaction."""
        with suppress(Exception):  # it may be closed already
            closing = getattr(self.raw, "terminate", self.raw.close)()
            if isawaitable(closing):
                await closing


class AsyncpgDriver(Driver):
    """asyncpg. The caller's settings for prepared statements stay untouched."""

    asynchronous = True

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._row = sys.modules["asyncpg"].Record

    @property
    def closed(self) -> bool:
        return bool(self.raw.is_closed())

    @property
    def in_transaction(self) -> bool:
        return bool(self.raw.is_in_transaction())

    async def run(self, statement: str, arguments: Sequence[Any] = ()) -> Sequence[Any]:
        rows: Sequence[Any] = await awaited(self.raw.fetch(statement, *arguments, record_class=self._row))
        return rows

    async def command(self, *statements: str) -> None:
        await awaited(self.raw.execute("; ".join(statements)))


class PsycopgDriver(Driver):
    """psycopg 3, synchronous or asynchronous."""

    def __init__(self, raw: Any, *, asynchronous: bool) -> None:
        self.raw = raw
        module = sys.modules["psycopg"]
        name = "AsyncRawCursor" if asynchronous else "RawCursor"
        self._translates = not hasattr(module, name)  # before 3.2
        self._cursor = getattr(module, name.replace("Raw", "") if self._translates else name)
        self.asynchronous = asynchronous
        self._plain = sys.modules["psycopg.rows"].tuple_row

    @property
    def closed(self) -> bool:
        return bool(self.raw.closed)

    @property
    def alone(self) -> bool:
        return bool(self.raw.autocommit) and not self.in_transaction

    @property
    def in_transaction(self) -> bool:
        return int(self.raw.info.transaction_status) != _IDLE

    async def run(self, statement: str, arguments: Sequence[Any] = (), *, prepare: bool | None = None) -> Sequence[Any]:
        if int(self.raw.pgconn.pipeline_status) != _IDLE:
            raise SetupError(
                "a verb needs answers, which `connection.pipeline()` does not give; leave the pipeline first"
            )
        given: Any = list(arguments) or None
        if self._translates and given:
            statement = _TAKEN.sub(r"%(p\1)s", statement.replace("%", "%%"))
            given = {f"p{number}": argument for number, argument in enumerate(given, 1)}
        return await _fetched(self._cursor(self.raw, row_factory=self._plain), statement, given, prepare=prepare)

    async def command(self, *statements: str) -> None:
        await self.run("; ".join(statements), prepare=False)  # several statements cannot be prepared


class MysqlDriver(Driver):
    """PyMySQL, mysqlclient, asyncmy or aiomysql: their cursors differ only in which calls are awaited."""

    _IN_TRANSACTION = 1

    def __init__(self, raw: Any, cursor: type[Any]) -> None:
        self.raw = raw
        self._cursor = cursor
        self.asynchronous = cursor.__module__.partition(".")[0] in ("asyncmy", "aiomysql")

    @property
    def closed(self) -> bool:
        for name in ("closed", "open", "connected"):
            state = getattr(self.raw, name, None)
            if state is not None:
                return bool(state) if name == "closed" else not state
        return False

    @property
    def alone(self) -> bool:
        """The state in the server's last answer; mysqlclient has to ask the server for it."""
        mode = getattr(self.raw, "get_autocommit", None)
        commits = mode() if mode is not None else self.raw.autocommit_mode
        return bool(commits) and not self.in_transaction

    @property
    def in_transaction(self) -> bool:
        return bool((getattr(self.raw, "server_status", None) or 0) & self._IN_TRANSACTION)

    async def run(self, statement: str, arguments: Sequence[Any] = ()) -> Sequence[Any]:
        return await _fetched(self._cursor(self.raw), statement, tuple(arguments) or None)

    async def command(self, *statements: str) -> None:
        for statement in statements:
            await self.run(statement)


class SqliteDriver(Driver):
    """The standard library's sqlite3; the SQLite store runs its statements itself."""

    asynchronous = False
    closed = False

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def in_transaction(self) -> bool:
        return bool(self.raw.in_transaction)


class ConnectionSource:
    """A connection as the caller gave it, and how to reach the driver's connection from there."""

    def __init__(self, given: Any) -> None:
        self.given = given

    @property
    def begins(self) -> Any:
        """The asynchronous wrapper, if its beginning must be neither concurrent nor interrupted; or None."""
        return None

    async def driver(self) -> Driver:
        """The driver's connection, in a transaction if the wrapper would begin one. Raises BadInput."""
        found = driver_of(self.given)
        assert found is not None
        return found


class _Sqlalchemy(ConnectionSource):
    """A Connection or a Session, synchronous or not. It begins with its first statement, so the adapter runs one."""

    @property
    def begins(self) -> Any:
        given = self.given.registry() if _is(self.given, _SQLALCHEMY[5]) else self.given
        return given if _is(given, *_SQLALCHEMY[3:5]) else None

    async def driver(self) -> Driver:
        connection: Any = self.given
        if _is(connection, *_SQLALCHEMY[:3]):
            under = connection if hasattr(connection, "exec_driver_sql") else connection.get_bind()
            if under.dialect.is_async:
                kind = "the AsyncSession or AsyncConnection itself, not the synchronous one below it"
                raise BadInput("connection", connection, kind)
        if not hasattr(connection, "exec_driver_sql"):
            connection = await _done(connection.connection())
        if connection.closed:
            raise SetupError("the SQLAlchemy connection is closed")
        below = connection
        if hasattr(connection, "get_raw_connection"):
            pooled = await awaited(connection.get_raw_connection())
            below = connection.sync_connection
        else:
            pooled = connection.connection
        raw = pooled.driver_connection
        found = driver_of(raw)
        if found is None:
            raise BadInput("connection", raw, f"an SQLAlchemy connection over {_DRIVERS}")
        if found.alone or not below.in_transaction():
            begun = await _done(connection.exec_driver_sql("SELECT 1"))
            begun.close()
        return found


class _Django(ConnectionSource):
    """A Django connection, or the proxy for an alias's connection."""

    async def driver(self) -> Driver:
        wrapper: Any = self.given
        if _is(wrapper, ("django.utils.connection", "ConnectionProxy")):
            wrapper = wrapper._connections[wrapper._alias]  # the wrapper of this thread
        wrapper.ensure_connection()
        wrapper.validate_thread_sharing()
        wrapper.validate_no_broken_transaction()
        found = driver_of(wrapper.connection)
        if found is None:
            raise BadInput("connection", wrapper.connection, f"a Django connection over {_DRIVERS}")
        return found


_DRIVERS = "asyncpg, psycopg (3), PyMySQL, mysqlclient, asyncmy, aiomysql or sqlite3"
_SQLALCHEMY = (
    ("sqlalchemy.engine", "Connection"), ("sqlalchemy.orm", "Session"), ("sqlalchemy.orm", "scoped_session"),
    ("sqlalchemy.ext.asyncio", "AsyncConnection"), ("sqlalchemy.ext.asyncio", "AsyncSession"),
    ("sqlalchemy.ext.asyncio", "async_scoped_session"),
)  # fmt: skip
_DJANGO = (("django.utils.connection", "ConnectionProxy"), ("django.db.backends.base.base", "BaseDatabaseWrapper"))
_MYSQL = (
    (("pymysql.connections", "Connection"), ("pymysql.cursors", "Cursor")),
    (("MySQLdb.connections", "Connection"), ("MySQLdb.cursors", "Cursor")),
    (("asyncmy.connection", "Connection"), ("asyncmy.cursors", "Cursor")),
    (("aiomysql.connection", "Connection"), ("aiomysql.cursors", "Cursor")),
)
_Class = tuple[str, str]


def connection_source(connection: object) -> ConnectionSource | None:
    """The source for `connection` if its class is known, else None. No I/O."""
    if _is(connection, *_SQLALCHEMY):
        return _Sqlalchemy(connection)
    if _is(connection, *_DJANGO):
        return _Django(connection)
    return None if driver_of(connection) is None else ConnectionSource(connection)


def driver_of(raw: Any) -> Driver | None:
    """The adapter for a driver's own connection; None if the driver is unknown."""
    if _is(raw, ("asyncpg.pool", "PoolConnectionProxy")):
        return AsyncpgDriver(raw._con) if raw._con is not None else None
    if _is(raw, ("asyncpg.connection", "Connection")):
        return AsyncpgDriver(raw)
    for name in ("Connection", "AsyncConnection"):
        if _is(raw, ("psycopg", name)):
            return PsycopgDriver(raw, asynchronous=name.startswith("Async"))
    for connection, cursor in _MYSQL:
        if _is(raw, connection):
            return MysqlDriver(raw, getattr(sys.modules[cursor[0]], cursor[1]))
    return SqliteDriver(raw) if _is(raw, ("sqlite3", "Connection")) else None


def _is(given: object, *classes: _Class) -> bool:
    for module, name in classes:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(given, found):
            return True
    return False


def on_a_loop() -> bool:
    """Return true if this thread runs an event loop. Otherwise the caller is synchronous (`app.sync`)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def awaited(given: Awaitable[Any]) -> Any:
    """The result of an asynchronous driver's call. Raises SetupError in a thread without an event loop.

    The check comes first, because awaiting would not always fail: the answer may already have arrived in the thread
    of the connection's own loop.
    """
    if not on_a_loop():
        if isinstance(given, Coroutine):  # also one made by Cython
            given.close()
        raise SetupError(HAS_TO_BE_AWAITED)
    return await given


async def _done(given: Any) -> Any:
    """The result of a driver's call, synchronous or asynchronous."""
    return await awaited(given) if isawaitable(given) else given


async def _fetched(cursor: Any, statement: str, arguments: Any, **how: Any) -> Sequence[Any]:
    """Run a statement by a DB-API cursor, close the cursor, and return the rows."""
    try:
        await _done(cursor.execute(statement, arguments, **how))
        if cursor.description is None:
            return ()
        names = tuple(column[0] for column in cursor.description)
        return list(map(row_of(names), await _done(cursor.fetchall())))
    finally:
        await _done(cursor.close())


async def pause(seconds: float) -> None:
    """Sleep: on the event loop, or by blocking a thread that has no loop."""
    if on_a_loop():
        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no loop to hold up
