"""The PostgreSQL store: one row per task, beside your own tables.

**The cost**: scheduling, leasing and plain Done are one statement and one round trip per batch; whatever has to look at
a task first (moving, cancelling, a conflict, Retry) is one transaction of four. A process has up to nine connections,
one for each kind of call and one that listens, opened when first used, and up to ten for transactions of handlers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.core.table_source import TableSource
from bide.ports import COUNTED, Clock, Finding, Heard, Listening
from bide.stores.batches import AT_ONCE, slices
from bide.stores.borrowed import borrowed
from bide.stores.held import Held, together
from bide.stores.postgres import adding, diagnosis, journal, leasing, operations, reading, schema
from bide.stores.postgres.address import Address, address_of
from bide.stores.postgres.joined import ACCEPTED, CallersConnection, JoinedVerbs, Joins
from bide.stores.postgres.lane import Call, Lane
from bide.stores.postgres.opened import Opened, Told
from bide.stores.postgres.queries import queries_of
from bide.stores.postgres.table import PostgresTable
from bide.stores.postgres.transactions import Transactions
from bide.stores.postgres.wakes import POLL
from bide.stores.server_time import StoreClock

EVENTS_KEPT = 10_000
_AT_FIRST = 3.0
"""Seconds that opening waits for a server that cannot be reached."""
LONGEST_PATIENCE = 45.0
_SHORT = 0.2
"""Seconds that extending waits for what somebody has locked: the leases of all the others are next."""


class PostgresStore:
    """Tasks in PostgreSQL, at `url`; see `address` for what that may say. `schema.migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one statement may take. `cap`: how far ahead a wake is still told of: the longest that any
    worker sleeps.
    """

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
        self._address: Address = address_of(url)
        self._url = url
        if clock not in ("server", "caller"):
            raise BadInput("clock", clock, '"server" or "caller"')
        if not 0 < patience <= LONGEST_PATIENCE:
            raise BadInput("patience", patience, f"seconds above 0, at most {LONGEST_PATIENCE}")
        self._by_server = clock == "server"
        self._patience = patience
        self._silence = silence
        self._cap = cap
        self._events_kept = events_kept
        self._opened: Opened | None = None

    def __repr__(self) -> str:
        return f"PostgresStore({self._address.shown})"

    # --- open and close

    async def open(self) -> None:
        """Connect and look at the schema. Raises StoreUnavailable, StoreMismatch (then run `bide migrate`)."""
        if self._opened is not None:
            return
        opened = Opened(
            self._address,
            by_server=self._by_server,
            patience=min(_AT_FIRST, self._patience),
            silence=self._silence,
            cap=self._cap,
        )
        opened.joins = Joins(
            self._address.shown,
            queries_of(self._address.schema, self._address.prefix, joined=True),
            now=self._now,
            about=self._about,
            tell=opened.telling.within,
            identity=opened.is_this,
        )
        opened.transactions = Transactions(
            self._address, opened.name, opened.joins, opened.lanes["keep"], opened.hearing.tell, silence=self._silence
        )
        try:
            await opened.look(self._address)
            await self._look_at_the_clock(opened)
        except BaseException:
            await opened.close()
            raise
        for lane in opened.lanes.values():
            lane.patience = self._patience
        if self._by_server:
            opened.time.warn_of_skew(self._address.shown)
        self._opened = opened

    async def close(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.close()

    def _open(self) -> Opened:
        if self._opened is None:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        return self._opened

    async def _look_at_the_clock(self, opened: Opened) -> None:
        async def ask(call: Call) -> int:
            [(micros,)] = await call.fetch("time")
            return int(micros)

        await opened.time.look(lambda: opened.lanes["read"].read(ask))

    def _now(self, now: Millis) -> Millis | None:
        """What a statement is told: nothing where it is to look at the server's clock."""
        return None if self._by_server else now

    def _about(self, now: Millis) -> Millis:
        """What time it is there, as far as is known without asking."""
        return int(self._open().time.seconds() * 1000) if self._by_server else now

    async def _ready(self, now: Millis) -> Opened:
        """Where the caller's clock counts, the counter is raised to it before the first call that goes by it."""
        opened = self._open()
        if not self._by_server and now > opened.raised:

            async def work(call: Call) -> None:
                await call.fetch("raise_tokens", now * 1000)

            await opened.lanes["read"].read(work)
            opened.raised = max(now, opened.raised)
        return opened

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await together(await self.add_apart(tasks, now=now))

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await together(await self.change_apart(changes, now=now))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await together(await self.settle_apart(outcomes, now=now))

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        """Those that somebody has locked are not waited for long: PartlyFailed says which, and they are asked again."""
        opened = await self._ready(now) if leases else self._open()

        async def extend(lane: Lane, part: Sequence[Lease]) -> list[Any]:
            return await operations.extend(lane, part, self._now(now), until - now)

        answers: list[Any] = []
        for part in slices(leases):
            try:
                answers += await extend(opened.lanes["extend"], part)
            except Held as error:
                answers += [error] * len(part)
        return await together(opened.held.answers(leases, answers, extend, patience=_SHORT))

    # --- AnswersApart

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]:
        add = partial(adding.add, conflicts=self._open().conflicts)
        return await self._write("add", add, tasks, now)

    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]:
        return await self._write("change", operations.change, changes, now)

    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]:
        return await self._write("settle", operations.settle, outcomes, now)

    async def _write(self, kind: str, operation: Any, asked: Sequence[Any], now: Millis) -> list[Any]:
        opened = await self._ready(now) if asked else self._open()

        async def write(lane: Lane, part: Sequence[Any]) -> list[Any]:
            told = Told(opened, lambda: self._about(now))
            try:
                answers: list[Any] = await operation(lane, part, self._now(now), self._about(now), told)
            except BaseException:
                told.undone()
                raise
            told.done()
            return answers

        answers: list[Any] = []
        for part in slices(asked):
            try:
                answers += await write(opened.lanes[kind], part)
            except Held as error:  # the whole table: somebody alters it, or makes an index
                answers += [error] * len(part)
            except StoreError as error:
                answers += error.answers if isinstance(error, PartlyFailed) else [error] * len(part)
                if len(answers) == len(asked) and not any(answer is not error for answer in answers):
                    raise
                rest = StoreUnavailable(f"not tried, after another part of the batch had failed: {error}")
                raise PartlyFailed([*answers, *([rest] * (len(asked) - len(answers)))]) from error
        return opened.held.answers(asked, answers, write, patience=self._patience)

    # --- look

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        opened = self._open()
        found: list[Record | None] = []
        for first in range(0, len(refs), AT_ONCE):
            found += await reading.get(opened.lanes["read"], refs[first : first + AT_ONCE])
        return found

    async def find(self, where: Filter, page: Page) -> Found:
        return await reading.find(self._open().lanes["read"], where, page)

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await reading.tally(self._open().lanes["read"], edges, upto, topics)

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

    # --- JoinsTransaction

    def transaction(self) -> AbstractAsyncContextManager[JoinedVerbs]:
        """A transaction on the store's database, for tasks and for your own tables (`.connection`, asyncpg's).

        Committed on leaving without an error, else rolled back; at most ten at a time, others wait for their turn.
        Raises StoreUnavailable (nothing of it was done) and OutcomeUnknown.
        """
        return self._open().transactions.transaction()

    def using(self, connection: object) -> JoinedVerbs:
        """The verbs on your own connection, in the transaction that it is in; you commit. Raises BadInput."""
        lent = borrowed(connection)
        if lent is None:
            raise BadInput("connection", connection, ACCEPTED)
        return CallersConnection(self._open().joins, lent)

    # --- Notifies

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return await self._open().hearing.listen(topics, heard)

    # --- Shares

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        return await journal.announce(self._open().lanes["keep"], holder, topics, until, now)

    # --- KeepsEvents

    async def record(self, events: Sequence[Event]) -> None:
        opened = self._open()
        if events:
            await journal.record(opened.lanes["keep"], events, self._events_kept)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        return await journal.events(self._open().lanes["read"], ref, limit, self._events_kept)

    # --- TellsTime

    async def time(self) -> Millis:
        opened = self._open()
        await self._look_at_the_clock(opened)
        return int(opened.time.seconds() * 1000)

    def clock(self) -> Clock | None:
        return StoreClock(self._open().time) if self._by_server else None

    # --- WatchesTables

    def tables(self, source: TableSource, *, connections: int) -> Sequence[PostgresTable]:
        """Tables of the same database, on connections of their own."""
        clock: Literal["server", "caller"] = "server" if self._by_server else "caller"
        return PostgresTable.each(self._url, source, connections=connections, clock=clock, using=self.using)

    # --- HasSchema

    async def schema_version(self) -> tuple[int, int]:
        """What is there (0: nothing), and what this code wants."""
        return await schema.versions(self._url)

    async def plan(self) -> list[str] | None:
        """What is missing there, as statements."""
        return await schema.plan(self._url)

    async def migrate(self) -> None:
        """Bring the schema to what this code wants; needs the right to create tables."""
        await schema.migrate(self._url)

    # --- Diagnoses

    async def diagnose(self) -> list[Finding]:
        opened = self._open()
        return await diagnosis.diagnose(opened.lanes["keep"], self._address, opened.hearing, opened.time)
