"""A table of somebody's own in PostgreSQL: its due rows are locked, changed and handed on in one transaction each.

One connection looks, and has the planner's settings of our own statements; the handlers have others, with the
database's settings, where ours hold only while the rows are taken. None of it needs tables of bide's.
"""

from __future__ import annotations

import asyncio
import json
import time as steady
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis, as_datetime
from bide.core.table_source import VIEW, Sql, TableSource
from bide.ports import DueRow, Finding, Head, Joined, Raced, RowRefused, Taken, check_changed, is_unique
from bide.stores.named_queries import read_queries
from bide.stores.postgres.address import address_of
from bide.stores.postgres.connecting import PLANNER
from bide.stores.postgres.errors import AWAY, meaning, said
from bide.stores.postgres.table_connections import PostgresConnections
from bide.stores.postgres.table_times import TableTimes
from bide.stores.sql.errors import Again, Lost, NotSent
from bide.stores.sql.table import SILENCE, SOON, ServerTable, TableConnections

_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_OURS = "".join(f"SET LOCAL {name} = {value};" for name, value in PLANNER.items())
_THEIRS = "".join(f"SET LOCAL {name} TO DEFAULT;" for name in PLANNER)
_ALTERED = frozenset({"42P01", "42703", "42883", "42804", "3F000"})
"""Codes of errors that the table's definition is to blame for: it is not as it was at the last look at that."""
_UNINDEXED = frozenset({"Seq Scan", "Sort", "Bitmap Heap Scan"})


