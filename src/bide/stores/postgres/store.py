"""The PostgreSQL store: one row per task, in the same database as your own tables.

**The cost**: scheduling, leasing and plain Done are one statement and one round trip per batch. A call that has to read
a task first (moving, cancelling, a conflict, Retry) is one transaction of four round trips. A client has two
connections, a worker four, and handlers that open transactions up to ten more; see docs/sql.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bide.core.instants import Millis
from bide.core.payloads import AT_ONCE
from bide.core.records import Leased, Topic
from bide.ports import Finding, Listening, OnTaken, OnWake
from bide.stores.batches import Conflicts, drained
from bide.stores.postgres import operations
from bide.stores.postgres.connection import POSTGRES, Address, Call, PostgresConnection
from bide.stores.postgres.joined import SAMPLES, PostgresVerbs, Transactions
from bide.stores.postgres.leasing import PostgresLeasing
from bide.stores.postgres.operations import PostgresReads
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.schema import SCHEMA, diagnose
from bide.stores.postgres.wakes import Subscription, WakeMessages
from bide.stores.postgres.watched_table import PostgresTable
from bide.stores.sql.store import Runtime, SqlStore


class PostgresRuntime(Runtime):
    """The state of an open PostgreSQL store. `cap`: how far ahead a wake may be for a notification to be sent."""

    dialect = POSTGRES
    operations = operations
    reads = PostgresReads
    at_once = AT_ONCE
    _connects = PostgresConnection
    _transactions = Transactions
    joined = PostgresVerbs

    def __init__(self, address: Address, *, cap: Millis, silence: float, **options: Any) -> None:
        super().__init__(address, silence=silence, **options)
        self.joined_queries = queries_of(address.schema, address.prefix, joined=True)
        self._wake_messages = WakeMessages(cap)
        self.leasing = PostgresLeasing(self)
        self.own = {"add": {"conflicts": Conflicts()}}
        self.purge = operations.Purging(used=self.by_server).purge
        channel = Names(address.schema, address.prefix).channel
        self.notifications = Subscription(self, channel, patience=silence)
        self._raised: Millis = -1
        """With the caller's clock: the time to which the counter of tokens is known to have been raised."""

    async def raise_clock(self, now: Millis) -> None:
        """Raise the counter of tokens to the caller's clock."""
        if now > self._raised:
            await self.connections["read"].read(lambda call: call.fetch("raise_tokens", now * 1000))
            self._raised = max(now, self._raised)

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        return await self.notifications.listen(topics, on_wake, on_taken)

    async def close(self) -> None:
        await self.notifications.close()
        await super().close()

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis, *, joined: bool = False) -> list[str]:
        return self._wake_messages.messages(wakes, about, joined=joined)

    def withdraw(self, wakes: Mapping[Topic, Millis]) -> None:
        self._wake_messages.forget(wakes)

    def send_taken(self, wants: Mapping[Topic, int], leased: Leased, holder: str) -> None:
        self.notifications.send_taken(drained(wants, leased), holder)

    async def identify(self, *, check: bool = False) -> None:
        async def work(call: Call) -> None:
            await call.begin()
            if check:
                await SCHEMA.check(call.connection, self.address)
            [(database, started, *_)] = await call.fetch("identity", *SAMPLES)
            await call.commit()
            self.identity = database, started

        await self.connections["read"].read(work)

    async def diagnose(self) -> list[Finding]:
        works = await self.notifications.works()
        findings: list[Finding] = await self.connections["read"].read(
            lambda call: diagnose(call, self.address, self.notifications, works=works)
        )
        return findings


class PostgresStore(SqlStore):
    """Tasks in PostgreSQL, at `url` (see `postgres.connection` for its form). `bide migrate` creates the tables.

    `clock`: by default the server's clock, independent of this machine's; "caller" uses the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call keeps trying while the server is away.
    `silence`: seconds that one statement may take. `cap`: how far ahead a wake may be for a notification to be sent;
    the longest time that any worker sleeps.
    """

    _runtime = PostgresRuntime
    _schema = SCHEMA
    _tables = PostgresTable.each

    def __init__(self, url: str, *, cap: Millis = 60_000, **options: Any) -> None:
        super().__init__(url, cap=cap, **options)
