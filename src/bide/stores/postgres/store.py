"""The PostgreSQL store: one row per task, beside your own tables.

**The cost**: scheduling, leasing and plain Done are one statement and one round trip per batch; whatever has to look at
a task first (moving, cancelling, a conflict, Retry) is one transaction of four. A process has up to nine connections,
one for each kind of call and one that listens, opened when first used, and up to ten for transactions of handlers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import AT_ONCE
from bide.stores.postgres import adding, diagnosis, leasing, operations, reading
from bide.stores.postgres.address import Address
from bide.stores.postgres.bounds import Asked, Bounds
from bide.stores.postgres.dialect import POSTGRES
from bide.stores.postgres.joined import SAMPLES, CallersConnection, Transactions
from bide.stores.postgres.journaled_connection import Call, PostgresConnection
from bide.stores.postgres.purging import Purging
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.reading import PostgresReads
from bide.stores.postgres.schema import SCHEMA
from bide.stores.postgres.table import PostgresTable
from bide.stores.postgres.wakes import Hearing, Telling
from bide.stores.sql.locked_rows import Ask, RowLocked
from bide.stores.sql.runtime import CallWakes, Runtime
from bide.stores.sql.scan_position import SLACK, ScanFloors
from bide.stores.sql.store import SqlStore

_SLACK: Millis = 100
"""The slack of the floors where wakes are heard: then who committed late has told of it, whatever is looked for."""


class PostgresRuntime(Runtime):
    """`cap`: how far ahead a wake is still told of."""

    dialect = POSTGRES
    adding: ClassVar[ModuleType] = adding
    operations: ClassVar[ModuleType] = operations
    reading: ClassVar[ModuleType] = reading
    reads = PostgresReads
    at_once = AT_ONCE
    _transactions = Transactions

    def __init__(self, address: Address, *, cap: Millis, silence: float, **options: Any) -> None:
        self._queries = queries_of(address.schema, address.prefix)
        super().__init__(address, silence=silence, **options)
        self.joined_queries = queries_of(address.schema, address.prefix, joined=True)
        self.telling = Telling(cap)
        channel = Names(address.schema, address.prefix).channel
        self.hearing = Hearing(address, channel, self.name, self.connections["keep"], patience=silence, told=self._told)
        self.floors = ScanFloors(used=self.by_server, slack=SLACK if address.pooled else _SLACK)
        self.bounds = Bounds(used=self.by_server and not address.pooled, beside=self._look_whole)
        self.purging = Purging(used=self.by_server)
        self._raised: Millis = -1
        """Where the caller's clock counts: up to when the counter of tokens is known to have been raised."""

    def _connection(self, name: str, **options: Any) -> PostgresConnection:
        return PostgresConnection(name, self.address, self._queries, **options)

    async def ready(self, now: Millis) -> None:
        """Where the caller's clock counts, the counter is raised to it before the first call that goes by it."""
        if not self.by_server and now > self._raised:

            async def work(call: Call) -> None:
                await call.fetch("raise_tokens", now * 1000)

            await self.connections["read"].read(work)
            self._raised = max(now, self._raised)

    def _told(self, wakes: Mapping[Topic, Millis]) -> None:
        self.floors.told(wakes)
        self.bounds.told(wakes)

    def _look_whole(self, asked: Asked) -> bool:
        return self.background.run(partial(leasing.look_whole, self.connections["whole"], self.bounds, asked))

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        self.hearing.tell(wakes)

    def wakes_of_call(self, now: Millis) -> CallWakes:
        return _CallWakes(self, now)

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis) -> list[str]:
        return self.telling.within(wakes, about)

    async def look(self, *, check: bool = False) -> None:
        async def work(call: Call) -> None:
            await call.begin()
            if check:
                await SCHEMA.check(call.connection, self.address)
            [(database, started, *_)] = await call.fetch("identity", *SAMPLES)
            await call.commit()
            self.identity = database, started

        await self.connections["read"].read(work)

    async def _micros(self, call: Call) -> int:
        [(micros,)] = await call.fetch("time")
        return int(micros)

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        try:
            return await ask(self.connections[kind], part)
        except RowLocked as error:  # ALTER TABLE or CREATE INDEX locks the whole table
            return [error] * len(part)

    async def lease(self, wants: Mapping[Topic, int], now: Millis, lasts: Millis, holder: str) -> Leased:
        return await leasing.lease(
            self.connections["lease"], self.floors, self.bounds, wants, self.now(now), self.about(now), lasts, holder
        )

    async def purge(self, connection: PostgresConnection, now: Millis | None, limit: int) -> int:
        return await self.purging.purge(connection, now, limit)

    async def forget_callers(self, connection: PostgresConnection, ours: list[str]) -> None:
        async def forget(call: Call) -> None:
            await call.fetch("forget_callers", ours)

        await connection.repeat(forget)

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return await self.hearing.listen(topics, heard)

    def deaf_to(self, topics: Collection[Topic]) -> bool:
        return self.hearing.polls

    async def diagnose(self) -> list[Finding]:
        return await diagnosis.diagnose(self.connections["keep"], self.address, self.hearing, self.time)

    async def close(self) -> None:
        await self.hearing.close()
        await super().close()


class _CallWakes(CallWakes):
    """Has the wakes that are worth a message sent within the call's own transaction."""

    def __call__(self, wakes: Mapping[Topic, Millis]) -> list[str]:
        super().__call__(wakes)
        messages: list[str] = self._runtime.telling.messages(wakes, self._runtime.about(self._now))
        return messages

    def undone(self) -> None:
        self._runtime.telling.forget(self._wakes)


class PostgresStore(SqlStore):
    """Tasks in PostgreSQL, at `url`; see `address` for what that may say. `bide migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one statement may take. `cap`: how far ahead a wake is still told of: the longest that any
    worker sleeps.
    """

    _runtime = PostgresRuntime
    _schema = SCHEMA
    _tables = PostgresTable.each
    _callers = CallersConnection

    def __init__(self, url: str, *, cap: Millis = 60_000, **options: Any) -> None:
        super().__init__(url, own={"cap": cap}, **options)
