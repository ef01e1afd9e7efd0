"""A watched table in PostgreSQL.

The polling connection uses our planner settings, and listens. The handlers' connections keep the database's settings;
ours apply there only while the rows are taken.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import asyncpg

from bide.core.errors import SetupError
from bide.core.instants import Millis, as_datetime
from bide.core.table_source import TableSource
from bide.ports import DueRow
from bide.stores.naive_times import Stretch
from bide.stores.named_queries import queries_beside
from bide.stores.postgres.connection import PLANNER, POSTGRES, Address, connect, meaning
from bide.stores.sql.server_table import ECHO, SILENCE, ServerTable, TableConnections
from bide.stores.sql.watched_table import Give, Plan, Rows, TableTimes

_ALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""The rows of a vanished machine are released after three quarters of a minute."""


class PostgresTableConnections(TableConnections):
    dialect = POSTGRES

    def __init__(self, address: Address, source: TableSource, most: int) -> None:
        super().__init__(address, source, most)
        self.listeners: set[Callable[[], None]] = set()
        """Called at each notification, and when the listening connection ends."""
        self._channel = None if address.pooled else source.channel
        self._listening: asyncio.Task[None] | None = None

    async def _connect(self, *, polling: bool) -> Any:
        connection = await connect(self.address, within=SILENCE, session=PLANNER if polling else _ALIVE)
        if polling and self._channel is not None:
            await connection.add_listener(self._channel, self._notify)
            connection.add_termination_listener(self._notify)
            if self._listening is None:
                self._listening = asyncio.get_running_loop().create_task(self._listen_on(), name="bide echo")
        return connection

    async def _begin(self, connection: Any) -> None:
        await connection.begin()

    async def close(self, user: object) -> None:
        if self._listening is not None and self._users <= {user}:
            self._listening.cancel()
            self._listening = None
        await super().close(user)

    def _notify(self, *_: Any) -> None:
        for notify in tuple(self.listeners):
            notify()

    async def _listen_on(self) -> None:
        """Test the connection regularly. When it ends `_notify` is called, and the next poll opens a new one."""
        while True:
            await asyncio.sleep(ECHO)
            async with self.turn:
                await self._echo(self._polling)


_OURS = "".join(f"SET LOCAL {name} = {value};" for name, value in PLANNER.items())
_THEIRS = "".join(f"SET LOCAL {name} TO DEFAULT;" for name in PLANNER)
_UNINDEXED = frozenset({"Seq Scan", "Sort", "Bitmap Heap Scan"})


class PostgresTimes(TableTimes):
    zoned, naive = "timestamp with time zone", "timestamp without time zone"
    whole, fractions = ("smallint", "integer", "bigint"), ("numeric", "double precision")
    coarse, finer, called = "real", "double precision or bigint", "timestamps"

    def __init__(self, source: TableSource, kind: str) -> None:
        super().__init__(source, kind)
        self.shown = '"' + source.due.replace('"', '""') + '"'
        """The column, limited to the years that the driver can read: 1 to 9999."""
        if kind in (self.zoned, self.naive):
            self.shown = f"least(greatest({self.shown}, '0001-01-03'), '9999-12-29')"

    def _length(self, millis: Millis) -> str:
        return f"interval '{millis} milliseconds'"

    def _number(self, now: str, factor: str, *, whole: bool) -> str:
        passed = f"extract(epoch FROM {now}){factor}"
        return f"floor({passed})::{self._kind}" if whole else f"({passed})::{self._kind}"

    def _in_zone(self, now: str, held: Stretch, give: Give) -> str:
        until = give(as_datetime(held.until), "timestamptz")
        offset, least = give(held.offset, "interval"), give(held.least, "timestamp")
        return f"least((least({now}, {until}) AT TIME ZONE 'UTC') + {offset}, {least})"


