"""A table of somebody's own in MySQL or MariaDB.

An index cannot leave rows out here: it has to begin with the columns that `where` names.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import SetupError
from bide.core.instants import Millis, as_datetime
from bide.core.table_source import NOT_CHANGED, Sql, TableSource
from bide.ports import DueRow, Joined, RowRefused, check_changed
from bide.stores.mysql.dialect import AFRESH, MYSQL, Connection, Rows, connect
from bide.stores.named_queries import read_queries
from bide.stores.sql.table import Plan, SqlTable
from bide.stores.sql.table_connections import SILENCE, SOON, TableConnections
from bide.stores.sql.table_times import Given, TableTimes
from bide.stores.wall_clock import Stretch

_ENDED = 1305
"""A savepoint is not there."""
_SPARE = 32
"""Rows that others may hold, beside those that are wanted."""
_INEXACT = frozenset({"float", "bit"})
"""Types of which a row is not found again by the value that was read."""
_WORD = re.compile(r"\w+")
_MICROSECOND = timedelta(microseconds=1)


class MySqlTableConnections(TableConnections):
    """Each transaction begins with a savepoint, which is gone if a handler has ended it."""

    dialect = MYSQL

    async def _connect(self, *, looking: bool) -> Connection:
        return await connect(self.address, within=SILENCE, plain=True)

    async def _begin(self, connection: Connection) -> None:
        await connection.ask(f"{AFRESH}; BEGIN; SAVEPOINT bide_row")


class MySqlTimes(TableTimes):
    zoned, naive = "timestamp", "datetime"  # a timestamp is in the session's zone, and ours is UTC
    whole, fractions = ("tinyint", "smallint", "mediumint", "int", "bigint"), ("decimal", "double")
    coarse, finer, called = "float", "double or bigint", "datetimes"

    def _length(self, millis: Millis) -> str:
        return f"INTERVAL {millis * 1000} MICROSECOND"

    def _number(self, now: str, factor: str, *, whole: bool) -> str:
        passed = f"UNIX_TIMESTAMP({now}){factor}"
        return f"CAST(FLOOR({passed}) AS SIGNED)" if whole else passed

    def _in_zone(self, now: str, held: Stretch, given: Given) -> str:
        if self._zone is UTC:
            return now
        until = given(as_datetime(held.until).replace(tzinfo=None), "datetime")
        shown = f"LEAST({now}, {until}) + INTERVAL {held.offset // _MICROSECOND} MICROSECOND"
        return f"LEAST({shown}, {given(held.least, 'datetime')})"


def _literal(moment: datetime) -> str:
    """A naive time within a statement."""
    return f"TIMESTAMP'{moment.isoformat(' ', timespec='microseconds')}'"


def _given(moment: datetime, kind: str) -> str:
    return _literal(moment)


class MySqlTable(SqlTable):
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is on the same server."""

    _kind = MySqlTableConnections
    _times_of = MySqlTimes
    _queries = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
    _refusals = MySQLError
    _altered = (1054, 1146, 1176, 1412)
    _refused = (MySQLError,)

    def __init__(
        self, source: TableSource, connections: Any, lookers: Any, clock: str, using: Callable[[Any], Joined] | None
    ) -> None:
        super().__init__(source, connections, lookers, clock, using)
        self._served = True
        self._names |= {"where": source.where.replace("%", "%%"), "index": "", "by_id": ""}
        self._schema, _, self._table = source.table.rpartition(".")

    @staticmethod
    def _quoted(name: str) -> str:
        return "`" + name.replace("%", "%%") + "`"

    @staticmethod
    def _code(error: BaseException) -> str | int | None:
        code = error.args[0] if isinstance(error, MySQLError) and error.args else None
        return code if isinstance(code, int) else None

    @property
    def _where(self) -> str:
        return str(self._address.shown.partition("/")[0])

    def _column(self, name: str) -> str:
        return name.lower()

    # --- statements

    def _write(
        self,
        query: str,
        now: Millis,
        skip: Collection[Any] = (),
        ids: Sequence[Any] = (),
        limit: int = 0,
        changed: Mapping[str, Any] | None = None,
    ) -> tuple[str, tuple[Any, ...]]:
        """A statement and its arguments."""
        times = self._known
        about = int(self._time.seconds() * 1000) if self._by_server else now
        at = "UTC_TIMESTAMP(6)" if self._server_s(query) else _literal(as_datetime(about).replace(tzinfo=None))
        cutoff, written = times.cutoff(at, about, _given), f"({times.shown_at(at, about, _given)})"
        arguments: list[Any] = []
        changes = []
        for column, value in (changed or self._source.changes).items() if query == "change" else ():
            if isinstance(value, Sql):
                changes.append(f"{self._quoted(column)} = {value.written(lambda: written).replace('%', '%%')}")
            else:
                changes.append(f"{self._quoted(column)} = %s")
                arguments.append(value)
        text = self._queries[query].format(
            **self._names, now=at, cutoff=cutoff, changes=", ".join(changes), limit=limit,
            found=self._one_of(ids, arguments), skip=f" AND NOT {self._one_of(skip, arguments)}" if skip else "",
        )  # fmt: skip
        return text, tuple(arguments)

    def _one_of(self, ids: Collection[Any], arguments: list[Any]) -> str:
        """The condition that a row has one of these ids, which go to `arguments`."""
        columns = [self._quoted(column) for column in self._source.ids]
        if len(columns) == 1:
            arguments += ids
            return f"{columns[0]} IN ({', '.join(['%s'] * len(ids)) or 'NULL'})"
        for identity in ids:
            arguments += identity
        each = " AND ".join(f"{column} = %s" for column in columns)
        return f"({' OR '.join([f'({each})'] * len(ids)) or 'FALSE'})"

    async def _ask(self, connection: Connection, text: str, arguments: Sequence[Any] = ()) -> Rows:
        async with asyncio.timeout(SILENCE), connection.driver.cursor() as cursor:
            await cursor.execute(text, tuple(arguments))
            return await cursor.fetchall() if cursor.description else ((cursor.rowcount,),)

    # --- take

    async def _undo(self, connection: Connection, transaction: None, error: BaseException) -> bool:
        if isinstance(error, Exception):  # else a statement may be under way
            with suppress(*MYSQL.away):
                async with asyncio.timeout(SOON):
                    await connection.rollback()
                    return True
        return False

    async def _commit(self, connection: Connection, transaction: None, rows: Sequence[DueRow]) -> None:
        try:
            await connection.ask("RELEASE SAVEPOINT bide_row; COMMIT")
        except MySQLError as error:
            if self._code(error) != _ENDED:
                raise
            raise SetupError(
                "the handler ended the transaction of its row, maybe by a statement that commits by itself; what it "
                "wrote until then is there, and so are the changes"
            ) from error

    async def _rows(
        self, connection: Connection, now: Millis, limit: int, skip: Collection[Any], dead: Any
    ) -> list[DueRow]:
        with self._ours():
            if dead is not None:
                found = await self._ask(connection, *self._write("take_these", now, ids=[dead]))
            elif self._served:
                found = await self._ask(connection, *self._write("take", now, skip, limit=limit))
            else:
                found = await self._one_after_another(connection, now, limit, skip)
        width = len(self._source.ids)
        rows = [self._row(row[:width], row[width], row[width + 1 :]) for row in found]
        if not rows:
            return []
        ids = [row.id for row in rows]
        with self._ours(), self._refusing(rows):
            changes = self._source.dead if dead is not None else None
            [(count,)] = await self._ask(connection, *self._write("change", now, ids=ids, changed=changes))
            still = {tuple(row) for row in await self._ask(connection, *self._write("still_due", now, ids=ids))}
        left = [row for row in rows if (row.id if width > 1 else (row.id,)) in still]
        if count < len(rows) and not left:
            raise RowRefused(rows, NOT_CHANGED)
        check_changed(rows, [(row.id, row in left) for row in rows] + [(None, False)] * (count - len(rows)))
        return rows

    async def _one_after_another(self, connection: Connection, now: Millis, limit: int, skip: Collection[Any]) -> Rows:
        """Rows that are found by their ids, so that only these are locked."""
        text, arguments = self._write("candidates", now, skip, limit=limit + _SPARE)
        candidates = [row if len(row) > 1 else row[0] for row in await self._ask(connection, text, arguments)]
        for first in range(0, len(candidates), limit):
            ids = candidates[first : first + limit]
            if found := await self._ask(connection, *self._write("take_these", now, ids=ids)):
                return found
        return ()

    # --- examine

    async def _types(self, connection: Connection) -> Mapping[str, str]:
        found = await self._ask(connection, self._queries["columns"], (self._schema or None, self._table))
        return {str(name).lower(): str(kind) for name, kind in found}

    async def _is_view(self, connection: Connection) -> bool:
        """Whatever a handler makes the default database, it is this table from now on."""
        [(view, self._schema)] = await self._ask(connection, self._queries["kind"], (self._schema or None, self._table))
        self._names["table"] = f"{self._quoted(self._schema)}.{self._quoted(self._table)}"
        return bool(view)

    async def _plan(self, connection: Connection, now: Millis, types: Mapping[str, str]) -> Plan:
        source = self._source
        for column in source.ids:
            kind = types[column.lower()]
            if kind in _INEXACT:
                raise SetupError(
                    f"{self._where}: {source.table}.{column} is of type {kind}: no row is found again by such an id"
                )
        indexes: dict[str, list[str]] = {}
        unique = set()
        for index, column, several in await self._ask(
            connection, self._queries["indexes"], (self._schema, self._table)
        ):
            indexes.setdefault(index, []).append(str(column).lower())
            if not several:
                unique.add(index)
        ids = [column.lower() for column in source.ids]
        by_id = next((index for index, columns in indexes.items() if set(columns[: len(ids)]) == set(ids)), None)
        self._names["by_id"] = "" if by_id is None else f" FORCE INDEX ({self._quoted(by_id)})"
        conditions = {word.lower() for word in _WORD.findall(source.where)} & set(types)
        self._served = await self._find_index(connection, now, indexes, conditions)
        for changes in filter(None, (source.changes, source.dead)):
            text, arguments = self._write("change", now, changed=changes)
            await self._ask(connection, f"EXPLAIN {text}", arguments)
        name = self._quoted(f"{self._table}_by_{source.due}"[:64])
        leading = ", ".join(self._quoted(column) for column in (*sorted(conditions - {source.due.lower()}), source.due))
        making = f"CREATE INDEX {name} ON {self._names['table']} ({leading})"
        return Plan(self._served, any(set(indexes[index]) <= set(ids) for index in unique), making)

    async def _find_index(
        self, connection: Connection, now: Millis, indexes: Mapping[str, Sequence[str]], conditions: Collection[str]
    ) -> bool:
        """Whether an index leads to the due rows: then our statements are told to use it."""
        for index in (None, *(index for index, columns in indexes.items() if self._serves(columns, conditions))):
            self._names["index"] = "" if index is None else f" FORCE INDEX ({self._quoted(index)})"
            plan = await self._ask(connection, *self._write("explained", now))
            if index is not None and not any("filesort" in str(part) for row in plan for part in row):
                return True
        self._names["index"] = ""
        return False

    def _serves(self, columns: Sequence[str], conditions: Collection[str]) -> bool:
        """Tell whether an index leads to the rows of `where` in the order of their times."""
        due = self._source.due.lower()
        before = columns[: columns.index(due)] if due in columns else None
        return before is not None and set(before) <= set(conditions) and (bool(before) or not set(conditions) - {due})
