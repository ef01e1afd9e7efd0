"""The state of an open store: a connection for each kind of call, and its knowledge of the server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import slices
from bide.stores.listeners import Listeners
from bide.stores.server_time import ServerTime
from bide.stores.sql.dialect import Dialect
from bide.stores.sql.joined import JoinedVerbs, Known
from bide.stores.sql.leasing import Leasing
from bide.stores.sql.locked_rows import Ask, LockedRows
from bide.stores.sql.reading import ServerReads
from bide.stores.sql.transactions import OwnTransactions

KINDS = ("add", "change", "settle", "lease", "extend", "held", "read", "keep", "whole")
"""The kinds of calls: each has a connection of its own, opened when first used."""
T = TypeVar("T")
Operation = Callable[..., Awaitable[Any]]


class Operations(NamedTuple):
    """The operations of one kind of server, each on a connection of the store's."""

    add: Operation
    change: Operation
    settle: Operation
    extend: Operation
    purge: Operation
    """Forget ended tasks; how many it was."""
    forget_callers: Operation
    """Forget callers that nobody has heard of for long, those that are named excepted."""


class Runtime(ABC):
    """Made when the store is opened, let go of when it is closed. Belongs to one event loop."""

    dialect: ClassVar[Dialect]
    reads: ClassVar[type[ServerReads]]
    at_once: ClassVar[int]
    """Tasks in one statement."""
    _transactions: ClassVar[type[OwnTransactions]]
    joined: ClassVar[type[JoinedVerbs]]
    """The verbs in a transaction."""
    joined_queries: Mapping[str, Any]
    """The statements in a transaction of the caller's."""
    operations: Operations
    leasing: Leasing

    def __init__(self, address: Any, *, by_server: bool, patience: float, silence: float) -> None:
        self.address = address
        self.where: str = address.shown
        self.by_server = by_server
        """True if its clock is the server's, and not the caller's."""
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        self.listeners = Listeners(self.dialect.log)
        self.loop = asyncio.get_running_loop()
        self.identity: object = None
        self.known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
        """The state of each caller's connection."""
        options = {"patience": patience, "silence": silence, "time": self.time if by_server else None}
        self.connections = {
            kind: self._connection(f"{self.name}:{kind}", passes=kind == "held", **options) for kind in KINDS
        }
        self.held = LockedRows(self.connections["held"], self.where)
        self.transactions = self._transactions(self, silence=silence)

    def now(self, now: Millis) -> Millis | None:
        """The time that a statement is told: none where it is to look at the server's clock."""
        return None if self.by_server else now

    def about(self, now: Millis) -> Millis:
        """The time there, as far as it is known without asking."""
        return int(self.time.seconds() * 1000) if self.by_server else now

    async def look_at_the_clock(self) -> None:
        await self.time.look(lambda: self.connections["read"].read(self._micros))

    async def is_this(self, identity: object) -> bool:
        """Tell whether a connection to `identity` is to this server; looked up anew, for it may be another by now."""
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
        await self.leasing.close()
        await self.held.close()
        await self.transactions.close()
        for connection in self.connections.values():
            await connection.close()

    # --- what a dialect may do otherwise

    @property
    def polls(self) -> bool:
        """True if workers have to poll, since they may not be notified of what other processes schedule."""
        return True

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        """Notify of earlier wakes, of this process's writing at least."""
        return self.listeners.listen(topics, heard)

    async def ready(self, now: Millis) -> None:  # noqa: B027 - most need nothing
        """Before the first call that goes by `now`."""

    def parts(self, kind: str, asked: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """A batch in parts for one statement each."""
        return slices(asked, self.at_once)

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis, *, joined: bool = False) -> list[str]:
        """The messages that a call sends with these wakes, within its transaction; `joined`: in one of the caller's."""
        return []

    def unsaid(self, wakes: Mapping[Topic, Millis]) -> None:  # noqa: B027 - most send no messages
        """Take back what these messages were to tell: the call came to nothing."""

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """Tell of tasks that were committed in this process, or seen there, and wake then."""
        self.leasing.told(wakes)
        for topic, wake in wakes.items():
            self.listeners.tell(topic, wake)

    async def reserve(self, now: Millis, most: int) -> int:
        """The first of so many tokens, where the caller's clock counts and a call does not take them itself."""
        return 0

    def tried_again(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        """`answers` with a future in the place of each that says RowLocked."""
        return self.held.answers(asked, answers, ask, patience=patience)

    # --- the server's part

    @abstractmethod
    def _connection(self, name: str, **options: Any) -> Any:
        """A JournaledConnection, not made yet."""

    @abstractmethod
    async def look(self, *, check: bool = False) -> None:
        """Which server this is. `check`: also whether its schema is the one that this code works with."""

    @abstractmethod
    async def _micros(self, call: Any) -> int:
        """The time there, in microseconds."""

    @abstractmethod
    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        """The answers of `ask` on that connection, and RowLocked for each that somebody keeps locked."""

    @abstractmethod
    async def diagnose(self) -> list[Finding]: ...