class PostgresTable(ServerTable):
    _kind = PostgresTableConnections
    _times_of = PostgresTimes
    _queries = queries_beside(__file__, "watched_table.sql")
    _clock = "statement_timestamp()"
    _refusals = (asyncpg.PostgresError,)
    _altered = ("42P01", "42703", "42883", "42804", "3F000")
    _outdated = (asyncpg.InvalidCachedStatementError, asyncpg.DataError)
    _refused = (asyncpg.SyntaxOrAccessError, asyncpg.DataError, asyncpg.InterfaceError)

    _id_types: Sequence[str]
    _unique = False

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        if self._source.channel is None or self._address.pooled:
            return None
        self._connections.listeners.add(on_change)
        return lambda: self._connections.listeners.discard(on_change)

    @staticmethod
    def _code(error: BaseException) -> str | int | None:
        return getattr(error, "sqlstate", None)

    @property
    def _where(self) -> str:
        return str(self._address.shown.rpartition(" ")[0])

    # --- statements

    def _give(self, values: list[Any], value: Any, kind: str = "") -> str:
        values.append(value)
        return f"${len(values)}" + (f"::{kind}" if kind else "")

    def _one_of(self, ids: Collection[Any], give: Give, *, out: bool = False) -> str:
        kinds = self._id_types
        if len(kinds) == 1 and not out:
            return f"{self._id} = ANY ({give(list(ids), f'{kinds[0]}[]')})"
        rows = [(identity,) for identity in ids] if len(kinds) == 1 else ids
        columns = ([row[place] for row in rows] for place in range(len(kinds)))
        arrays = (give(column, f"{kind}[]") for column, kind in zip(columns, kinds, strict=True))
        # a subquery is hashed once, however many rows it names
        return f"{self._id} {'NOT ' if out else ''}IN (SELECT * FROM unnest({', '.join(arrays)}))"

    async def _ask(self, connection: Any, text: str, values: Sequence[Any] = ()) -> Rows:
        return list(map(tuple, await connection.fetch(text, *values, timeout=SILENCE)))

    async def _poll(self, connection: Any, text: str, values: Sequence[Any]) -> Rows:
        if not self._pollers.address.pooled:
            return await self._ask(connection, text, values)
        async with connection.transaction():
            await connection.execute(_OURS, timeout=SILENCE)
            return await self._ask(connection, text, values)

    def _answered(self, error: BaseException) -> bool:
        return isinstance(error, asyncpg.PostgresError)

    # --- take

    async def _lock(self, connection: Any, now: Millis, limit: int, skip: Collection[Any], dead: Any) -> Rows:
        await connection.execute(_OURS, timeout=SILENCE)
        return await super()._lock(connection, now, limit, skip, dead)

    async def _change(
        self, connection: Any, now: Millis, ids: Sequence[Any], changes: Mapping[str, Any] | None
    ) -> Sequence[tuple[Any, bool]]:
        changed = await super()._change(connection, now, ids, changes)
        await connection.execute(_THEIRS, timeout=SILENCE)
        return changed

    async def _commit(self, connection: Any, rows: Sequence[DueRow]) -> None:
        if not connection.is_in_transaction():
            raise SetupError("the handler ended the transaction of its row; bide ends it after the handler")
        with self._refusing(rows):
            await connection.begun.commit()

    # --- examine

    async def _types(self, connection: Any) -> Mapping[str, str]:
        found = await self._ask(connection, self._queries["columns"], (self._names["table"],))
        return {row[0]: row[1] for row in found}

    async def _is_view(self, connection: Any) -> bool:
        asked = (self._names["table"], list(self._source.ids))
        [(view, self._unique)] = await self._ask(connection, self._queries["kind"], asked)
        return bool(view)

    async def _plan(self, connection: Any, now: Millis, types: Mapping[str, str]) -> Plan:
        source = self._source
        self._id_types = [types[column] for column in source.ids]
        self._names["shown"] = self._known.shown
        try:
            async with connection.transaction():
                await connection.execute(_OURS, timeout=SILENCE)
                [[plan]] = await self._ask(connection, *self._write("explained", now))
                for changes in filter(None, (source.changes, source.dead)):
                    await connection.prepare(self._write("change", now, changes=changes)[0], timeout=SILENCE)
        except asyncpg.InsufficientPrivilegeError as error:
            raise meaning(error, self._address.shown) from error
        nodes = _nodes(json.loads(plan)[0]["Plan"])
        served = not any(node["Node Type"] in _UNINDEXED or "Filter" in node for node in nodes)
        index = self._quoted(f"{source.table.rpartition('.')[2]}_by_{source.due}"[:63])
        making = (
            f"CREATE INDEX CONCURRENTLY {index} ON {self._names['table']} ({self._names['due']}) WHERE {source.where}"
        )
        return Plan(served, self._unique, making)


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)
