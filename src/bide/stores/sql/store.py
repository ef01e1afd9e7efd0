"""The store on a SQL server: the verbs that all servers share, and the state of an open store.

A `Runtime` holds the connections, one for the calls that may wait for each other, and the known facts about the server.
Each kind of server has a subclass of it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import Change, Filter, Found, Lease, Leased, NewTask, Page, Record, Ref, Settlement, Tally, Topic
from bide.core.table_source import TableSource
from bide.ports import COUNTED, Features, Finding, Joined, Listening, OnTaken, OnWake, Pending, Table, all_answers
from bide.stores.batches import gathered, merge_earliest
from bide.stores.driver_adapters import connection_source
from bide.stores.listeners import Listeners
from bide.stores.server import ServerStore, ServerTime, WhichClock
from bide.stores.sql.dialect import Dialect
from bide.stores.sql.journaled_connection import Ask, LockedRows, RowLocked, is_among
from bide.stores.sql.leasing import POLL, Leasing
from bide.stores.sql.operations import event_of, insert_events
from bide.stores.sql.reading import ServerReads, find, in_snapshot, tally_all
from bide.stores.sql.schema import SqlSchema
from bide.stores.sql.transactions import ConnectionState, JoinedVerbs, OwnTransactions

CONNECTIONS = ("write", "settle", "lease", "read", "held", "scan")
"""The connections of a store, each opened when first used; "held" is for locked tasks, "scan" for full scans."""
CONNECTION_OF = {"add": "write", "change": "write", "settle": "settle", "extend": "settle", "held": "held"}
"""By kind of call."""
T = TypeVar("T")


class Runtime(ABC):
    """The state of an open store: created by `open`, discarded by `close`. Belongs to one event loop."""

    dialect: ClassVar[Dialect]
    reads: ClassVar[type[ServerReads]]
    at_once: ClassVar[int]
    """Tasks in one statement."""
    _connects: ClassVar[Callable[..., Any]]
    _transactions: ClassVar[type[OwnTransactions]]
    joined: ClassVar[type[JoinedVerbs]]
    """The verbs in a transaction."""
    joined_queries: Mapping[str, Any]
    """The statements for a caller's transaction."""
    operations: ModuleType
    """The operations of one kind of server: `add`, `change`, `settle` and `extend`, each on a connection.

    And `forget_callers`, which deletes the rows of long inactive callers, except the named ones.
    """
    own: Mapping[str, Mapping[str, Any]]
    """Further arguments of an operation on the store's own connections: what the store has learned."""
    purge: Callable[[Any, Millis | None, int], Awaitable[int]]
    """Deletes ended tasks; returns their number."""
    leasing: Leasing
    others = False
    """True if there were several live workers when the last one of this process announced itself."""
    look_every: Millis | None = POLL
    """How often workers have to look at each topic; None: notifications of all other processes' tasks arrive."""

    def __init__(self, address: Any, *, by_server: bool, patience: float, silence: float) -> None:
        self.address = address
        self.where: str = address.shown
        self.by_server = by_server
        """True if the store uses the server's clock, not the caller's."""
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        self.listeners = Listeners(self.dialect.log)
        self.loop = asyncio.get_running_loop()
        self.identity: object = None
        self.connection_states: WeakKeyDictionary[Any, ConnectionState] = WeakKeyDictionary()
        """The state of each caller's connection."""
        options = {"patience": patience, "silence": silence, "time": self.time if by_server else None}
        self.connections = {
            name: self._connects(f"{self.name}:{name}", address, passes=name == "held", **options)
            for name in CONNECTIONS
        }
        self.held = LockedRows(partial(self.past, "held"), self.where)
        self.transactions = self._transactions(self, silence=silence)

    def now(self, now: Millis) -> Millis | None:
        """The time to pass to a statement; None if the statement reads the server's clock."""
        return None if self.by_server else now

    def about(self, now: Millis) -> Millis:
        """The server's time, as far as it is known without a query."""
        return int(self.time.seconds() * 1000) if self.by_server else now

    async def read_clock(self) -> int:
        async def work(call: Any) -> int:
            [(micros,)] = await call.ask("time")
            return int(micros)

        return await self.time.read(lambda: self.connections["read"].read(work))

    async def is_this(self, identity: object) -> bool:
        """Tell whether `identity` is this server's. On a mismatch, read this server's identity again: it may be new."""
        if identity != self.identity:
            await self.here(self.identify())
        return identity == self.identity

    async def here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on our own loop, even for a synchronous verb, which runs in another thread."""
        try:
            running: object = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            return await work
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def close(self) -> None:
        await self.leasing.close()
        await self.held.close()
        await self.transactions.close()
        for connection in self.connections.values():
            await connection.close()

    # --- what a dialect may do otherwise

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        """Notify of earlier wakes, at least of those that this process writes."""
        return self.listeners.listen(topics, on_wake, on_taken)

    async def raise_clock(self, now: Millis) -> None:  # noqa: B027 - most need nothing
        """Prepare for calls that use `now`, if the store uses the caller's clock."""

    def parts(self, kind: str, asked: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Split a batch into parts for one statement each."""
        return slices(asked, self.at_once)

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis, *, joined: bool = False) -> list[str]:
        """The messages that a call sends for these wakes in its transaction. `joined`: it has joined a transaction."""
        return []

    def withdraw(self, wakes: Mapping[Topic, Millis]) -> None:  # noqa: B027 - most send no messages
        """Forget these messages as sent, since the call failed."""

    def send_taken(self, wants: Mapping[Topic, int], leased: Leased, holder: str) -> None:  # noqa: B027 - most send none
        """Notify the other workers of what `holder` took."""

    def notify(self, wakes: Mapping[Topic, Millis]) -> None:
        """Notify the workers of this process of committed tasks: its own, and those in another's notifications."""
        self.leasing.note_wakes(wakes)
        for topic, wake in wakes.items():
            self.listeners.notify(topic, wake)

    async def reserve(self, now: Millis, most: int) -> int:
        """Reserve `most` tokens and return the first, if the caller's clock is used and a call cannot take its own."""
        return 0

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        """The answers of `ask` on the connection of `kind`, with RowLocked for each task that is locked elsewhere."""
        try:
            return await ask(self.connections[CONNECTION_OF[kind]], part)
        except RowLocked as error:  # a schema change locks the whole table
            return [error] * len(part)

    # --- the server's part

    @abstractmethod
    async def identify(self, *, check: bool = False) -> None:
        """Read the server's identity. `check`: also check that its schema fits this code."""

    @abstractmethod
    async def diagnose(self) -> list[Finding]: ...


# --- the store

_AT_FIRST = 3.0
"""Seconds that `open` waits for an unreachable server."""
_SHORT = 0.2
"""Seconds that `extend` waits for locked tasks: the next round of extensions is due soon."""


class SqlStore(ServerStore[Runtime]):
    """The whole store interface, on the connections of a Runtime."""

    _runtime: ClassVar[type[Runtime]]
    _schema: ClassVar[SqlSchema]
    _tables: ClassVar[Callable[..., Sequence[Table]]]

    def __init__(
        self,
        url: str,
        *,
        clock: WhichClock = "server",
        patience: float = 10.0,
        silence: float = 10.0,
        events_kept: int = 10_000,
        **own: Any,
    ) -> None:
        """`own`: options of the server's Runtime."""
        self._address: Any = self._schema.dialect.address_of(url)
        super().__init__(self._address.shown, clock, patience=patience)
        self._url = url
        self._patience = patience
        self._options = {"by_server": self._by_server, "silence": silence, **own}
        self._events_kept = events_kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown})"

    @property
    def features(self) -> Features:
        return Features(
            wakes=self, workers=self, transactions=self, events=self, clock=self, schema=self, diagnosis=self,
            tables=self,
        )  # fmt: skip

    async def _connect(self) -> Runtime:
        """Connect and check the schema. Raises StoreUnavailable, StoreMismatch (then run `bide migrate`)."""
        runtime = self._runtime(self._address, patience=min(_AT_FIRST, self._patience), **self._options)
        try:
            await runtime.identify(check=True)
            await runtime.read_clock()
        except BaseException:
            await runtime.close()
            raise
        for connection in runtime.connections.values():
            connection.patience = self._patience
        if runtime.by_server:
            runtime.time.warn_of_skew(self._shown)
        return runtime

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self._write("add", tasks, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self._write("change", changes, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        return await self._write("settle", outcomes, now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        """Extend leases; wait for locked tasks only briefly. PartlyFailed names those; the next round extends them."""
        return await all_answers(await self._write("extend", leases, now, lasts=until - now, patience=_SHORT))

    async def _write(
        self, kind: str, asked: Sequence[Any], now: Millis, *, patience: float | None = None, **more: Millis
    ) -> list[Any]:
        """Run an operation. `patience`: seconds to wait for locked tasks; `more`: its further arguments."""
        runtime = self._open()
        if asked and not runtime.by_server:
            await runtime.raise_clock(now)
        operation = partial(getattr(runtime.operations, kind), **runtime.own.get(kind, {}), **more)

        async def write(connection: Any, part: Sequence[Any]) -> list[Any]:
            wakes: dict[Topic, Millis] = {}

            def messages_of(some: Mapping[Topic, Millis]) -> list[str]:
                merge_earliest(wakes, some)
                return runtime.messages(some, runtime.about(now)) if some else []

            try:
                times = runtime.now(now), runtime.about(now)
                answers: list[Any] = await operation(connection, part, *times, messages_of)
            except BaseException:
                runtime.withdraw(wakes)
                raise
            if wakes:
                runtime.notify(wakes)
            return answers

        answers: list[Any] = []
        for part in runtime.parts(kind, asked):
            try:
                answers += await runtime.past(kind, part, write)
            except StoreError as error:
                answers += error.answers if isinstance(error, PartlyFailed) else [error] * len(part)
                if len(answers) == len(asked) and not any(answer is not error for answer in answers):
                    raise
                rest = StoreUnavailable(f"not tried, because another part of the batch failed: {error}")
                raise PartlyFailed([*answers, *([rest] * (len(asked) - len(answers)))]) from error
        waited = self._patience if patience is None else patience
        answers = runtime.held.answers(asked, answers, write, patience=waited)
        return gathered(await all_answers(answers)) if is_among(StoreError, answers) else answers

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        runtime = self._open()
        if not runtime.by_server:
            await runtime.raise_clock(now)
        leased = await runtime.leasing.lease(wants, runtime.now(now), runtime.about(now), until - now, holder)
        if leased.tasks and runtime.others:
            runtime.send_taken(wants, leased, holder)
        if runtime.by_server and runtime.look_every is not None:
            return replace(leased, again_by=leased.now + runtime.look_every)
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        runtime = self._open()
        settling = runtime.connections["settle"]
        ours = [connection.name for connection in runtime.connections.values()]

        async def rest(call: Any) -> None:
            await runtime.operations.forget_callers(call, ours)
            await self._trim_events(call)

        purged = await runtime.purge(settling, runtime.now(now), limit)
        await settling.repeat(rest)
        return purged

    # --- reads

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        runtime = self._open()
        found: list[Record | None] = []
        for part in slices(refs, runtime.at_once):
            found += await runtime.connections["read"].read(lambda call, part=part: runtime.reads(call).get(part))
        return found

    async def find(self, where: Filter, page: Page) -> Found:
        runtime = self._open()
        return await find(runtime.connections["read"], runtime.reads, where, page)

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        runtime = self._open()
        spans, read, reads = list(pairwise(edges or ())), runtime.connections["read"], runtime.reads
        return await tally_all(
            lambda after, most: in_snapshot(read, lambda call: reads(call).tally(spans, upto, topics, after, most))
        )

    # --- features.transactions

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A transaction on the store's server, for tasks and your own tables (`.connection` is the driver's).

        It is committed when the block ends without an error, otherwise rolled back. At most ten are open at a time;
        further ones wait. Raises StoreUnavailable (nothing was done) and OutcomeUnknown.
        """
        return self._open().transactions.transaction()

    def using(self, connection: object) -> Joined:
        """The verbs on your own connection, in its current transaction, which you commit. Raises BadInput."""
        source = connection_source(connection)
        if source is None:
            raise BadInput("connection", connection, self._runtime.joined.accepted)
        runtime = self._open()
        return runtime.joined(runtime, source)

    # --- features.wakes, workers, events

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        return await self._open().listen(topics, on_wake, on_taken)

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        """Register that `holder` works on `topics` until then (none: it has stopped); return live workers' topics."""

        async def work(call: Any) -> dict[str, list[Topic]]:
            if topics:
                await call.ask("announce", holder=holder, topics=call.packed(sorted(topics)), until=until)
            else:
                await call.ask("leave", holder=holder)
            rows = await call.ask("workers")
            gone = [name for name, _, end in rows if end <= now]
            if gone:
                await call.ask("forget_workers", holders=call.listed(gone), now=now)
            return {call.text(name): call.unpacked(its) for name, its, end in rows if end > now}

        runtime = self._open()
        alive: dict[str, list[Topic]] = await runtime.connections["settle"].repeat(work)
        runtime.others = len(alive) > 1
        return alive

    async def record(self, events: Sequence[Event]) -> None:
        """Append to the log. Once the log exceeds its maximum by a tenth it is trimmed, so most calls only append."""

        async def work(call: Any) -> None:
            await insert_events(call, events[-self._events_kept :])
            await self._trim_events(call)

        if events:
            await self._open().connections["settle"].repeat(work)

    async def _trim_events(self, call: Any) -> None:
        kept = self._events_kept
        [(first, last)] = await call.ask("event_span")
        if last - first >= kept + kept // 10:
            await call.ask("trim_events", line=int(last) - kept)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The newest events first, at most as many as the log keeps."""
        limit = max(0, min(limit, self._events_kept))
        query, named = ("events", {}) if ref is None else ("events_by_name", {"topic": ref.topic, "key": ref.key})

        async def work(call: Any) -> list[Event]:
            rows, text = await call.ask(query, **named, most=limit), call.text
            return [event_of(text(one) if isinstance(one, bytes) else one for one in row) for row in rows]

        found: list[Event] = await self._open().connections["read"].read(work)
        return found

    # --- features.diagnosis

    async def diagnose(self) -> list[Finding]:
        return await self._open().diagnose()

    # --- features.tables

    def tables(self, source: TableSource, *, connections: int) -> Sequence[Table]:
        """Tables on the same server, with their own connections."""
        return self._tables(self._url, source, connections=connections, clock=self._clock, using=self.using)

    # --- features.schema

    async def schema_version(self) -> tuple[int, int]:
        """The schema version in the database (0: none), and the one that this code needs."""
        return await self._schema.versions(self._url)

    async def plan(self) -> list[str] | None:
        """The statements that the schema still needs."""
        return await self._schema.plan(self._url)

    async def migrate(self) -> None:
        """Upgrade the schema to the version that this code needs. Requires the right to create tables."""
        await self._schema.migrate(self._url)
