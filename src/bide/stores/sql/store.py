"""What the stores on database servers have in common: how they open, how a batch becomes calls, and what only reads.

Each has modules of its own for its statements, and they are called alike; what one server needs and another does not is
in the stores themselves.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar
from uuid import uuid4

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, Lease, NewTask, Page, Record, Ref, Settlement, Tally, Topic
from bide.core.table_source import TableSource
from bide.ports import COUNTED, Clock, Joined, Table
from bide.stores.batches import Conflicts, slices
from bide.stores.driver_adapters import borrowed
from bide.stores.server_time import ServerTime, StoreClock
from bide.stores.sql import event_log
from bide.stores.sql.background import Background
from bide.stores.sql.joined import CallersVerbs, Joins, Reading
from bide.stores.sql.locked_rows import Ask, LockedRows, together
from bide.stores.sql.reading import Reads, find
from bide.stores.sql.schema import SqlSchema
from bide.stores.sql.transactions import OwnTransactions

EVENTS_KEPT = 10_000
LONGEST_PATIENCE = 45.0
_AT_FIRST = 3.0
"""Seconds that opening waits for a server that cannot be reached."""
_SHORT = 0.2
"""Seconds that extending waits for what somebody has locked: the leases of all the others are next."""
LANES = ("add", "change", "settle", "lease", "extend", "held", "read", "keep", "whole")
"""The kinds of calls: each has a connection of its own, opened when first used."""
T = TypeVar("T")


class ServerOpened(ABC):
    """What an open store has, and what it knows of the server. Belongs to one event loop."""

    lanes: Any
    """By the kind of call."""
    held: LockedRows
    joined_queries: Mapping[str, Any]
    """The statements in a transaction of the caller's."""
    joins: Joins
    transactions: OwnTransactions

    def __init__(self, log: logging.Logger) -> None:
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        self.aside = Background(log)
        self.conflicts = Conflicts()
        self.loop = asyncio.get_running_loop()
        self.identity: object = None

    @abstractmethod
    async def look(self, address: Any = None) -> None:
        """Which server this is; with an address also whether its schema is the one that this code works with."""

    @abstractmethod
    async def _micros(self, call: Any) -> int:
        """What time it is there, in microseconds."""

    @abstractmethod
    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        """What `ask` answers on that lane, and RowLocked for each that somebody keeps locked."""

    @abstractmethod
    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """What was committed in this process, or seen there, and wakes then."""

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis) -> list[str]:
        """What a transaction of the caller's sends with these wakes."""
        return []

    async def reserve(self, now: Millis, most: int) -> int:
        """The first of so many tokens, where the caller's clock counts and a call does not take them itself."""
        return 0

    def tried_again(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        """`answers` with a future in the place of each that says RowLocked."""
        return self.held.answers(asked, answers, ask, patience=patience)

    async def look_at_the_clock(self) -> None:
        await self.time.look(lambda: self.lanes["read"].read(self._micros))

    async def is_this(self, identity: object) -> bool:
        """Whether a connection to `identity` is to this server; looked up anew, for it may be another by now."""
        if identity != self.identity:
            await self.here(self.look())
        return identity == self.identity

    async def here(self, work: Coroutine[Any, Any, T]) -> T:
        """On our own loop, also for a synchronous verb, which is in a thread of its own."""
        try:
            running: object = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            return await work
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def close(self) -> None:
        await self.aside.close()
        await self.held.close()
        await self.transactions.close()
        for lane in self.lanes.values():
            await lane.close()


class Operations(Protocol):
    """A store's module that writes."""

    async def extend(self, lane: Any, leases: Sequence[Lease], now: Millis | None, lasts: Millis) -> list[Any]: ...


Opened = TypeVar("Opened", bound=ServerOpened)


class ServerStore(ABC, Generic[Opened]):
    """All of a store but what is done with its server alone: leasing, purging, listening, examining."""

    _operations: Operations
    _reading: Reading
    _reads: ClassVar[type[Reads]]
    _schema: SqlSchema
    _tables: ClassVar[Callable[..., Sequence[Table]]]
    _address_of: ClassVar[Callable[[str], Any]]
    _at_once: ClassVar[int]
    """Tasks in one statement."""
    _transactions: ClassVar[type[OwnTransactions]]
    _callers: ClassVar[type[CallersVerbs]]
    """The verbs on a connection of the caller's."""

    def __init__(
        self,
        url: str,
        *,
        clock: Literal["server", "caller"] = "server",
        patience: float = 10.0,
        silence: float = 10.0,
        events_kept: int = EVENTS_KEPT,
    ) -> None:
        self._address: Any = type(self)._address_of(url)
        self._url = url
        if clock not in ("server", "caller"):
            raise BadInput("clock", clock, '"server" or "caller"')
        if not 0 < patience <= LONGEST_PATIENCE:
            raise BadInput("patience", patience, f"seconds above 0, at most {LONGEST_PATIENCE}")
        self._clock: Literal["server", "caller"] = clock
        self._by_server = clock == "server"
        self._patience = patience
        self._silence = silence
        self._events_kept = events_kept
        self._opened: Opened | None = None
        self._changing = asyncio.Lock()
        """Serializes `open` and `close`: two concurrent opens would each connect, and nobody would close the first."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address.shown})"

    # --- the server's part

    @abstractmethod
    def _made(self, patience: float) -> Opened:
        """What an open store has, nothing of it connected yet."""

    @abstractmethod
    async def _told(self, opened: Opened, operation: Any, now: Millis, lane: Any, part: Sequence[Any]) -> list[Any]:
        """An operation on one part of a batch; what it makes wake earlier is told of once it is done."""

    async def _ready(self, now: Millis) -> Opened:
        """Before the first call that goes by `now`."""
        return self._open()

    # --- open and close

    async def open(self) -> None:
        """Connect and look at the schema. Raises StoreUnavailable, StoreMismatch (then run `bide migrate`)."""
        async with self._changing:
            if self._opened is None:
                self._opened = await self._connect()

    async def _connect(self) -> Opened:
        opened = self._made(min(_AT_FIRST, self._patience))
        opened.joins = Joins(
            self._address.shown,
            opened.joined_queries,
            now=self._now,
            about=self._about,
            identity=opened.is_this,
            messages=opened.messages,
            reserve=opened.reserve,
        )
        opened.transactions = self._transactions(self._address, opened, silence=self._silence)
        try:
            await opened.look(self._address)
            await opened.look_at_the_clock()
        except BaseException:
            await opened.close()
            raise
        for lane in opened.lanes.values():
            lane.patience = self._patience
        if self._by_server:
            opened.time.warn_of_skew(self._address.shown)
        return opened

    async def close(self) -> None:
        async with self._changing:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.close()

    def _open(self) -> Opened:
        if self._opened is None:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        return self._opened

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
        """Those that somebody has locked are not waited for long: PartlyFailed says which, and they are asked again."""
        opened = await self._ready(now) if leases else self._open()

        async def extend(lane: Any, part: Sequence[Lease]) -> list[Any]:
            return await self._operations.extend(lane, part, self._now(now), until - now)

        answers: list[Any] = []
        for part in slices(leases, self._at_once):
            answers += await opened.past("extend", part, extend)
        return await together(opened.tried_again(leases, answers, extend, patience=_SHORT))

    # --- AnswersApart

    @abstractmethod
    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]: ...
    @abstractmethod
    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]: ...
    @abstractmethod
    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]: ...

    async def _write(
        self, kind: str, operation: Any, asked: Sequence[Any], parts: Sequence[Sequence[Any]], now: Millis
    ) -> list[Any]:
        opened = await self._ready(now) if asked else self._open()
        write = partial(self._told, opened, operation, now)
        answers: list[Any] = []
        for part in parts:
            try:
                answers += await opened.past(kind, part, write)
            except StoreError as error:
                answers += error.answers if isinstance(error, PartlyFailed) else [error] * len(part)
                if len(answers) == len(asked) and not any(answer is not error for answer in answers):
                    raise
                rest = StoreUnavailable(f"not tried, after another part of the batch had failed: {error}")
                raise PartlyFailed([*answers, *([rest] * (len(asked) - len(answers)))]) from error
        return opened.tried_again(asked, answers, write, patience=self._patience)

    # --- look

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        opened = self._open()
        found: list[Record | None] = []
        for part in slices(refs, self._at_once):
            found += await self._reading.get(opened.lanes["read"], part)
        return found

    async def find(self, where: Filter, page: Page) -> Found:
        return await find(self._open().lanes["read"], self._reads, where, page)

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await self._reading.tally(self._open().lanes["read"], edges, upto, topics)

    # --- JoinsTransaction

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A transaction on the store's server, for tasks and for your own tables (`.connection`, the driver's).

        Committed on leaving without an error, else rolled back; at most ten at a time, others wait for their turn.
        Raises StoreUnavailable (nothing of it was done) and OutcomeUnknown.
        """
        return self._open().transactions.transaction()

    def using(self, connection: object) -> Joined:
        """The verbs on your own connection, in the transaction that it is in; you commit. Raises BadInput."""
        lent = borrowed(connection)
        if lent is None:
            raise BadInput("connection", connection, self._callers.accepted)
        return self._callers(self._open().joins, lent)

    # --- Shares

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        return await event_log.announce(self._open().lanes["keep"], holder, topics, until, now)

    # --- KeepsEvents

    async def record(self, events: Sequence[Event]) -> None:
        opened = self._open()
        if events:
            await event_log.record(opened.lanes["keep"], events, self._events_kept)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        return await event_log.events(self._open().lanes["read"], ref, limit, self._events_kept)

    # --- TellsTime

    async def time(self) -> Millis:
        opened = self._open()
        await opened.look_at_the_clock()
        return int(opened.time.seconds() * 1000)

    def clock(self) -> Clock | None:
        return StoreClock(self._open().time) if self._by_server else None

    # --- WatchesTables

    def tables(self, source: TableSource, *, connections: int) -> Sequence[Table]:
        """Tables on the same server, on connections of their own."""
        return self._tables(self._url, source, connections=connections, clock=self._clock, using=self.using)

    # --- HasSchema

    async def schema_version(self) -> tuple[int, int]:
        """What is there (0: nothing), and what this code wants."""
        return await self._schema.versions(self._url)

    async def plan(self) -> list[str] | None:
        """What is missing there, as statements."""
        return await self._schema.plan(self._url)

    async def migrate(self) -> None:
        """Bring the schema to what this code wants; needs the right to create tables."""
        await self._schema.migrate(self._url)
