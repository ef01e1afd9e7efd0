"""A watched table in MySQL or MariaDB.

These servers have no partial indexes: the index has to begin with the columns that `where` names.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, timedelta
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import SetupError
from bide.core.instants import Millis, as_datetime
from bide.ports import DueRow
from bide.stores.mysql.connection import AFRESH, MYSQL, Connection, Rows, connect
from bide.stores.naive_times import Stretch
from bide.stores.named_queries import queries_beside
from bide.stores.sql.server_table import SILENCE, ServerTable, TableConnections
from bide.stores.sql.watched_table import Give, Plan, TableTimes

_ENDED = 1305
"""The error number for a missing savepoint."""
_SPARE = 32
"""The number of candidates beyond the wanted rows, since other transactions may hold some."""
_INEXACT = frozenset({"float", "bit"})
"""Types whose values, once read, do not find the row again."""
_WORD = re.compile(r"\w+")
_MICROSECOND = timedelta(microseconds=1)


class MySqlTableConnections(TableConnections):
    """The connections of a table. Each transaction begins with a savepoint, which is gone if a handler has ended it."""

    dialect = MYSQL

    async def _connect(self, *, polling: bool) -> Connection:
        return await connect(self.address, within=SILENCE, plain=True)

    async def _begin(self, connection: Connection) -> None:
        await connection.ask(f"{AFRESH}; BEGIN; SAVEPOINT bide_row")


class MySqlTimes(TableTimes):
    zoned, naive = "timestamp", "datetime"  # a timestamp is in the session's time zone, and ours is UTC
    whole, fractions = ("tinyint", "smallint", "mediumint", "int", "bigint"), ("decimal", "double")
    coarse, finer, called = "float", "double or bigint", "datetimes"

    def _length(self, millis: Millis) -> str:
        return f"INTERVAL {millis * 1000} MICROSECOND"

    def _number(self, now: str, factor: str, *, whole: bool) -> str:
        passed = f"UNIX_TIMESTAMP({now}){factor}"
        return f"CAST(FLOOR({passed}) AS SIGNED)" if whole else passed

    def _in_zone(self, now: str, held: Stretch, give: Give) -> str:
        if self._zone is UTC:
            return now
        until = give(as_datetime(held.until), "datetime")
        shown = f"LEAST({now}, {until}) + INTERVAL {held.offset // _MICROSECOND} MICROSECOND"
        return f"LEAST({shown}, {give(held.least, 'datetime')})"


class MySqlTable(ServerTable):
    _kind = MySqlTableConnections
    _times_of = MySqlTimes
    _queries = queries_beside(__file__, "watched_table.sql")
    _clock = "UTC_TIMESTAMP(6)"
    _refusals = (MySQLError,)
    _altered = (1054, 1146, 1176, 1412)
    _refused = (MySQLError,)

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._served = True
        self._names |= {"index": "", "by_id": ""}
        self._schema, _, self._table = self._source.table.rpartition(".")

    @staticmethod
    def _quoted(name: str) -> str:
        return "`" + name.replace("%", "%%") + "`"

    @staticmethod
    def _text(expression: str) -> str:
        return expression.replace("%", "%%")

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

    def _give(self, values: list[Any], value: Any, kind: str = "") -> str:
        if kind in (MySqlTimes.zoned, MySqlTimes.naive):  # our own values, in UTC
            return f"TIMESTAMP'{value.replace(tzinfo=None).isoformat(' ', timespec='microseconds')}'"
        values.append(value)
        return "%s"

    def _one_of(self, ids: Collection[Any], give: Give, *, out: bool = False) -> str:
        columns = [self._quoted(column) for column in self._source.ids]
        if len(columns) == 1:
            among = f"{columns[0]} IN ({', '.join(map(give, ids)) or 'NULL'})"
        else:
            pairs = (zip(columns, identity, strict=True) for identity in ids)
            each = (" AND ".join(f"{column} = {give(one)}" for column, one in pair) for pair in pairs)
            among = f"({' OR '.join(f'({one})' for one in each) or 'FALSE'})"
        return f"NOT {among}" if out else among

    async def _ask(self, connection: Connection, text: str, values: Sequence[Any] = ()) -> Rows:
        async with asyncio.timeout(SILENCE), connection.driver.cursor() as cursor:
            await cursor.execute(text, tuple(values))
            return await cursor.fetchall() if cursor.description else ((cursor.rowcount,),)

    # --- take

    async def _lock(self, connection: Connection, now: Millis, limit: int, skip: Collection[Any], dead: Any) -> Rows:
        if self._served or dead is not None:
            return await super()._lock(connection, now, limit, skip, dead)
        # by id, so that only the taken rows are locked
        text, values = self._write("candidates", now, skip=skip, limit=limit + _SPARE)
        candidates = [self._identity(row) for row in await self._ask(connection, text, values)]
        for first in range(0, len(candidates), limit):
            ids = candidates[first : first + limit]
            if found := await self._ask(connection, *self._write("take_these", now, ids=ids)):
                return found
        return ()

    async def _change(
        self, connection: Connection, now: Millis, ids: Sequence[Any], changes: Mapping[str, Any] | None
    ) -> Sequence[tuple[Any, bool]]:
        [(count,)] = await self._ask(connection, *self._write("change", now, ids=ids, changes=changes))
        found = await self._ask(connection, *self._write("still_due", now, ids=ids))
        still = set(map(self._identity, found))
        if count < len(ids) and not still:
            return ()
        return [(identity, identity in still) for identity in ids] + [(None, False)] * (count - len(ids))

    async def _undo(self, connection: Connection, error: BaseException) -> bool:
        # after a cancellation a statement may still be running
        return isinstance(error, Exception) and await super()._undo(connection, error)

    async def _commit(self, connection: Connection, rows: Sequence[DueRow]) -> None:
        try:
            await connection.ask("RELEASE SAVEPOINT bide_row; COMMIT")
        except MySQLError as error:
            if self._code(error) != _ENDED:
                raise
            raise SetupError(
                "the handler ended the transaction of its row, perhaps by a statement with an implicit commit; its "
                "writes until then are kept, and so are the changes"
            ) from error

    # --- examine

    async def _types(self, connection: Connection) -> Mapping[str, str]:
        found = await self._ask(connection, self._queries["columns"], (self._schema or None, self._table))
        return {str(name).lower(): str(kind) for name, kind in found}

    async def _is_view(self, connection: Connection) -> bool:
        """Tell whether the table is a view; qualify its name, since a handler may change the default database."""
        [(view, self._schema)] = await self._ask(connection, self._queries["kind"], (self._schema or None, self._table))
        self._names["table"] = f"{self._quoted(self._schema)}.{self._quoted(self._table)}"
        return bool(view)

    async def _plan(self, connection: Connection, now: Millis, types: Mapping[str, str]) -> Plan:
        source = self._source
        for column in source.ids:
            kind = types[column.lower()]
            if kind in _INEXACT:
                raise SetupError(
                    f"{self._where}: {source.table}.{column} is of type {kind}: such an id cannot be looked up exactly"
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
            text, values = self._write("change", now, changes=changes)
            await self._ask(connection, f"EXPLAIN {text}", values)
        name = self._quoted(f"{self._table}_by_{source.due}"[:64])
        leading = ", ".join(self._quoted(column) for column in (*sorted(conditions - {source.due.lower()}), source.due))
        making = f"CREATE INDEX {name} ON {self._names['table']} ({leading})"
        return Plan(self._served, any(set(indexes[index]) <= set(ids) for index in unique), making)

    async def _find_index(
        self, connection: Connection, now: Millis, indexes: Mapping[str, Sequence[str]], conditions: Collection[str]
    ) -> bool:
        """Find an index that leads to the due rows; our statements then name it."""
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
