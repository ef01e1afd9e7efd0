"""A table of somebody's own in MySQL or MariaDB: due rows are locked, changed and handed on in one transaction each.

As in PostgreSQL, but that an index cannot leave rows out: it has to begin with the columns that `where` names. None of
it needs tables of bide's.
"""

from __future__ import annotations

import asyncio
import re
import time as steady
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import SetupError, StoreError, StoreUnavailable
from bide.core.instants import Millis, as_datetime
from bide.core.table_source import NOT_CHANGED, UNREADABLE, VIEW, Sql, TableSource
from bide.ports import DueRow, Finding, Head, Joined, Raced, RowRefused, Taken, check_changed, is_unique
from bide.stores.mysql.address import address_of
from bide.stores.mysql.connecting import Connection
from bide.stores.mysql.errors import Broken, meaning, said
from bide.stores.mysql.table_connections import MySqlConnections
from bide.stores.mysql.table_times import TableTimes, literal
from bide.stores.named_queries import read_queries
from bide.stores.sql.errors import Again, Lost, NotSent
from bide.stores.sql.table import SILENCE, SOON, ServerTable, TableConnections

_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_ALTERED = frozenset({1054, 1146, 1176, 1412})
"""Numbers of errors that the table's definition is to blame for: it is not as it was at the last look at that."""
_ENDED = 1305
"""A savepoint is not there."""
_SPARE = 32
"""Rows that others may hold, beside those that are wanted."""
_INEXACT = frozenset({"float", "bit"})
"""Types of which a row is not found again by the value that was read."""
_WORD = re.compile(r"\w+")
Rows = Sequence[Sequence[Any]]


