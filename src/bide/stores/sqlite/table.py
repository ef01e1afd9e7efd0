"""A table of somebody's own in a SQLite file: its due rows, taken and changed under the file's one write lock.

While a row's transaction is open nobody else can write to the file, so rows are fired one after another, however many
workers there are. In the store's own file that goes by the store's threads and its watcher; a file without bide's
tables is opened for this alone (`TableFile`), and keeps whatever journal mode it has.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

from bide.core.errors import BadInput, SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant
from bide.core.records import NewTask
from bide.core.table_source import VIEW, DueIs, Sql, TableSource
from bide.ports import Clock, DueRow, Finding, Head, RowRefused, Taken, check_changed, is_unique
from bide.stores.named_queries import read_queries
from bide.stores.sqlite import operations
from bide.stores.sqlite.database import StoreFile, TableFile
from bide.stores.sqlite.errors import code_of, translate
from bide.stores.sqlite.operations import UnitOfWork
from bide.stores.wall_clock import cutoff, instant_of

_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_log = logging.getLogger("bide.table")
_WARNINGS = 20
_numbers = count(1)
_SECOND = timedelta(seconds=1)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]|$)")
"""ISO 8601 has other forms too, which do not sort among these."""
_FEW = 20
_ALTERED = re.compile("no such (table|column)|has no column")


class SqliteTable:
    """See `ports.Table`."""

    def __init__(self, source: TableSource, file: StoreFile | TableFile) -> None:
        if source.reads is not None:
            raise BadInput("reads", "a URL", "None for a table in a SQLite file, which has no replica")
        self._source = source
        self._file = file
        self._times = TableTimes(source)
        ids = ", ".join(map(_quoted, source.ids))
        self._one_of = f"({ids})" if len(source.ids) > 1 else ids
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": ids,
            "due": _quoted(source.due),
            "where": source.where,
            "due_millis": self._times.millis,
            "come": self._times.come,
            "ahead": self._times.ahead,
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
        }

    async def open(self) -> list[Finding]:
        await self._file.open(self)
        try:
            return await self._file.opened.reader.submit(self._examine)
        except BaseException:
            await self._file.close(self)
            raise

    async def close(self) -> None:
        await self._file.close(self)

    def clock(self) -> Clock | None:
        return None

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        return self._file.opened.notifier.on_commit(heard).end if self._file.is_store else None

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        def look(cursor: sqlite3.Cursor) -> Any:
            given = self._times.parameters(now, beyond=True) if beyond else {}
            text = self._written("head_beyond" if beyond else "head", skip, given)
            return self._run(cursor, text, given).fetchone()

        found = await self._file.opened.reader.submit(look)
        if found is None:
            return Head(None, now)
        return Head(self._times.instant_of(found[0]), now, self._identity(found[1:]))

    def _identity(self, values: Sequence[Any]) -> Any:
        return values[0] if len(self._source.ids) == 1 else tuple(values)

    # --- take

    @property
    def joins(self) -> bool:
        return self._file.is_store

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        def call(work: UnitOfWork) -> list[Any]:
            rows = self._change(work.cursor, now, self._due(work.cursor, now, limit, skip))
            if new_task is not None and rows:
                try:
                    operations.add(work, [new_task(row) for row in rows], now=now)
                except BadInput as error:
                    raise RowRefused(rows, f"it makes no task: {error}") from error
            return [row.id for row in rows]

        # wholly in the writer's thread: nobody waits on the event loop for a lock that is held while the loop is needed
        if new_task is not None:
            self._file.opened.reserve.check()
        return await self._file.opened.writer.submit(call, adding=new_task is not None)

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        def call(work: UnitOfWork) -> bool:
            rows = self._due(work.cursor, now, 1, (), dead=identity)
            return bool(self._change(work.cursor, now, rows, self._source.dead))

        return await self._file.opened.writer.submit(call)

    @asynccontextmanager
    async def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AsyncIterator[Taken]:
        async with self._file.opened.transactions.begin() as joined:
            connection: sqlite3.Connection = joined.connection
            rows = self._change(connection.cursor(), now, self._due(connection.cursor(), now, limit, skip))
            yield Taken(rows, connection, joined if self._file.is_store else None)

    def _due(
        self, cursor: sqlite3.Cursor, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None
    ) -> list[DueRow]:
        given = {**self._times.parameters(now), "limit": limit}
        found = "" if dead is None else f" AND {self._one_of} IN ({self._these('id', [dead], given)})"
        try:
            taken = self._run(cursor, self._written("take", skip, given, found=found), given).fetchall()
        except sqlite3.Error as error:
            if not code_of(error) and "decode" in str(error):  # a text of the row's
                raise ValueError(str(error)) from error
            raise translate(error, self._file.path, own=False) from error
        names, width = self._source.loaded, len(self._source.ids)
        return [
            DueRow(
                self._identity(row[:width]),
                self._times.instant_of(row[width]),
                dict(zip(names, row[width + 1 :], strict=True)),
            )
            for row in taken
        ]

    def _change(
        self, cursor: sqlite3.Cursor, now: Millis, rows: list[DueRow], changes: Mapping[str, Any] | None = None
    ) -> list[DueRow]:
        """Make the changes, and check that each row was changed."""
        if not rows:
            return []
        text, given = self._changing(now, [row.id for row in rows], changes or self._source.changes)
        try:
            changed = self._run(cursor, text, given).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            if code_of(error) or _ALTERED.search(str(error)):  # of the file, or of the table
                raise translate(error, self._file.path, own=False) from error
            raise RowRefused(rows, f"the database refuses the changes: {error}") from error
        check_changed(rows, [(self._identity(row[:-1]), bool(row[-1])) for row in changed])
        return rows

    def _changing(self, now: Millis, ids: Sequence[Any], changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        given = self._times.parameters(now)
        written = []
        for place, (column, value) in enumerate(changes.items()):
            if isinstance(value, Sql):
                written.append(f"{_quoted(column)} = {value.written(lambda: self._times.written(now))}")
            else:
                given[f"value_{place}"] = value
                written.append(f"{_quoted(column)} = :value_{place}")
        found = f"{self._one_of} IN ({self._these('id', ids, given)})"
        return self._written("change", (), given, changes=", ".join(written), found=found), given

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
        left_out = f" AND {self._one_of} NOT IN ({self._these('skip', skip, given)})" if skip else ""
        return _QUERIES[query].format(**self._names, skip=left_out, **more)

    def _these(self, kind: str, ids: Collection[Any], given: dict[str, Any]) -> str:
        """A list of ids, or a query for them; they go to `given`. As JSON they may be more than a statement has places
        for, and it is the same statement.
        """
        if len(self._source.ids) > 1:
            rows = (f"({_listed(f'{kind}_{place}', identity, given)})" for place, identity in enumerate(ids))
            return f"VALUES {', '.join(rows)}"
        if len(ids) > _FEW and all(isinstance(identity, int | str) for identity in ids):
            given[kind] = json.dumps(list(ids))
            return f"SELECT value FROM json_each(:{kind})"
        return _listed(kind, ids, given)

    # --- look whether it is there

    def _examine(self, cursor: sqlite3.Cursor) -> list[Finding]:
        source, path = self._source, self._file.path
        schema, _, table = source.table.rpartition(".")
        of = f"{_quoted(schema)}." if schema else ""
        # with the columns that are generated, and without those that a virtual table hides
        columns = cursor.execute(f"PRAGMA {of}table_xinfo({_quoted(table)})").fetchall()
        there = [row[1] for row in columns if row[6] != 1]
        if not there:
            raise SetupError(f"{path}: there is no table {source.table}")
        if cursor.execute(
            f"SELECT 1 FROM {of}sqlite_master WHERE type = 'view' AND name = ? COLLATE NOCASE", (table,)
        ).fetchone():
            raise SetupError(f"{path}: {source.table} is {VIEW}")
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
            for changes in filter(None, (source.changes, source.dead)):
                text, given = self._changing(0, [self._identity((None,) * len(source.ids))], changes)
                self._run(cursor, f"EXPLAIN {text}", given).fetchall()
        except sqlite3.Error as error:
            raise SetupError(f"{path}: {source.table}: `where` or `changes` is refused: {error}") from error
        used = next((words[words.index("INDEX") + 1] for words in map(str.split, plan) if "INDEX" in words), None)
        sorts = any("TEMP B-TREE" in line for line in plan)
        served = used is not None and not sorts and self._narrow(cursor, of, used)
        what = f"{source.table}: {'an index leads to' if served else 'no index leads to'} the due rows"
        index = f"{table}_by_{source.due}"
        advice = f"CREATE INDEX {_quoted(index)} ON {self._names['table']} ({self._names['due']}) WHERE {source.where}"
        unique = self._unique(cursor, of, table, {row[1].lower() for row in columns if row[5]})
        return [
            Finding(served, what, "" if served else f"each look reads many rows; run: {advice}"),
            is_unique(source, unique=unique),
        ]

    def _unique(self, cursor: sqlite3.Cursor, of: str, table: str, primary: set[str]) -> bool:
        """True if the primary key, or an index of the whole table, says that the id is unique."""
        ids = {column.lower() for column in self._source.ids}
        if primary and primary <= ids:
            return True
        for index in cursor.execute(f"PRAGMA {of}index_list({_quoted(table)})").fetchall():
            named = [row[2] for row in cursor.execute(f"PRAGMA {of}index_info({_quoted(index[1])})").fetchall()]
            if index[2] and not index[4] and all(named) and {name.lower() for name in named} <= ids:
                return True
        return False

    @staticmethod
    def _narrow(cursor: sqlite3.Cursor, of: str, index: str) -> bool:
        """True if that index leaves rows out, or has further columns to find them by."""
        columns = cursor.execute(f"PRAGMA {of}index_info({_quoted(index)})").fetchall()
        made = cursor.execute("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        partial = made is not None and made[0] is not None and " where " in " ".join(made[0].lower().split())
        return partial or len(columns) > 1


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _listed(kind: str, values: Collection[Any], given: dict[str, Any]) -> str:
    """Placeholders for `values`, which go to `given`."""
    names = []
    for place, value in enumerate(values):
        given[f"{kind}_{place}"] = value
        names.append(f":{kind}_{place}")
    return ", ".join(names)


class TableTimes:
    """The due column of one source: how what it holds, for which SQLite has no type, compares with an instant.

    Numbers compare as they are. Text is compared twice: as text with a bound that is at most a second too late, which
    an index serves; then exactly, by reading it. Text must sort as time does, which it does where all rows are of one
    form: the separator and the offset of the form are taken from the rows that have been read.

    Used by several threads, each with a connection of its own.
    """

    def __init__(self, source: TableSource) -> None:
        self._source = source
        self._after = source.after_ms
        self._kind = DueIs(source.due_is)
        self._function = f"bide_due_{next(_numbers)}"
        self._separator = "T"
        """Sorts last of the two: a bound with it leaves nothing out before the first row has been read."""
        self._offset: timedelta | None = None
        self._unreadable: set[str] = set()
        column = '"' + source.due.replace('"', '""') + '"'
        self.millis = f"{self._function}({column})"
        if self._kind is DueIs.TIMESTAMP:
            self.come = f"{column} < :bound AND {self.millis} <= :now"
            self.ahead = f"{column} >= :bound AND {self.millis} > :now"
        else:
            self.come = f"{column} <= :now"
            self.ahead = f"{column} > :now"

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Teach a connection to read these times."""
        read = self._read if self._kind is DueIs.TIMESTAMP else self._number
        connection.create_function(self._function, 1, read, deterministic=True)

    def unprepared(self, error: sqlite3.Error) -> bool:
        return f"no such function: {self._function}" in str(error)

    def parameters(self, now: Millis, *, beyond: bool = False) -> dict[str, Any]:
        """The parameters of `come` (or, `beyond`, of `ahead`)."""
        now -= self._after
        if self._kind is DueIs.MILLISECONDS:
            return {"now": now}
        if self._kind is DueIs.SECONDS:
            return {"now": now / 1000}
        second = self._shown(now).replace(microsecond=0)
        if not beyond and second < datetime.max - _SECOND:  # noqa: DTZ901 - naive
            second += _SECOND
        return {"now": now, "bound": second.isoformat(self._separator)}

    def instant_of(self, value: Any) -> Millis:
        """When a row is due of which `millis` came to this."""
        if not math.isfinite(value):
            return 0 if value < 0 else LAST_INSTANT
        millis = math.ceil(Fraction(value) * 1000) if self._kind is DueIs.SECONDS else math.ceil(value)
        return max(0, min(millis + self._after, LAST_INSTANT))

    def written(self, now: Millis) -> str:
        """`now` as the column has it, for a statement."""
        if self._kind is not DueIs.TIMESTAMP:
            return str(now if self._kind is DueIs.MILLISECONDS else now // 1000)
        text = self._shown(now).isoformat(self._separator, timespec="milliseconds")
        if self._offset is not None:
            text = datetime.fromisoformat(text).replace(tzinfo=timezone(self._offset)).isoformat(
                self._separator, timespec="milliseconds"
            )  # fmt: skip
        return f"'{text}'"

    def _shown(self, now: Millis) -> datetime:
        """`now` on a clock that keeps the column's time."""
        if self._offset is None:
            return cutoff(now, self._source.zone)
        return (as_datetime(now) + self._offset).replace(tzinfo=None)

    def _read(self, value: Any) -> Millis | None:
        """When that is, in milliseconds; None for what is no time."""
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
            return instant_of(moment, self._source.zone)
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
                "%s.%s: %s is no time in %s, and is never due%s", self._source.table, self._source.due, text,
                *(("ISO 8601", "; for numbers give due_is=") if self._kind is DueIs.TIMESTAMP else (self._kind, "")),
            )  # fmt: skip
