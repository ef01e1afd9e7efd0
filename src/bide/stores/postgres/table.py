"""A table of somebody's own in PostgreSQL: its due rows are locked, changed and handed on in one transaction each.

One connection looks, and has the planner's settings of our own statements; the handlers have others, with the
database's settings, where ours hold only while the rows are taken. None of it needs tables of bide's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time as steady
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import asyncpg

from bide.core.errors import BadInput, SetupError, StoreUnavailable
from bide.core.instants import Millis, as_datetime
from bide.core.records import NewTask
from bide.core.table_source import STILL_DUE, Sql, TableSource
from bide.ports import Clock, DueRow, Finding, Head, Joined, RowRefused, Taken
from bide.stores.named_queries import read_queries
from bide.stores.postgres.address import Address, address_of
from bide.stores.postgres.connecting import PLANNER, connect
from bide.stores.postgres.errors import Again, Lost, NotSent, meaning
from bide.stores.postgres.table_times import TableTimes
from bide.stores.server_time import ServerTime, StoreClock

_log = logging.getLogger("bide.table")
_QUERIES = read_queries((Path(__file__).parent / "table.sql").read_text("utf-8"))
_SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
_OURS = "".join(f"SET LOCAL {name} = {value};" for name, value in PLANNER.items())
_THEIRS = "".join(f"SET LOCAL {name} TO DEFAULT;" for name in PLANNER)
_ALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""A machine that is gone without a word holds its rows for three quarters of a minute."""
_REFUSES = ("22", "23", "44", "P0", *"6789IJKLMNOQRSTUVWYZ")
"""How the code of an error begins that a row's data is to blame for; those of one letter are a trigger's own."""
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


