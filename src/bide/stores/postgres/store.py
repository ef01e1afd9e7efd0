"""The PostgreSQL store: one row per task, beside your own tables.

**The cost**: scheduling, leasing and plain Done are one statement and one round trip per batch; whatever has to look at
a task first (moving, cancelling, a conflict, Retry) is one transaction of four. A process has up to nine connections,
one for each kind of call and one that listens, opened when first used, and up to ten for transactions of handlers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from bide.core.instants import Millis
from bide.core.records import Change, Leased, NewTask, Settlement, Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import AT_ONCE, slices
from bide.stores.postgres import adding, diagnosis, leasing, operations, reading
from bide.stores.postgres.address import Address, address_of
from bide.stores.postgres.joined import CallersConnection
from bide.stores.postgres.journaled_connection import Call, PostgresConnection
from bide.stores.postgres.reading import PostgresReads
from bide.stores.postgres.runtime import Opened, Told
from bide.stores.postgres.schema import SCHEMA
from bide.stores.postgres.table import PostgresTable
from bide.stores.postgres.transactions import Transactions
from bide.stores.postgres.wakes import POLL
from bide.stores.sql.store import EVENTS_KEPT, ServerStore


class PostgresStore(ServerStore[Opened]):
    """Tasks in PostgreSQL, at `url`; see `address` for what that may say. `schema.migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one statement may take. `cap`: how far ahead a wake is still told of: the longest that any
    worker sleeps.
    """

    _operations = operations
    _reading = reading
    _reads = PostgresReads
    _schema = SCHEMA
    _tables = PostgresTable.each
    _address_of = address_of
    _at_once = AT_ONCE
    _transactions = Transactions
    _callers = CallersConnection
    _address: Address

    def __init__(
        self,
        url: str,
        *,
        clock: Literal["server", "caller"] = "server",
        patience: float = 10.0,
        silence: float = 10.0,
        cap: Millis = 60_000,
        events_kept: int = EVENTS_KEPT,
    ) -> None:
        super().__init__(url, clock=clock, patience=patience, silence=silence, events_kept=events_kept)
        self._cap = cap

    def _made(self, patience: float) -> Opened:
        return Opened(self._address, by_server=self._by_server, patience=patience, silence=self._silence, cap=self._cap)

    async def _ready(self, now: Millis) -> Opened:
        """Where the caller's clock counts, the counter is raised to it before the first call that goes by it."""
        opened = self._open()
        if not self._by_server and now > opened.raised:

            async def work(call: Call) -> None:
                await call.fetch("raise_tokens", now * 1000)

            await opened.lanes["read"].read(work)
            opened.raised = max(now, opened.raised)
        return opened

    # --- AnswersApart

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]:
        add = partial(adding.add, conflicts=self._open().conflicts)
        return await self._write("add", add, tasks, slices(tasks), now)

    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]:
        return await self._write("change", operations.change, changes, slices(changes), now)

    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]:
        return await self._write("settle", operations.settle, outcomes, slices(outcomes), now)

    async def _told(
        self, opened: Opened, operation: Any, now: Millis, lane: PostgresConnection, part: Sequence[Any]
    ) -> list[Any]:
        told = Told(opened, lambda: self._about(now))
        try:
            answers: list[Any] = await operation(lane, part, self._now(now), self._about(now), told)
        except BaseException:
            told.undone()
            raise
        told.done()
        return answers

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        opened = await self._ready(now)
        leased = await leasing.lease(
            opened.lanes["lease"],
            opened.floors,
            opened.bounds,
            wants,
            self._now(now),
            self._about(now),
            until - now,
            holder,
        )
        if opened.hearing.polls and self._by_server:
            return Leased(leased.tasks, leased.next_wake, leased.now, leased.now + POLL)
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        opened = self._open()
        ours = [lane.name for lane in opened.lanes.values()]

        async def forget(call: Call) -> None:
            await call.fetch("forget_callers", ours)

        lane = opened.lanes["keep"]
        purged = await opened.purging.purge(lane, self._now(now), limit)
        await lane.repeat(forget)
        return purged

    # --- Notifies

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return await self._open().hearing.listen(topics, heard)

    # --- Diagnoses

    async def diagnose(self) -> list[Finding]:
        opened = self._open()
        return await diagnosis.diagnose(opened.lanes["keep"], self._address, opened.hearing, opened.time)
