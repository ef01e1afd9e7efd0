"""A table of somebody's own in a SQLite file: its due rows, taken and changed under the file's one write lock.

While a row's transaction is open nobody else can write to the file, so rows are fired one after another, however many
workers there are. In the store's own file that goes by the store's threads and its watcher; a file without bide's
tables is opened for this alone (`TableFile`), and keeps whatever journal mode it has.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import NewTask
from bide.core.table_source import STILL_DUE, Sql, TableSource
from bide.ports import Clock, DueRow, Finding, Head, Joined, RowRefused, Taken
from bide.stores.named_queries import read_queries
from bide.stores.sqlite import operations
from bide.stores.sqlite.connection import OpenFile, connect, enter
from bide.stores.sqlite.database import Database
from bide.stores.sqlite.errors import translate
from bide.stores.sqlite.lanes import Lanes
from bide.stores.sqlite.libraries import refuse_others
from bide.stores.sqlite.listening import CommitListener
from bide.stores.sqlite.reader import Reader
from bide.stores.sqlite.room import Room
from bide.stores.sqlite.table_times import TableTimes
from bide.stores.sqlite.work import Work
from bide.stores.sqlite.writer import Writer

T = TypeVar("T")
_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_CHECKPOINT_PAGES = 1000
_REFUSES = (sqlite3.IntegrityError, sqlite3.DataError)


class File(Protocol):
    """The file that a table is in, open while the table is."""

    path: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T: ...
    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T: ...
    def transaction(self) -> AbstractAsyncContextManager[Joined]: ...
    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None: ...


class TableFile:
    """A SQLite file that is nobody's store: opened for its own tables. Raises StoreUnavailable."""

    def __init__(self, path: str, *, synchronous: str = "full") -> None:
        self.path = os.path.abspath(path)
        self._synchronous = synchronous
        self._entered: OpenFile | None = None
        self._connections: list[sqlite3.Connection] = []
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._lanes: Lanes | None = None

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        if not os.path.exists(self.path):
            raise StoreUnavailable(f"{self.path}: there is no such file; a table to be watched has to be there first")
        refuse_others(self.path)
        try:
            reading, writing = (self._connect() for _ in range(2))
            status = os.stat(self.path)
            identity = (os.getpid(), status.st_dev, status.st_ino)
            self._entered = enter(identity, self.path, {"synchronous": self._synchronous})
            lock = self._entered.lock
            self._reader = Reader(self.path, reading)
            self._writer = Writer(
                self.path, writing, lock, synchronous=self._synchronous.upper(), fault=None,
                tell=lambda wakes: None, need_stop=lambda changes: False,
            )  # fmt: skip
            self._lanes = Lanes(self.path, self._synchronous, lock, Room(self.path, 0), None, lambda *_: None)
        except Exception as error:
            self._close()
            raise translate(error, self.path, own=False) from error

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path)
        self._connections.append(connection)
        _write_back(connection)
        return connection

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        if self._writer is not None:
            self._writer.stop()
        if self._reader is not None:
            self._reader.stop()
        for connection in self._connections:
            connection.close()
        if self._entered is not None:
            self._entered.leave()
        self._connections = []
        self._lanes = self._reader = self._writer = self._entered = None

    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        if self._reader is None:
            raise StoreUnavailable(f"{self.path}: not open")
        return await self._reader.submit(call)

    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T:
        if self._writer is None:
            raise StoreUnavailable(f"{self.path}: not open")
        return await self._writer.submit(call, durable=True, adding=adding)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Joined]:
        if self._lanes is None:
            raise StoreUnavailable(f"{self.path}: not open")
        async with self._lanes.transaction() as joined:
            _write_back(joined.connection)
            yield joined

    def listen(self, heard: Callable[[], None]) -> None:
        """Nobody tells."""


class StoreFile:
    """The file of an open store."""

    def __init__(self, path: str, opened: Callable[[], Database]) -> None:
        self.path = path
        self._opened = opened

    async def open(self) -> None:
        self._opened()

    async def close(self) -> None:
        """It is the store's."""

    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        return await self._opened().reader.submit(call)

    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T:
        database = self._opened()
        if adding:
            database.room.check()
        return await database.writer.submit(call, durable=True, adding=adding)

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        return self._opened().lanes.transaction()

    def listen(self, heard: Callable[[], None]) -> Callable[[], None]:
        database = self._opened()
        listener = CommitListener(heard, database.stop_listening)
        database.start_listening(listener)
        return listener.end


