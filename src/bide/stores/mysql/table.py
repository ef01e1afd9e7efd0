"""A table of somebody's own in MySQL or MariaDB: due rows are locked, changed and handed on in one transaction each.

As in PostgreSQL, but that an index cannot leave rows out: it has to begin with the columns that `where` names. None of
it needs tables of bide's.
"""

from __future__ import annotations

import asyncio
import re
import time as steady
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

from asyncmy.errors import MySQLError

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis, as_datetime
from bide.core.records import NewTask
from bide.core.table_source import STILL_DUE, Sql, TableSource
from bide.ports import Clock, DueRow, Finding, Head, Joined, RowRefused, Taken
from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.connecting import AFRESH, Connection, connect
from bide.stores.mysql.errors import Again, Broken, Lost, NotSent, meaning
from bide.stores.mysql.table_times import TableTimes, literal
from bide.stores.named_queries import read_queries
from bide.stores.server_time import ServerTime, StoreClock

_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
_REFUSES = frozenset({1048, 1062, 1264, 1265, 1292, 1364, 1366, 1406, 1451, 1452, 1644, 1690, 3819, 4025})
"""Numbers of errors that a row's data is to blame for: constraints, ranges, types, a trigger's SIGNAL."""
_WORD = re.compile(r"\w+")
Rows = Sequence[Sequence[Any]]


