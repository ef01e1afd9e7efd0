"""A watched table in a SQLite file: its due rows, taken and changed under the file's one write lock.

While a row's transaction is open no other connection can write to the file, so rows are fired one after another,
however many workers there are. In the store's own file, the store's threads and watcher do this. A file without bide's
tables is opened for its watched tables only (`TableFile`), and keeps its journal mode.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from itertools import count
from typing import Any

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant
from bide.core.records import NewTask
from bide.core.table_source import DueIs, TableSource, zone_of
from bide.ports import Clock, DueRow, Finding, Head, Taken
from bide.stores.naive_times import cutoff, instant_of
from bide.stores.named_queries import queries_beside
from bide.stores.sql.reading import at_once
from bide.stores.sql.watched_table import Give, Plan, Rows, WatchedTable
from bide.stores.sqlite import operations
from bide.stores.sqlite.connection import code_of, translate
from bide.stores.sqlite.database import StoreFile, TableFile
from bide.stores.sqlite.operations import UnitOfWork

_log = logging.getLogger("bide.table")
_WARNINGS = 20
_numbers = count(1)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]|$)")
"""The accepted form of ISO 8601; its other forms do not sort among these."""
_FEW = 20
_ALTERED = re.compile("no such (table|column)|has no column")


class SqliteTable(WatchedTable):
    """See `ports.Table`."""

    _queries = queries_beside(__file__, "watched_table.sql")
    _refused = (sqlite3.Error,)
    _refusals = (sqlite3.Error, OverflowError, UnicodeEncodeError)
    _any, _beyond = "{due} IS NOT NULL AND {due_millis} IS NOT NULL", "{ahead}"

    def __init__(self, source: TableSource, file: StoreFile | TableFile) -> None:
        if source.reads is not None:
            raise BadInput("reads", "a URL", "None for a table in a SQLite file, which has no replica")
        super().__init__(source)
        self._file = file
        schema, _, self._table = source.table.rpartition(".")
        self._schema = f"{self._quoted(schema)}." if schema else ""

    async def open(self) -> list[Finding]:
        await self._file.open(self)
        try:
            return await self._file.opened.reader.submit(lambda cursor: at_once(self._examine(cursor)))
        except BaseException:
            await self._file.close(self)
            raise

    async def close(self) -> None:
        await self._file.close(self)

    def clock(self) -> Clock | None:
        return None

    @property
    def joins(self) -> bool:
        return self._file.is_store

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        return self._file.opened.notifier.on_commit(on_change).end if self._file.is_store else None

    # --- statements

    @staticmethod
    def _quoted(name: str) -> str:
        # within double quotes SQLite reads a name that it does not find as text
        return f"`{name.replace('`', '``')}`"

    @property
    def _where(self) -> str:
        return self._file.path

    def _column(self, name: str) -> str:
        return name.lower()

    def _give(self, values: list[Any], value: Any, kind: str = "") -> str:
        values.append(value)
        return f":v{len(values)}"

    def _one_of(self, ids: Collection[Any], give: Give, *, out: bool = False) -> str:
        if len(self._source.ids) > 1:
            these = f"VALUES {', '.join('(' + ', '.join(map(give, identity)) + ')' for identity in ids)}"
        elif len(ids) > _FEW and all(isinstance(identity, int | str) for identity in ids):
            # as JSON: then the number of ids has no limit, and the statement stays the same
            these = f"SELECT value FROM json_each({give(json.dumps(list(ids)))})"
        else:
            these = ", ".join(map(give, ids))
        return f"{self._id} {'NOT ' if out else ''}IN ({these})"

    def _compared(self, query: str, now: Millis, give: Give) -> Mapping[str, Callable[[], str]]:
        times = self._known
        return {
            "come": lambda: times.against(now, give, "<", "<=", timedelta(seconds=1)),
            "ahead": lambda: times.against(now, give, ">=", ">", timedelta(0)),
            "written": lambda: times.written(now),
        }

    async def _ask(self, connection: sqlite3.Cursor, text: str, values: Sequence[Any] = ()) -> Rows:
        """Run a query on a cursor, which never waits."""
        given = {f"v{place}": value for place, value in enumerate(values, 1)}
        connection.row_factory = None
        try:
            return connection.execute(text, given).fetchall()
        except sqlite3.OperationalError as error:
            if self._times is None or not self._times.unprepared(error):
                raise
        self._times.prepare(connection.connection)
        return connection.execute(text, given).fetchall()

    @contextmanager
    def _ours(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not code_of(error) and "decode" in str(error):  # text in a row that is not UTF-8
                raise ValueError(str(error)) from error
            raise translate(error, self._file.path, own=False) from error

    def _is_of_rows(self, error: Exception) -> bool:
        return not code_of(error) and not _ALTERED.search(str(error))

    # --- poll and take

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        def read(cursor: sqlite3.Cursor) -> Rows:
            with self._ours():
                return at_once(self._ask(cursor, *self._write("head", now, skip=skip, beyond=beyond)))

        found = await self._file.opened.reader.submit(read)
        if not found:
            return Head(None, now)
        row = self._row(found[0])
        return Head(row.due, now, row.id)

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        def call(work: UnitOfWork) -> list[Any]:
            rows = at_once(self._take(work.cursor, now, limit, skip))
            if new_task is not None and rows:
                operations.add(work, [new_task(row) for row in rows], now=now)
            return [row.id for row in rows]

        # entirely in the writer's thread, so that no lock is held while waiting for the event loop
        if new_task is not None:
            self._file.opened.reserve.check()
        return await self._file.opened.writer.submit(call, adding=new_task is not None)

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        def call(work: UnitOfWork) -> bool:
            return bool(at_once(self._take(work.cursor, now, 1, (), dead=identity)))

        return await self._file.opened.writer.submit(call)

    @asynccontextmanager
    async def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AsyncIterator[Taken]:
        async with self._file.opened.transactions.begin() as joined:
            rows = await self._take(joined.connection.cursor(), now, limit, skip)
            yield Taken(rows, joined.connection, joined if self._file.is_store else None)

    # --- examine

    async def _types(self, connection: sqlite3.Cursor) -> Mapping[str, str]:
        """The types of all columns, including generated ones, except those that a virtual table hides."""
        return {row[1].lower(): row[2] for row in await self._pragma(connection, "table_xinfo") if row[6] != 1}

    async def _pragma(self, cursor: sqlite3.Cursor, name: str, of: str = "") -> Rows:
        return await self._ask(cursor, f"PRAGMA {self._schema}{name}({self._quoted(of or self._table)})")

    async def _is_view(self, connection: sqlite3.Cursor) -> bool:
        text = f"SELECT 1 FROM {self._schema}sqlite_master WHERE type = 'view' AND name = :v1 COLLATE NOCASE"
        return bool(await self._ask(connection, text, (self._table,)))

    async def _prepare(self, connection: sqlite3.Cursor, kind: str) -> Millis:
        self._times = SqliteTimes(self._source, self._names["due"])
        self._names["due_millis"] = self._times.millis
        return 0

    async def _plan(self, connection: sqlite3.Cursor, now: Millis, types: Mapping[str, str]) -> Plan:
        source = self._source
        text, values = self._write("head", now, beyond=True)
        plan = [row[3] for row in await self._ask(connection, f"EXPLAIN QUERY PLAN {text}", values)]
        for changes in filter(None, (source.changes, source.dead)):
            text, values = self._write("change", now, ids=[self._identity((None,) * len(source.ids))], changes=changes)
            await self._ask(connection, f"EXPLAIN {text}", values)
        used = next((words[words.index("INDEX") + 1] for words in map(str.split, plan) if "INDEX" in words), None)
        sorts = any("TEMP B-TREE" in line for line in plan)
        served = used is not None and not sorts and await self._narrow(connection, used)
        index = self._quoted(f"{self._table}_by_{source.due}")
        making = f"CREATE INDEX {index} ON {self._names['table']} ({self._names['due']}) WHERE {source.where}"
        return Plan(served, await self._unique(connection), making)

    async def _unique(self, cursor: sqlite3.Cursor) -> bool:
        """True if the primary key, or a unique index that is not partial, makes the id unique."""
        ids = {column.lower() for column in self._source.ids}
        primary = {row[1].lower() for row in await self._pragma(cursor, "table_xinfo") if row[5]}
        if primary and primary <= ids:
            return True
        for index in await self._pragma(cursor, "index_list"):
            named = [row[2] for row in await self._pragma(cursor, "index_info", index[1])]
            if index[2] and not index[4] and all(named) and {name.lower() for name in named} <= ids:
                return True
        return False

    async def _narrow(self, cursor: sqlite3.Cursor, index: str) -> bool:
        """True if the index is partial, or has further columns to narrow the search."""
        made = await self._ask(cursor, "SELECT sql FROM sqlite_master WHERE name = :v1", (index,))
        partial = bool(made) and made[0][0] is not None and " where " in " ".join(made[0][0].lower().split())
        return partial or len(await self._pragma(cursor, "index_info", index)) > 1


class SqliteTimes:
    """The due column of one source: how its values, for which SQLite has no type, compare with an instant.

    Numbers compare as they are. Text is compared twice: first as text, with a bound that is at most a second too late,
    so that an index serves it; then exactly, by parsing it. Text must sort in the order of time, so all rows must have
    the same form. The separator and the offset of that form are taken from the rows read so far.

    Several threads use this, each with its own connection.
    """

    def __init__(self, source: TableSource, column: str) -> None:
        self._source, self._column, self._zone = source, column, zone_of(source.zone)
        self._after = source.after_ms
        self._kind = DueIs(source.due_is)
        self._function = f"bide_due_{next(_numbers)}"
        self._separator = "T"
        """"T" sorts after a space, so before the first row has been read, a bound with it excludes no row."""
        self._offset: timedelta | None = None
        self._unreadable: set[str] = set()
        self.millis = f"{self._function}({column})"
        """The SQL expression for a row's due time, without `after`; for text, in milliseconds."""

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Register the function that reads these times on a connection."""
        read = self._read if self._kind is DueIs.TIMESTAMP else self._number
        connection.create_function(self._function, 1, read, deterministic=True)

    def unprepared(self, error: sqlite3.Error) -> bool:
        return f"no such function: {self._function}" in str(error)

    def against(self, now: Millis, give: Give, bounded: str, exact: str, later: timedelta) -> str:
        """The SQL condition that a row's time compares so (`exact`) with `now`; `bounded`: as text with `later`."""
        now -= self._after
        if self._kind is not DueIs.TIMESTAMP:
            return f"{self._column} {exact} {give(now if self._kind is DueIs.MILLISECONDS else now / 1000)}"
        bound = self._shown(now).replace(microsecond=0)
        if bound < datetime.max - later:  # noqa: DTZ901 - naive
            bound += later
        text = give(bound.isoformat(self._separator))
        return f"{self._column} {bounded} {text} AND {self.millis} {exact} {give(now)}"

    def instant_of(self, value: Any) -> Millis:
        """The instant at which a row is due, from its value of the `millis` expression."""
        if not math.isfinite(value):
            return 0 if value < 0 else LAST_INSTANT
        millis = math.ceil(Fraction(value) * 1000) if self._kind is DueIs.SECONDS else math.ceil(value)
        return max(0, min(millis + self._after, LAST_INSTANT))

    def written(self, now: Millis) -> str:
        """`now` in the column's form, as an SQL literal."""
        if self._kind is not DueIs.TIMESTAMP:
            return str(now if self._kind is DueIs.MILLISECONDS else now // 1000)
        text = self._shown(now).isoformat(self._separator, timespec="milliseconds")
        if self._offset is not None:
            text = datetime.fromisoformat(text).replace(tzinfo=timezone(self._offset)).isoformat(
                self._separator, timespec="milliseconds"
            )  # fmt: skip
        return f"'{text}'"

    def _shown(self, now: Millis) -> datetime:
        """`now` as a naive time in the column's offset or zone."""
        if self._offset is None:
            return cutoff(now, self._zone)
        return (as_datetime(now) + self._offset).replace(tzinfo=None)

    def _read(self, value: Any) -> Millis | None:
        """The instant of a value, in milliseconds; None if it is not a time."""
        if value is None:
            return None
        try:
            moment = datetime.fromisoformat(value) if _DATE.match(value) else None
        except (TypeError, ValueError):
            moment = None
        if moment is None:
            self._wonder_at(value)
            return None
        offset = moment.utcoffset()
        self._offset = offset
        if len(value) > 10:
            self._separator = value[10]
        if offset is None:
            return instant_of(moment, self._zone)
        try:
            return instant(moment)
        except ValueError:
            return 0 if moment.year < 1970 else LAST_INSTANT

    def _number(self, value: Any) -> float | None:
        if value is None or isinstance(value, int | float):
            return value
        self._wonder_at(value)
        return None

    def _wonder_at(self, value: Any) -> None:
        text = repr(value)[:80]
        if text not in self._unreadable and len(self._unreadable) < _WARNINGS:
            self._unreadable.add(text)
            _log.warning(
                "%s.%s: %s is not a time in %s, and is never due%s", self._source.table, self._source.due, text,
                *(("ISO 8601", "; for numbers give due_is=") if self._kind is DueIs.TIMESTAMP else (self._kind, "")),
            )  # fmt: skip