class SqliteTable:
    """See `ports.Table`. `stores_own`: whether the app's tasks are in the same file."""

    def __init__(self, source: TableSource, file: File, *, stores_own: bool) -> None:
        self._source = source
        self._file = file
        self._stores_own = stores_own
        self._times = TableTimes(source)
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": _quoted(source.id),
            "due": _quoted(source.due),
            "where": source.where,
            "due_millis": self._times.millis,
            "come": self._times.come,
            "ahead": self._times.ahead,
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
        }

    async def open(self) -> list[Finding]:
        await self._file.open()
        try:
            return await self._file.read(self._examine)
        except BaseException:
            await self._file.close()
            raise

    async def close(self) -> None:
        await self._file.close()

    def clock(self) -> Clock | None:
        return None

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        return self._file.listen(heard)

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        def look(cursor: sqlite3.Cursor) -> Any:
            given = self._times.parameters(now, beyond=True) if beyond else {}
            text = self._written("head_beyond" if beyond else "head", skip, given)
            return self._run(cursor, text, given).fetchone()

        found = await self._file.read(look)
        return Head(None if found is None else self._times.instant_of(found[0]), now)

    # --- take

    @property
    def joins(self) -> bool:
        return self._stores_own

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        def call(work: Work) -> list[Any]:
            rows = self._change(work.cursor, now, self._due(work.cursor, now, limit, skip))
            identities = [row.id for row in rows]
            if new_task is not None and rows:
                try:
                    operations.add(work, [new_task(row) for row in rows], now=now)
                except BadInput as error:
                    raise RowRefused(identities, f"it makes no task: {error}") from error
            return identities

        # wholly in the writer's thread: nobody waits on the event loop for a lock that is held while the loop is needed
        return await self._file.write(call, adding=new_task is not None)

    @asynccontextmanager
    async def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AsyncIterator[Taken]:
        async with self._file.transaction() as joined:
            connection: sqlite3.Connection = joined.connection
            rows = self._change(connection.cursor(), now, self._due(connection.cursor(), now, limit, skip))
            yield Taken(rows, connection, joined if self._stores_own else None)

    def _due(self, cursor: sqlite3.Cursor, now: Millis, limit: int, skip: Collection[Any]) -> list[DueRow]:
        given = {**self._times.parameters(now), "limit": limit}
        try:
            found = self._run(cursor, self._written("take", skip, given), given).fetchall()
        except sqlite3.Error as error:
            raise translate(error, self._file.path, own=False) from error
        names = self._source.loaded
        return [DueRow(row[0], self._times.instant_of(row[1]), dict(zip(names, row[2:], strict=True))) for row in found]

    def _change(self, cursor: sqlite3.Cursor, now: Millis, rows: Sequence[DueRow]) -> list[DueRow]:
        """Make the changes; the rows that they were made in."""
        if not rows:
            return []
        given = self._times.parameters(now)
        written = []
        for place, (column, value) in enumerate(self._source.changes.items()):
            if isinstance(value, Sql):
                written.append(f"{_quoted(column)} = {value.written(self._times.written(now))}")
            else:
                given[f"value_{place}"] = value
                written.append(f"{_quoted(column)} = :value_{place}")
        identities = [row.id for row in rows]
        text = self._written(
            "change", (), given, changes=", ".join(written), ids=_listed("id", identities, given)
        )  # fmt: skip
        try:
            changed: dict[Any, int] = dict(self._run(cursor, text, given).fetchall())
        except _REFUSES as error:
            raise RowRefused(identities, f"the database refuses the changes: {error}") from error
        except sqlite3.Error as error:
            raise translate(error, self._file.path, own=False) from error
        refused = [identity for identity, still in changed.items() if still]
        if refused:
            raise RowRefused(refused, STILL_DUE)
        return [row for row in rows if row.id in changed]

    def _run(self, cursor: sqlite3.Cursor, text: str, given: dict[str, Any]) -> sqlite3.Cursor:
        cursor.row_factory = None
        try:
            return cursor.execute(text, given)
        except sqlite3.OperationalError as error:
            if not self._times.unprepared(error):
                raise
        self._times.prepare(cursor.connection)
        return cursor.execute(text, given)

    def _written(self, query: str, skip: Collection[Any], given: dict[str, Any], **more: str) -> str:
        left_out = f" AND {self._names['id']} NOT IN ({_listed('skip', skip, given)})" if skip else ""
        return _QUERIES[query].format(**self._names, skip=left_out, **more)

    # --- look whether it is there

    def _examine(self, cursor: sqlite3.Cursor) -> list[Finding]:
        source, path = self._source, self._file.path
        schema, _, table = source.table.rpartition(".")
        of = f"{_quoted(schema)}." if schema else ""
        there = [row[1] for row in cursor.execute(f"PRAGMA {of}table_info({_quoted(table)})").fetchall()]
        if not there:
            raise SetupError(f"{path}: there is no table {source.table}")
        known = {name.lower() for name in there}
        for column, field in source.named.items():
            if column.lower() not in known:
                raise SetupError(
                    f"{path}: {source.table} has no column {column!r} ({field}); it has {', '.join(there)}"
                )
        given = self._times.parameters(0, beyond=True)
        text = self._written("head_beyond", (), given)
        try:
            plan = [row[3] for row in self._run(cursor, f"EXPLAIN QUERY PLAN {text}", given).fetchall()]
        except sqlite3.Error as error:
            raise SetupError(f"{path}: {source.table}: the condition {source.where!r} is refused: {error}") from error
        used = next((words[words.index("INDEX") + 1] for words in map(str.split, plan) if "INDEX" in words), None)
        sorts = any("TEMP B-TREE" in line for line in plan)
        served = used is not None and not sorts and self._narrow(cursor, of, used)
        what = f"{source.table}: {'an index leads to' if served else 'no index leads to'} the due rows"
        index = f"{table}_by_{source.due}"
        advice = f"CREATE INDEX {_quoted(index)} ON {self._names['table']} ({self._names['due']}) WHERE {source.where}"
        return [Finding(served, what, "" if served else f"each look reads many rows; run: {advice}")]

    @staticmethod
    def _narrow(cursor: sqlite3.Cursor, of: str, index: str) -> bool:
        """Whether that index leaves rows out, or has further columns to find them by."""
        columns = cursor.execute(f"PRAGMA {of}index_info({_quoted(index)})").fetchall()
        made = cursor.execute("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        partial = made is not None and made[0] is not None and " where " in " ".join(made[0].lower().split())
        return partial or len(columns) > 1


def _write_back(connection: sqlite3.Connection) -> None:
    """Where a store is open its checkpointer writes the log back; else each commit past a size does."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _listed(kind: str, values: Collection[Any], given: dict[str, Any]) -> str:
    """Placeholders for `values`, which go to `given`."""
    names = []
    for place, value in enumerate(values):
        given[f"{kind}_{place}"] = value
        names.append(f":{kind}_{place}")
    return ", ".join(names)