class MySqlTable(ServerTable):
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is on the same server."""

    _kind = MySqlConnections
    _address_of = address_of

    def __init__(
        self, source: TableSource, connections: Any, lookers: Any, clock: str, using: Callable[[Any], Joined] | None
    ) -> None:
        super().__init__(source, connections, lookers, clock, using)
        self._times: TableTimes | None = None
        self._served = True
        ids = ", ".join(map(_quoted, source.ids))
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": ids,
            "due": _quoted(source.due),
            "where": source.where.replace("%", "%%"),
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
            "index": "",
            "by_id": "",
        }

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        """Nobody can tell here."""
        return None

    @contextmanager
    def _ours(self, asked: TableConnections | None = None) -> Iterator[None]:
        shown = (asked or self._connections).address.shown
        try:
            yield
        except (MySQLError, Broken, OSError, TimeoutError, NotSent, Lost, Again) as error:
            found = meaning(error, shown)
            altered = isinstance(error, MySQLError) and error.args[:1] and error.args[0] in _ALTERED
            if altered:
                self._times = None
            if isinstance(found, Again):
                raise Raced(str(found)) from error
            if altered or not isinstance(found, StoreError):
                found = StoreUnavailable(f"{shown}: {said(error)}")
            raise found from error

    @contextmanager
    def _refusing(self, rows: Sequence[DueRow]) -> Iterator[None]:
        """What the database has against the rows themselves: all but what passes, and what is of the table."""
        try:
            yield
        except MySQLError as error:
            passes = isinstance(meaning(error, ""), Lost | NotSent | Again)
            if passes or (error.args[0] in _ALTERED and self._maybe_altered(error)):
                raise
            raise RowRefused(rows, f"the database refuses the changes: {error}") from error

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
        at = "UTC_TIMESTAMP(6)" if self._server_s(query) else literal(as_datetime(about).replace(tzinfo=None))
        cutoff, written = times.cutoff(at, about), f"({times.shown_at(at, about)})"
        arguments: list[Any] = []
        changes = []
        for column, value in (changed or self._source.changes).items() if query == "change" else ():
            if isinstance(value, Sql):
                changes.append(f"{_quoted(column)} = {value.written(lambda: written).replace('%', '%%')}")
            else:
                changes.append(f"{_quoted(column)} = %s")
                arguments.append(value)
        text = _QUERIES[query].format(
            **self._names, now=at, cutoff=cutoff, changes=", ".join(changes), limit=limit,
            found=self._one_of(ids, arguments), skip=f" AND NOT {self._one_of(skip, arguments)}" if skip else "",
        )  # fmt: skip
        return text, tuple(arguments)

    def _one_of(self, ids: Collection[Any], arguments: list[Any]) -> str:
        """The condition that a row has one of these ids, which go to `arguments`."""
        columns = [_quoted(column) for column in self._source.ids]
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

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        await self._ready_to_look()
        async with self._lookers.turn:
            with self._ours(self._lookers):
                connection = await self._lookers.looker()
                try:
                    text, arguments = self._write("head_beyond" if beyond else "head", now, skip)
                    sent = steady.monotonic()
                    [(micros, due, *identity)] = await self._ask(connection, text, arguments)
                except BaseException:
                    connection.drop()
                    raise
        if self._server_s("head"):
            self._time.saw(int(micros), sent, steady.monotonic())
        if due is None:
            return Head(None, int(micros) // 1000)
        row = self._row(identity, due)
        return Head(row.due, int(micros) // 1000, row.id)

    def _row(self, identity: Sequence[Any], due: Any, columns: Sequence[Any] | None = None) -> DueRow:
        """Raises RowRefused."""
        found = self._identity(identity)
        try:
            at = self._known.instant_of(due)
        except ValueError as error:
            raise RowRefused([DueRow(found, 0, {})], f"{UNREADABLE}: {error}") from error
        return DueRow(found, at, {} if columns is None else dict(zip(self._source.loaded, columns, strict=True)))

    # --- take

    @asynccontextmanager
    async def _taken(
        self, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None, lent: bool = False
    ) -> AsyncIterator[Taken]:
        with self._ours():
            connection, _ = await self._connections.begun()
        usable = False
        try:
            try:
                rows = await self._rows(connection, now, limit, skip, dead)
                yield Taken(rows, connection.driver, None if self._using is None else self._using(connection.driver))
            except Exception:
                with self._ours():
                    async with asyncio.timeout(SOON):
                        await connection.ask("ROLLBACK")
                usable = True
                raise
            with self._ours():
                try:
                    async with asyncio.timeout(SILENCE):
                        await connection.ask("RELEASE SAVEPOINT bide_row; COMMIT")
                except MySQLError as error:
                    if error.args[0] != _ENDED:
                        raise
                    raise SetupError(
                        "the handler ended the transaction of its row, maybe by a statement that commits by itself; "
                        "what it wrote until then is there, and so are the changes"
                    ) from error
            usable = True
        finally:
            if usable:
                await self._connections.give_back(connection, lent=lent)
            else:
                connection.drop()  # the server rolls back what is open

    async def _rows(
        self, connection: Connection, now: Millis, limit: int, skip: Collection[Any], dead: Any
    ) -> list[DueRow]:
        """The rows, locked and changed."""
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

    # --- look whether it is there

    async def _micros(self, connection: Connection) -> int:
        [(micros,)] = await self._ask(connection, _QUERIES["clock"])
        return int(micros)

    async def _examine(self, connection: Connection) -> list[Finding]:
        source, where = self._source, self._address.shown.partition("/")[0]
        schema, _, table = source.table.rpartition(".")
        found = await self._ask(connection, _QUERIES["columns"], (schema or None, table))
        if not found:
            raise SetupError(f"{where}: there is no table {source.table}")
        types = {str(name).lower(): str(kind) for name, kind in found}
        for column, field in source.named.items():
            if column.lower() not in types:
                there = ", ".join(types)
                raise SetupError(f"{where}: {source.table} has no column {column!r} ({field}); it has {there}")
        [(view, schema)] = await self._ask(connection, _QUERIES["kind"], (schema or None, table))
        if view:
            raise SetupError(f"{where}: {source.table} is {VIEW}")
        for column in source.ids:
            if types[column.lower()] in _INEXACT:
                kind = types[column.lower()]
                raise SetupError(
                    f"{where}: {source.table}.{column} is of type {kind}: no row is found again by such an id"
                )
        # whatever a handler makes the default, it is this table
        self._names["table"] = f"{_quoted(schema)}.{_quoted(table)}"
        self._times = TableTimes(source, types[source.due.lower()])
        now = await self._tell_time(connection)
        if self._by_server:
            self._time.warn_of_skew(where)
        conditions = {word.lower() for word in _WORD.findall(source.where)} & set(types)
        indexes: dict[str, list[str]] = {}
        unique = set()
        for index, column, several in await self._ask(connection, _QUERIES["indexes"], (schema, table)):
            indexes.setdefault(index, []).append(str(column).lower())
            if not several:
                unique.add(index)
        ids = [column.lower() for column in source.ids]
        by_id = next((index for index, columns in indexes.items() if set(columns[: len(ids)]) == set(ids)), None)
        self._names["by_id"] = "" if by_id is None else f" FORCE INDEX ({_quoted(by_id)})"
        serving = None
        try:
            for index in (None, *(index for index, columns in indexes.items() if self._serves(columns, conditions))):
                self._names["index"] = "" if index is None else f" FORCE INDEX ({_quoted(index)})"
                plan = await self._ask(connection, *self._write("explained", now))
                if index is not None and not any("filesort" in str(part) for row in plan for part in row):
                    serving = index
                    break
            else:
                self._names["index"] = ""
            for changes in filter(None, (source.changes, source.dead)):
                text, arguments = self._write("change", now, changed=changes)
                await self._ask(connection, f"EXPLAIN {text}", arguments)
        except MySQLError as error:
            self._times = None
            raise SetupError(f"{where}: {source.table}: `where` or `changes` is refused: {error}") from error
        self._served = serving is not None
        what = f"{source.table}: {'an index leads' if serving else 'no index leads'} to the due rows"
        columns = ", ".join(_quoted(column) for column in (*sorted(conditions - {source.due.lower()}), source.due))
        advice = (
            f"each look reads rows that are not due; run: CREATE INDEX {_quoted(f'{table}_by_{source.due}'[:64])} "
            f"ON {self._names['table']} ({columns})"
        )
        sure = any(set(indexes[index]) <= set(ids) for index in unique)
        return [Finding(self._served, what, "" if serving else advice), is_unique(source, unique=sure)]

    def _serves(self, columns: Sequence[str], conditions: Collection[str]) -> bool:
        """Whether an index leads to the rows of `where` in the order of their times."""
        due = self._source.due.lower()
        before = columns[: columns.index(due)] if due in columns else None
        return before is not None and set(before) <= set(conditions) and (bool(before) or not set(conditions) - {due})


def _quoted(name: str) -> str:
    return "`" + name.replace("%", "%%") + "`"
