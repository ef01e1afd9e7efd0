"""The state of an open store: a connection for each kind of call, and its knowledge of the server."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import Conflicts, merge_earliest, slices
from bide.stores.server_time import ServerTime
from bide.stores.sql.dialect import Dialect
from bide.stores.sql.locked_rows import Ask, LockedRows
from bide.stores.sql.reading import Reads
from bide.stores.sql.savepoint import Known
from bide.stores.sql.transactions import OwnTransactions


class Background:
    """Runs one thing at a time. Belongs to one event loop."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Begin `work`, unless something is under way: then False. If the store is away that is said, and no more."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.get_running_loop().create_task(self._run(work), name="bide aside")
        return True

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except StoreError as error:
            self._log.info("a look from the very start came to nothing: %s", error)

    async def close(self) -> None:
        """End the work that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


KINDS = ("add", "change", "settle", "lease", "extend", "held", "read", "keep", "whole")
"""The kinds of calls: each has a connection of its own, opened when first used."""
T = TypeVar("T")


class Runtime(ABC):
    """Made when the store is opened, let go of when it is closed. Belongs to one event loop."""

    dialect: ClassVar[Dialect]
    adding: ClassVar[ModuleType]
    """The module that schedules."""
    operations: ClassVar[ModuleType]
    """The module that changes, settles and extends."""
    reading: ClassVar[ModuleType]
    """The module that reads."""
    reads: ClassVar[type[Reads]]
    at_once: ClassVar[int]
    """Tasks in one statement."""
    _transactions: ClassVar[type[OwnTransactions]]
    joined_queries: Mapping[str, Any]
    """The statements in a transaction of the caller's."""

    def __init__(self, address: Any, *, by_server: bool, patience: float, silence: float) -> None:
        self.address = address
        self.where: str = address.shown
        self.by_server = by_server
        """True if its clock is the server's, and not the caller's."""
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        self.background = Background(self.dialect.log)
        self.conflicts = Conflicts()
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
        await self.background.close()
        await self.held.close()
        await self.transactions.close()
        for connection in self.connections.values():
            await connection.close()

    # --- what a dialect may do otherwise

    async def ready(self, now: Millis) -> None:  # noqa: B027 - most need nothing
        """Before the first call that goes by `now`."""

    def parts(self, kind: str, asked: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """A batch in parts for one statement each."""
        return slices(asked, self.at_once)

    def operation(self, kind: str) -> Callable[..., Any]:
        """The operation that adds, changes or settles a part of a batch."""
        if kind == "add":
            return partial(self.adding.add, conflicts=self.conflicts)
        operation: Callable[..., Any] = getattr(self.operations, kind)
        return operation

    def wakes_of_call(self, now: Millis) -> CallWakes:
        return CallWakes(self, now)

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis) -> list[str]:
        """The messages that a transaction of the caller's sends with these wakes."""
        return []

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
    async def lease(self, wants: Mapping[Topic, int], now: Millis, lasts: Millis, holder: str) -> Leased: ...
    @abstractmethod
    async def purge(self, connection: Any, now: Millis | None, limit: int) -> int:
        """Forget ended tasks; how many it was."""

    @abstractmethod
    async def forget_callers(self, connection: Any, ours: list[str]) -> None:
        """Those that nobody has heard of for long, `ours` excepted."""

    @abstractmethod
    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """Tell of tasks that were committed in this process, or seen there, and wake then."""

    @abstractmethod
    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening: ...
    @abstractmethod
    def deaf_to(self, topics: Collection[Topic]) -> bool:
        """True if nobody tells of other processes' tasks: then whoever works on these topics has to look."""

    @abstractmethod
    async def diagnose(self) -> list[Finding]: ...


class CallWakes:
    """The wakes of one call: which messages go with it, and what to say in this process once it is done."""

    def __init__(self, runtime: Any, now: Millis) -> None:
        self._runtime = runtime
        self._now = now
        self._wakes: dict[Topic, Millis] = {}

    def __call__(self, wakes: Mapping[Topic, Millis]) -> list[str]:
        """Take note of the earliest wakes of a batch; the messages that are worth sending."""
        merge_earliest(self._wakes, wakes)
        return []

    def undone(self) -> None:
        """Take back what was to be told, and was not."""

    def done(self) -> None:
        if self._wakes:
            self._runtime.tell(self._wakes)
