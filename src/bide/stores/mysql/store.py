"""The store on MySQL and MariaDB: one row per task, beside your own tables.

**The cost**: scheduling and plain Done are one packet and one round trip per batch; leasing two, and one that only
reads when nothing is due; whatever has to look at a task first (moving, cancelling, a conflict, Retry) is one
transaction of two. A process has a connection for each kind of call, opened when first used.

Nothing in MySQL tells others of a commit, so while somebody listens an `ear` looks five times a second, for all in this
process. Workers sleep exactly until what they have seen, or have heard of from it or from their own process.
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
from bide.stores.borrowed import borrowed
from bide.stores.held import together
from bide.stores.mysql import adding, diagnosis, journal, keeping, leasing, operations, reading, schema
from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.ear import POLL
from bide.stores.mysql.joined import ACCEPTED, CallersConnection, JoinedVerbs, Joins
from bide.stores.mysql.lane import Call, Lane
from bide.stores.mysql.opened import Opened
from bide.stores.mysql.past import go_past
from bide.stores.mysql.queries import queries_of
from bide.stores.mysql.sizes import AT_ONCE, WITH_ERRORS, slices, slices_of_new, too_large
from bide.stores.mysql.table import MySqlTable
from bide.stores.mysql.transactions import Transactions
from bide.stores.server_time import StoreClock

EVENTS_KEPT = 10_000
_AT_FIRST = 3.0
"""Seconds that opening waits for a server that cannot be reached."""
LONGEST_PATIENCE = 45.0
_SHORT = 0.2
"""Seconds that extending waits beside for what somebody has locked: the leases of all the others are next."""


class MySqlStore:
    """Tasks in MySQL or MariaDB, at `url`; see `address` for what that may say. `schema.migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one packet may take.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Literal["server", "caller"] = "server",
        patience: float = 10.0,
        silence: float = 10.0,
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
        self._events_kept = events_kept
        self._opened: Opened | None = None

    def __repr__(self) -> str:
        return f"MySqlStore({self._address.shown})"

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
        )
        opened.joins = Joins(
            self._address.shown,
            self._address.schema,
            queries_of(self._address.schema, self._address.prefix),
            now=self._now,
            about=self._about,
            reserve=opened.reserve,
            identity=opened.is_this,
        )
        opened.transactions = Transactions(
            self._address, opened.name, opened.joins, opened.lanes["keep"], opened.tell,
            leased=opened.leased, silence=self._silence,
        )  # fmt: skip
        try:

            async def look(call: Call) -> None:
                await schema.check(call.connection, self._address)

            await opened.lanes["read"].read(look)
            await opened.look()
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
            [[(micros,)]] = await call.send(call.write("time", there=call.there))
            return int(micros)

        await opened.time.look(lambda: opened.lanes["read"].read(ask))

    def _now(self, now: Millis) -> Millis | None:
        """What a statement is told: nothing where it is to look at the server's clock."""
        return None if self._by_server else now

    def _about(self, now: Millis) -> Millis:
        """What time it is there, as far as is known without asking."""
        return int(self._open().time.seconds() * 1000) if self._by_server else now

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await together(await self.add_apart(tasks, now=now))

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await together(await self.change_apart(changes, now=now))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await together(await self.settle_apart(outcomes, now=now))

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        opened = self._open()

        async def extend(lane: Lane, part: Sequence[Lease]) -> list[bool]:
            return await operations.extend(lane, part, self._now(now), until - now)

        answers: list[Any] = []
        for part in slices(leases):
            answers += await go_past(opened.lanes["extend"], opened.lanes["held"], part, extend, known=opened.locked)
        return await together(opened.tried_again(leases, answers, extend, patience=_SHORT))

    # --- AnswersApart

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]:
        opened = self._open()
        largest = opened.lanes["read"].largest
        problems = too_large(tasks, largest)
        if not problems:
            return await self._add(opened, tasks, now)
        if len(problems) == len(tasks):
            raise problems[0]
        fine = [place for place in range(len(tasks)) if place not in problems]
        added: Sequence[object]
        try:
            added = await together(await self._add(opened, [tasks[place] for place in fine], now))
        except PartlyFailed as error:
            added = error.answers
        except StoreError as error:
            added = [error] * len(fine)
        answers: list[Any] = [problems.get(place) for place in range(len(tasks))]
        for place, answer in zip(fine, added, strict=True):
            answers[place] = answer
        raise PartlyFailed(answers)

    async def _add(self, opened: Opened, tasks: Sequence[NewTask], now: Millis) -> list[Any]:
        async def operation(
            lane: Lane, part: Sequence[NewTask], now: Millis | None, about: Millis, tell: operations.Tell
        ) -> list[Answer]:
            return await adding.add(lane, part, now, about, tell, opened.conflicts)

        parts = slices_of_new(tasks, opened.lanes["read"].largest)
        return await self._write("add", operation, tasks, parts, now)

    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]:
        return await self._write("change", operations.change, changes, slices(changes, WITH_ERRORS), now)

    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]:
        operation = partial(operations.settle, leased=self._open().leased)
        at_once = WITH_ERRORS if any(one.error for one in outcomes) else AT_ONCE
        return await self._write("settle", operation, outcomes, slices(outcomes, at_once), now)

    async def _write(
        self, kind: str, operation: Any, asked: Sequence[Any], parts: Sequence[Sequence[Any]], now: Millis
    ) -> list[Any]:
        opened = self._open()

        async def write(lane: Lane, part: Sequence[Any]) -> list[Any]:
            told: dict[Topic, Millis] = {}
            done: list[Any] = await operation(lane, part, self._now(now), self._about(now), told.update)
            if told:
                opened.tell(told)
            return done

        answers: list[Any] = []
        for part in parts:
            try:
                answers += await go_past(opened.lanes[kind], opened.lanes["held"], part, write, known=opened.locked)
            except StoreError as error:
                answers += [error] * len(part)
                if len(answers) == len(asked) and not any(answer is not error for answer in answers):
                    raise
                rest = StoreUnavailable(f"not tried, after another part of the batch had failed: {error}")
                raise PartlyFailed([*answers, *([rest] * (len(asked) - len(answers)))]) from error
        return opened.tried_again(asked, answers, write, patience=self._patience)

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
        opened = self._open()
        sent = opened.loop.time()
        leased = await leasing.lease(
            opened.lanes["lease"], opened.floors, opened.depths, opened.expected, wants, self._now(now),
            self._about(now), until - now, holder, opened.leased,
        )  # fmt: skip
        opened.ear.looked(wants, sent)
        if self._by_server and not opened.ear.hears_of(wants):  # nobody tells of what other processes schedule
            return Leased(leased.tasks, leased.next_wake, leased.now, leased.now + POLL)
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        opened = self._open()
        lane = opened.lanes["keep"]
        purged = await keeping.purge(lane, self._now(now), limit)
        await keeping.forget_callers(lane, [lane.name for lane in opened.lanes.values()])
        return purged

    # --- JoinsTransaction

    def transaction(self) -> AbstractAsyncContextManager[JoinedVerbs]:
        """A transaction on the store's server, for tasks and for your own tables (`.connection`, asyncmy's).

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
        return self._open().ear.listen(topics, heard)

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

    def tables(self, source: TableSource, *, connections: int) -> Sequence[MySqlTable]:
        """Tables on the same server, on connections of their own."""
        clock: Literal["server", "caller"] = "server" if self._by_server else "caller"
        return MySqlTable.each(self._url, source, connections=connections, clock=clock, using=self.using)

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
        return await diagnosis.diagnose(opened.lanes["keep"], self._address, opened.time)