class _Statement:
    """Arguments, numbered as they come up."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []

    def given(self, value: Any, kind: str) -> str:
        self.arguments.append(value)
        return f"${len(self.arguments)}::{kind}"

    def plain(self, value: Any) -> str:
        """Of the type that its place asks for."""
        self.arguments.append(value)
        return f"${len(self.arguments)}"


class PostgresTable(ServerTable):
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is in the same database."""

    _kind = PostgresConnections
    _address_of = address_of

    def __init__(
        self, source: TableSource, connections: Any, lookers: Any, clock: str, using: Callable[[Any], Joined] | None
    ) -> None:
        super().__init__(source, connections, lookers, clock, using)
        self._times: TableTimes | None = None
        self._id_types: list[str] = []
        id_ = ", ".join(map(_quoted, source.ids))
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": id_,
            "due": _quoted(source.due),
            "where": source.where,
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
        }
        self._one_of = f"({id_})" if len(source.ids) > 1 else id_

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        if self._source.channel is None or self._address.pooled:
            return None
        self._connections.heard.add(heard)
        return lambda: self._connections.heard.discard(heard)

    @contextmanager
    def _ours(self, asked: TableConnections | None = None) -> Iterator[None]:
        shown = (asked or self._connections).address.shown
        try:
            yield
        except AWAY as error:
            code = getattr(error, "sqlstate", None)
            if code in _ALTERED or isinstance(error, asyncpg.InvalidCachedStatementError | asyncpg.DataError):
                self._times = None
            found = meaning(error, shown)
            if isinstance(found, Again):
                raise Raced(str(found)) from error
            if code in _ALTERED or isinstance(found, Lost | NotSent | BadInput):
                found = StoreUnavailable(f"{shown}: {said(error)}")
            raise found from error

    @contextmanager
    def _refusing(self, rows: Sequence[DueRow]) -> Iterator[None]:
        """What the database has against the rows themselves: all but what passes, and what is of the table."""
        try:
            yield
        except asyncpg.PostgresError as error:
            passes = isinstance(meaning(error, ""), Lost | NotSent | Again)
            if not rows or passes or (error.sqlstate in _ALTERED and self._maybe_altered(error)):
                raise
            if type(error) is asyncpg.DataError:  # of our arguments: the type of a column may be another now
                self._times = None
            raise RowRefused(rows, f"the database refuses the changes: {error}") from error

    # --- statements

    def _write(
        self, query: str, now: Millis, skip: Collection[Any], changes: Mapping[str, Any] | None = None, **more: Any
    ) -> tuple[str, Sequence[Any]]:
        """A statement and its arguments."""
        times, statement = self._known, _Statement()
        about = int(self._time.seconds() * 1000) if self._by_server else now
        server_s = self._server_s(query)
        at = "statement_timestamp()" if server_s else statement.given(as_datetime(about), "timestamptz")
        template = _QUERIES[query]
        cutoff = times.cutoff(at, about, statement.given) if "{cutoff}" in template else ""
        parts: dict[str, str] = {**self._names, "now": at, "cutoff": cutoff, "skip": "", "shown": times.shown}
        if skip:
            # as a subquery it is hashed once, however many rows rest
            parts["skip"] = f" AND {self._one_of} NOT IN ({self._these(statement, skip)})"
        if "limit" in more:
            parts["limit"] = statement.given(more["limit"], "bigint")
        if "{found}" in template:
            ids = more["ids"]
            if len(self._id_types) == 1:
                found = f"{self._one_of} = ANY ({statement.given(list(ids), f'{self._id_types[0]}[]')})"
            else:
                found = f"{self._one_of} IN ({self._these(statement, ids)})"
            parts["found"] = found
        if "{changes}" in template:
            written = lambda: f"({times.shown_at(at, about, statement.given)})"  # noqa: E731
            parts["changes"] = ", ".join(
                f"{_quoted(column)} = " + (value.written(written) if isinstance(value, Sql) else statement.plain(value))
                for column, value in (self._source.changes if changes is None else changes).items()
            )
        return template.format(**parts), statement.arguments

    def _these(self, statement: _Statement, ids: Collection[Any]) -> str:
        """A query for ids that we give."""
        rows = [(identity,) for identity in ids] if len(self._id_types) == 1 else ids
        columns = ([row[place] for row in rows] for place in range(len(self._id_types)))
        given = (statement.given(column, f"{kind}[]") for column, kind in zip(columns, self._id_types, strict=True))
        return f"SELECT * FROM unnest({', '.join(given)})"

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        await self._ready_to_look()
        async with self._lookers.turn:
            with self._ours(self._lookers):
                connection = await self._lookers.looker()
                try:
                    text, arguments = self._write("head_beyond" if beyond else "head", now, skip)
                    sent = steady.monotonic()
                    if self._lookers.address.pooled:
                        async with connection.transaction():
                            await connection.execute(_OURS, timeout=SILENCE)
                            [row] = await connection.fetch(text, *arguments, timeout=SILENCE)
                    else:
                        [row] = await connection.fetch(text, *arguments, timeout=SILENCE)
                except BaseException as error:
                    if not isinstance(error, asyncpg.PostgresError):
                        connection.terminate()
                    raise
        if self._server_s("head") and not self._address.pooled:
            self._time.saw(row["micros"], sent, steady.monotonic())
        due = None if row[1] is None else self._known.instant_of(row[1])
        return Head(due, row["micros"] // 1000, None if due is None else self._identity(row[2:]))

    # --- take

    @asynccontextmanager
    async def _taken(
        self, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None, lent: bool = False
    ) -> AsyncIterator[Taken]:
        with self._ours():
            connection, transaction = await self._connections.begun()
        usable = False
        try:
            try:
                rows = await self._rows(connection, now, limit, skip, dead)
                yield Taken(rows, connection, None if self._using is None else self._using(connection))
                if not connection.is_in_transaction():
                    raise SetupError("the handler ended the transaction of its row; leave that to the end of it")
            except BaseException:
                with suppress(*AWAY):
                    async with asyncio.timeout(SOON):
                        await transaction.rollback()
                        usable = True
                raise
            with self._ours(), self._refusing(rows):
                async with asyncio.timeout(SILENCE):
                    await transaction.commit()
            usable = True
        finally:
            if usable:
                await self._connections.give_back(connection, lent=lent)
            else:
                connection.terminate()

    async def _rows(self, connection: Any, now: Millis, limit: int, skip: Collection[Any], dead: Any) -> list[DueRow]:
        """The rows, locked and changed."""
        text, arguments = self._write("take" if dead is None else "take_one", now, skip, limit=limit, ids=[dead])
        with self._ours():
            await connection.execute(_OURS, timeout=SILENCE)
            found = await connection.fetch(text, *arguments, timeout=SILENCE)
        if not found:
            return []
        names, width = self._source.loaded, len(self._source.ids)
        rows = [
            DueRow(
                self._identity(row[:width]),
                self._known.instant_of(row[width]),
                dict(zip(names, row[width + 1 :], strict=True)),
            )
            for row in map(tuple, found)
        ]
        changes = None if dead is None else self._source.dead
        text, arguments = self._write("change", now, (), changes, ids=[row.id for row in rows])
        with self._ours():
            with self._refusing(rows):
                changed = [
                    (self._identity(row[:width]), row[width])
                    for row in map(tuple, await connection.fetch(text, *arguments, timeout=SILENCE))
                ]
            await connection.execute(_THEIRS, timeout=SILENCE)
        check_changed(rows, changed)
        return rows

    # --- look whether it is there

    async def _micros(self, connection: Any) -> int:
        return int(await connection.fetchval(_QUERIES["clock"], timeout=SILENCE))

    async def _examine(self, connection: Any) -> list[Finding]:
        source, where = self._source, self._address.shown.rpartition(" ")[0]
        found = await connection.fetch(_QUERIES["columns"], self._names["table"], timeout=SILENCE)
        if not found:
            raise SetupError(f"{where}: there is no table {source.table} (names are as the catalog has them)")
        types = dict(map(tuple, found))
        for column, field in source.named.items():
            if column not in types:
                raise SetupError(
                    f"{where}: {source.table} has no column {column!r} ({field}); it has {', '.join(types)}"
                )
        [(view, unique)] = await connection.fetch(
            _QUERIES["kind"], self._names["table"], list(source.ids), timeout=SILENCE
        )
        if view:
            raise SetupError(f"{where}: {source.table} is {VIEW}")
        self._id_types = [types[column] for column in source.ids]
        times = TableTimes(source, types[source.due])
        now = await self._tell_time(connection)
        if self._by_server:
            self._time.warn_of_skew(where)
        self._times = times
        try:
            text, arguments = self._write("explained", now, ())
            async with connection.transaction():
                await connection.execute(_OURS, timeout=SILENCE)
                [[plan]] = await connection.fetch(text, *arguments, timeout=SILENCE)
                for changes in filter(None, (source.changes, source.dead)):
                    text, _ = self._write("change", now, (), changes, ids=[])
                    await connection.prepare(text, timeout=SILENCE)
        except (asyncpg.SyntaxOrAccessError, asyncpg.DataError, asyncpg.InterfaceError) as error:
            self._times = None
            if isinstance(error, asyncpg.InsufficientPrivilegeError):
                raise
            raise SetupError(f"{where}: {source.table}: `where` or `changes` is refused: {error}") from error
        served = not any(
            node["Node Type"] in _UNINDEXED or "Filter" in node for node in _nodes(json.loads(plan)[0]["Plan"])
        )
        what = f"{source.table}: {'an index leads to' if served else 'no index leads to'} the due rows"
        index = _quoted(f"{source.table.rpartition('.')[2]}_by_{source.due}"[:63])
        advice = (
            f"each look reads rows that are not due; run: CREATE INDEX CONCURRENTLY {index} "
            f"ON {self._names['table']} ({self._names['due']}) WHERE {source.where}"
        )
        return [Finding(served, what, "" if served else advice), is_unique(source, unique=unique)]


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
