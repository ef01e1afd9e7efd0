"""Calls to PostgreSQL, each on the connection for its kind; see `sql.journaled_connection`.

While somebody holds an old snapshot no version of a caller's row can be removed, and whoever looks for the row steps
over all of them: ten thousand after half a minute, a third of a millisecond, twice a call. So after some calls a
connection goes on with another row, of another name, and so has few to step over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bide.core.instants import Millis
from bide.stores.postgres.address import Address
from bide.stores.postgres.dialect import PLANNER, POSTGRES, SESSION, connect
from bide.stores.sql.dialect import Shut
from bide.stores.sql.journaled_connection import JournaledConnection, NumberedCall

CALLS_OF_A_ROW = 256
"""How often a caller's row is updated: another costs a round trip, and each version 0.05 us for each call after it."""
_PATIENCE = {
    # whoever has a row of a batch locked for longer than a verb takes has a transaction open: the batch goes on past it
    "lock_timeout": "30",
}
_SESSION = SESSION | _PATIENCE
_POOLED_SESSION = "".join(f"; SET LOCAL {name} = {value}" for name, value in (PLANNER | _PATIENCE).items())
_SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"
Row = Any
"""A row of the driver's, by position and by name."""


class Call(NumberedCall):
    """One call on its way: statements of `queries.sql` by name, and a transaction around them if it is begun."""

    __slots__ = ("begun",)
    text = name = str
    packed = unpacked = listed = list

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.begun = False

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        """The rows of a named query."""
        if self._of.pooled and not self.begun:  # only within a transaction is it one connection all along
            await self.begin()
            rows = await self.fetch(query, *arguments)
            await self.commit()
            return rows
        self.sent = self.sent or not self.begun
        found: list[Any] = await self.connection.fetch(self.queries[query], *arguments)
        return found

    async def timed(self, query: str, *arguments: Any) -> list[Any]:
        """The same, of a query that says in `micros` what time it is there."""
        sent = time.monotonic()
        rows = await self.fetch(query, *arguments)
        if rows and self._of.time is not None:
            self._of.time.saw(rows[0]["micros"], sent, time.monotonic())
        return rows

    async def numbered(self, query: str, now: Millis | None, *arguments: Any) -> list[Any]:
        """The same, of a query that passes the gate. Raises Shut."""
        rows = await self.timed(query, now, self.caller, self.number, *arguments)
        if not rows:
            raise Shut
        return rows

    async def ask(self, query: str, **values: Any) -> list[Any]:
        return await self.fetch(query, *values.values())

    async def write_and_ask(self, query: str, values: Mapping[str, Any], then: str) -> list[Any]:
        """Write, and then the rows of another query."""
        await self.ask(query, **values)
        return await self.fetch(then)

    def lines(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The values of a query that inserts one row or more."""
        return {str(number): list(column) for number, column in enumerate(zip(*rows, strict=True))}

    async def begin(self, how: str = "") -> None:
        self.begun = True
        await self.connection.execute(f"BEGIN {how}{_POOLED_SESSION if self._of.pooled else ''}")

    async def begin_snapshot(self) -> None:
        """Show one state of the database to what is asked from now on."""
        await self.begin(_SNAPSHOT)

    async def commit(self) -> None:
        self.sent = True
        await self.connection.execute("COMMIT")
        self.begun = False

    def undone(self) -> None:
        super().undone()
        self.begun = False

    async def introduce(self) -> None:
        await self.fetch("new_caller", self.caller)


class PostgresConnection(JournaledConnection[Call]):
    """See `sql.journaled_connection`."""

    def __init__(self, name: str, address: Address, queries: Mapping[str, str], **options: Any) -> None:
        super().__init__(name, address, POSTGRES, **options)
        self.queries = queries
        self.pooled = address.pooled
        self._first_name = name
        self._renew_at = CALLS_OF_A_ROW

    async def _connect(self) -> Any:
        return await connect(self._address, within=self._silence, session=_SESSION)

    def _call(self, connection: Any, limit: asyncio.Timeout) -> Call:
        return Call(self, connection, self.queries, limit)

    async def _prepare(self, call: Call) -> Any:
        """Now and then, go on with another row."""
        if self.number > self._renew_at:
            name = f"{self._first_name}.{self.number}"
            try:
                await call.fetch("renew_caller", self.name, name)
            finally:
                call.sent = False
            self.name, self._renew_at = name, self.number + CALLS_OF_A_ROW