class PostgresTable:
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is in the same database."""

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
        self._looking: Any = None
        self._turn = asyncio.Lock()
        self._free: list[Any] = []
        self._closed = True
        self._heard: Callable[[], None] | None = None
        self._times: TableTimes | None = None
        self._id_type = ""
        self._names = {
            "table": ".".join(_quoted(part) for part in source.table.split(".")),
            "id": _quoted(source.id),
            "due": _quoted(source.due),
            "where": source.where,
            "columns": "".join(f", {_quoted(column)}" for column in source.loaded),
        }

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._by_server else None

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        if self._source.channel is None or self._address.pooled:
            return None
        self._heard = heard

        def end() -> None:
            self._heard = None

        return end

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
            await self._let_go(connection)

    async def _let_go(self, connection: Any) -> None:
        if connection is not None and not connection.is_closed():
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                await connection.close(timeout=_SILENCE)

    async def _looker(self) -> Any:
        """The connection that looks; a new one if the last broke, and then it listens anew."""
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        if self._looking is None or self._looking.is_closed():
            connection = await connect(self._address, within=_SILENCE, session=PLANNER)
            if self._source.channel is not None and not self._address.pooled:
                await connection.add_listener(self._source.channel, self._told)
            self._looking = connection
        return self._looking

    def _told(self, connection: Any, pid: int, channel: str, text: str) -> None:
        if self._heard is not None:
            self._heard()

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """What goes wrong with a statement of ours, in bide's words."""
        try:
            yield
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, NotSent) as error:
            found = meaning(error, self._address.shown)
            if isinstance(found, Lost | NotSent | Again):
                found = StoreUnavailable(str(found))
            raise found from error

    # --- statements

    def _now(self, statement: _Statement, now: Millis) -> str:
        return "statement_timestamp()" if self._by_server else statement.given(as_datetime(now), "timestamptz")

    def _about(self, now: Millis) -> Millis:
        return int(self._time.seconds() * 1000) if self._by_server else now

    def _write(self, query: str, now: Millis, skip: Collection[Any], **more: Any) -> tuple[str, Sequence[Any]]:
        """A statement and its arguments."""
        assert self._times is not None
        statement = _Statement()
        at = self._now(statement, now)
        template = _QUERIES[query]
        cutoff = self._times.cutoff(at, self._about(now), statement.given) if "{cutoff}" in template else ""
        parts: dict[str, str] = {**self._names, "now": at, "cutoff": cutoff, "skip": ""}
        if skip:
            parts["skip"] = f" AND {self._names['id']} <> ALL ({statement.given(list(skip), f'{self._id_type}[]')})"
        if "limit" in more:
            parts["limit"] = statement.given(more["limit"], "bigint")
        if "ids" in more:
            parts["ids"] = statement.given(list(more["ids"]), f"{self._id_type}[]")
            written = self._times.written(at, cutoff)
            parts["changes"] = ", ".join(
                f"{_quoted(column)} = " + (value.written(written) if isinstance(value, Sql) else statement.plain(value))
                for column, value in self._source.changes.items()
            )
        return template.format(**parts), statement.arguments

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        text, arguments = self._write("head_beyond" if beyond else "head", now, skip)
        async with self._turn:
            with self._ours():
                connection = await self._looker()
                sent = steady.monotonic()
                try:
                    if self._address.pooled:
                        async with connection.transaction():
                            await connection.execute(_OURS, timeout=_SILENCE)
                            [row] = await connection.fetch(text, *arguments, timeout=_SILENCE)
                    else:
                        [row] = await connection.fetch(text, *arguments, timeout=_SILENCE)
                except BaseException:
                    connection.terminate()
                    raise
        if self._by_server and not self._address.pooled:
            self._time.saw(row["micros"], sent, steady.monotonic())
        assert self._times is not None
        due = None if row["due"] is None else self._times.instant_of(row["due"])
        return Head(due, row["micros"] // 1000)

    # --- take

    @property
    def joins(self) -> bool:
        return self._using is not None

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
            transaction = connection.transaction(isolation="read_committed")
            with self._ours():
                await transaction.start()
            try:
                rows = await self._rows(connection, now, limit, skip)
                yield Taken(rows, connection, None if self._using is None else self._using(connection))
                if not connection.is_in_transaction():
                    raise SetupError("the handler ended the transaction of its row; leave that to the end of it")
            except BaseException:
                with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                    async with asyncio.timeout(_SILENCE):
                        await transaction.rollback()
                        usable = True
                raise
            with self._ours(), _refusing([row.id for row in rows]):
                async with asyncio.timeout(_SILENCE):
                    await transaction.commit()
            usable = True
        finally:
            if usable and not self._closed and not connection.is_closed() and len(self._free) < self._connections:
                self._free.append(connection)
            elif usable:
                await self._let_go(connection)
            else:
                connection.terminate()

    async def _connection(self) -> Any:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
        return await connect(self._address, within=_SILENCE, session=_ALIVE)

    async def _rows(self, connection: Any, now: Millis, limit: int, skip: Collection[Any]) -> list[DueRow]:
        """The rows, locked and changed."""
        assert self._times is not None
        text, arguments = self._write("take", now, skip, limit=limit)
        with self._ours():
            await connection.execute(_OURS, timeout=_SILENCE)
            found = await connection.fetch(text, *arguments, timeout=_SILENCE)
        if not found:
            return []
        names = self._source.loaded
        rows = [
            DueRow(row[0], self._times.instant_of(row[1]), dict(zip(names, tuple(row)[2:], strict=True)))
            for row in found
        ]
        identities = [row.id for row in rows]
        text, arguments = self._write("change", now, (), ids=identities)
        with self._ours():
            with _refusing(identities):
                changed: Mapping[Any, bool] = dict(await connection.fetch(text, *arguments, timeout=_SILENCE))
            await connection.execute(_THEIRS, timeout=_SILENCE)
        refused = [identity for identity, still in changed.items() if still]
        if refused:
            raise RowRefused(refused, STILL_DUE)
        return [row for row in rows if row.id in changed]

    # --- look whether it is there

    async def _examine(self, connection: Any) -> list[Finding]:
        source, where = self._source, self._address.shown.rpartition(" ")[0]
        found = await connection.fetch(_QUERIES["columns"], self._names["table"], timeout=_SILENCE)
        if not found:
            raise SetupError(f"{where}: there is no table {source.table} (names are as the catalog has them)")
        types = {name: (plain, full) for name, plain, full in found}
        for column, field in source.named.items():
            if column not in types:
                raise SetupError(
                    f"{where}: {source.table} has no column {column!r} ({field}); it has {', '.join(types)}"
                )
        self._id_type = types[source.id][0]
        self._times = TableTimes(source, types[source.due][0])

        async def ask() -> int:
            return int(await connection.fetchval(_QUERIES["clock"], timeout=_SILENCE))

        now = await self._time.look(ask) // 1000
        if self._by_server:
            self._time.warn_of_skew(where)
        try:
            text, arguments = self._write("explained", now, ())
            async with connection.transaction():
                await connection.execute(_OURS, timeout=_SILENCE)
                [[plan]] = await connection.fetch(text, *arguments, timeout=_SILENCE)
                text, _ = self._write("change", now, (), ids=[])
                await connection.prepare(text, timeout=_SILENCE)
        except (asyncpg.SyntaxOrAccessError, asyncpg.DataError, asyncpg.InterfaceError) as error:
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
        return [Finding(served, what, "" if served else advice)]


@contextmanager
def _refusing(identities: Sequence[Any]) -> Iterator[None]:
    """What the database has against the rows themselves."""
    try:
        yield
    except asyncpg.PostgresError as error:
        if identities and str(error.sqlstate).startswith(_REFUSES):
            raise RowRefused(identities, f"the database refuses the changes: {error}") from error
        raise


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