class MySqlTable:
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is on the same server."""

    def __init__(
        self,
        url: str,
        source: TableSource,
        *,
        connections: int,
        clock: Literal["server", "caller"] = "server",
        using: Callable[[Any], Joined] | None = None,
    ) -> None:
        self._address: Address = address_of(url)
        self._source = source
        self._connections = connections
        self._by_server = clock == "server"
        self._using = using
        self._time = ServerTime()
        self._looking: Connection | None = None
        self._turn = asyncio.Lock()
        self._free: list[Connection] = []
        self._closed = True
        self._times: TableTimes | None = None
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": _quoted(source.id),
            "due": _quoted(source.due),
            "where": source.where.replace("%", "%%"),
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
            "index": "",
            "by_id": "",
        }

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._by_server else None

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        """Nobody can tell here."""
        return None

    @property
    def joins(self) -> bool:
        return self._using is not None

    # --- open and close

    async def open(self) -> list[Finding]:
        self._closed = False
        try:
            async with self._turn:
                with self._ours():
                    return await self._examine(await self._looker())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        looking, self._looking = self._looking, None
        free, self._free = self._free, []
        for connection in (looking, *free):
            if connection is not None:
                await connection.close(within=_SILENCE)

    async def _looker(self) -> Connection:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        if self._looking is None or not self._looking.usable:
            self._looking = await connect(self._address, within=_SILENCE, plain=True)
        return self._looking

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """What goes wrong with a statement of ours, in bide's words."""
        try:
            yield
        except (MySQLError, Broken, OSError, TimeoutError, NotSent, Lost, Again) as error:
            found = meaning(error, self._address.shown)
            if isinstance(found, Lost | NotSent | Again):
                found = StoreUnavailable(str(found))
            raise found from error

    # --- statements

    def _write(self, query: str, now: Millis, skip: Collection[Any], ids: Sequence[Any] = (), limit: int = 0) -> Any:
        """A statement and its arguments."""
        assert self._times is not None
        at = "UTC_TIMESTAMP(6)" if self._by_server else literal(as_datetime(now).replace(tzinfo=None))
        about = int(self._time.seconds() * 1000) if self._by_server else now
        cutoff = self._times.cutoff(at, about)
        arguments: list[Any] = []
        changes = []
        for column, value in self._source.changes.items() if query == "change" else ():
            if isinstance(value, Sql):
                changes.append(f"{_quoted(column)} = {value.written(f'({cutoff})').replace('%', '%%')}")
            else:
                changes.append(f"{_quoted(column)} = %s")
                arguments.append(value)
        arguments += [*ids, *skip]
        text = _QUERIES[query].format(
            **self._names, now=at, cutoff=cutoff, changes=", ".join(changes), limit=limit,
            ids=", ".join(["%s"] * len(ids)),
            skip=f" AND {self._names['id']} NOT IN ({', '.join(['%s'] * len(skip))})" if skip else "",
        )  # fmt: skip
        return text, tuple(arguments)

    async def _ask(self, connection: Connection, text: str, arguments: Sequence[Any] = ()) -> Rows:
        async with asyncio.timeout(_SILENCE), connection.driver.cursor() as cursor:
            await cursor.execute(text, tuple(arguments))
            return await cursor.fetchall() if cursor.description else ()

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        text, arguments = self._write("head_beyond" if beyond else "head", now, skip)
        async with self._turn:
            with self._ours():
                connection = await self._looker()
                sent = steady.monotonic()
                try:
                    [(micros, due)] = await self._ask(connection, text, arguments)
                except BaseException:
                    connection.drop()
                    self._looking = None
                    raise
        if self._by_server:
            self._time.saw(int(micros), sent, steady.monotonic())
        assert self._times is not None
        return Head(None if due is None else self._times.instant_of(due), int(micros) // 1000)

    # --- take

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        async with self.take(now=now, limit=limit, skip=skip) as taken:
            identities = [row.id for row in taken.rows]
            if new_task is not None and identities:
                assert taken.joined is not None
                try:
                    await taken.joined.add([new_task(row) for row in taken.rows], now=now)
                except BadInput as error:
                    raise RowRefused(identities, f"it makes no task: {error}") from error
        return identities

    @asynccontextmanager
    async def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AsyncIterator[Taken]:
        with self._ours():
            connection = await self._connection()
        usable = False
        try:
            with self._ours():
                await connection.ask(f"{AFRESH}; BEGIN")
            try:
                rows = await self._rows(connection, now, limit, skip)
                yield Taken(rows, connection.driver, None if self._using is None else self._using(connection.driver))
            except Exception:
                with self._ours():
                    async with asyncio.timeout(_SILENCE):
                        await connection.ask("ROLLBACK")
                usable = True
                raise
            with self._ours():
                async with asyncio.timeout(_SILENCE):
                    await connection.ask("COMMIT")
            usable = True
        finally:
            if usable and not self._closed and connection.usable and len(self._free) < self._connections:
                self._free.append(connection)
            else:
                connection.drop()  # the server rolls back what is open

    async def _connection(self) -> Connection:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                return connection
        return await connect(self._address, within=_SILENCE, plain=True)

    async def _rows(self, connection: Connection, now: Millis, limit: int, skip: Collection[Any]) -> list[DueRow]:
        """The rows, locked and changed."""
        assert self._times is not None
        with self._ours():
            found = await self._ask(connection, *self._write("take", now, skip, limit=limit))
        names = self._source.loaded
        rows = [DueRow(row[0], self._times.instant_of(row[1]), dict(zip(names, row[2:], strict=True))) for row in found]
        if not rows:
            return []
        ids = [row.id for row in rows]
        with self._ours():
            try:
                await self._ask(connection, *self._write("change", now, (), ids))
            except MySQLError as error:
                if error.args and error.args[0] in _REFUSES:
                    raise RowRefused(ids, f"the database refuses the changes: {error}") from error
                raise
            still = [identity for (identity,) in await self._ask(connection, *self._write("still_due", now, (), ids))]
        if still:
            raise RowRefused(still, STILL_DUE)
        return rows

    # --- look whether it is there

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
        self._times = TableTimes(source, types[source.due.lower()])

        async def ask() -> int:
            [(micros,)] = await self._ask(connection, _QUERIES["clock"])
            return int(micros)

        now = await self._time.look(ask) // 1000
        if self._by_server:
            self._time.warn_of_skew(where)
        conditions = {word.lower() for word in _WORD.findall(source.where)} & set(types)
        indexes: dict[str, list[str]] = {}
        for index, column in await self._ask(connection, _QUERIES["indexes"], (schema or None, table)):
            indexes.setdefault(index, []).append(str(column).lower())
        serving = next((index for index, columns in indexes.items() if self._serves(columns, conditions)), None)
        if serving is not None:
            self._names["index"] = f" FORCE INDEX ({_quoted(serving)})"
        by_id = next((index for index, columns in indexes.items() if columns[0] == source.id.lower()), None)
        if by_id is not None:
            self._names["by_id"] = f" FORCE INDEX ({_quoted(by_id)})"
        try:
            for query in ("head_beyond", "change"):
                text, arguments = self._write(query, now, (), [0] if query == "change" else ())
                await self._ask(connection, f"EXPLAIN {text}", arguments)
        except MySQLError as error:
            raise SetupError(f"{where}: {source.table}: `where` or `changes` is refused: {error}") from error
        what = f"{source.table}: {'an index leads' if serving else 'no index leads'} to the due rows"
        columns = ", ".join(_quoted(column) for column in (*sorted(conditions - {source.due.lower()}), source.due))
        advice = (
            f"each look reads rows that are not due; run: CREATE INDEX {_quoted(f'{table}_by_{source.due}'[:64])} "
            f"ON {self._names['table']} ({columns})"
        )
        return [Finding(serving is not None, what, "" if serving else advice)]

    def _serves(self, columns: Sequence[str], conditions: Collection[str]) -> bool:
        """Whether an index leads to the rows of `where` in the order of their times."""
        due = self._source.due.lower()
        before = columns[: columns.index(due)] if due in columns else None
        return before is not None and set(before) <= set(conditions) and (bool(before) or not set(conditions) - {due})


def _quoted(name: str) -> str:
    return "`" + name.replace("%", "%%") + "`"
