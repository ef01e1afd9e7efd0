"""What watched tables on database servers have in common: how rows are handed on, and how connections are kept.

One connection looks, and others carry the rows' transactions. One that has been idle may be half open: a firewall has
forgotten it, or the machine is gone. So it is asked for a sign of life, or has little time to begin; and if it is dead,
so are those that have been idle for longer. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, Literal, Self, TypeVar

from bide.core.errors import BadInput, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import NewTask
from bide.core.table_source import TableSource
from bide.ports import Clock, DueRow, Finding, Joined, Raced, RowRefused, Taken
from bide.stores.server_time import ServerTime, StoreClock
from bide.stores.sql.idle import Idle

T = TypeVar("T")
SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
_MOST_DOUBTED = 100
"""Texts of errors for which a table was examined anew, and found as it was."""
SOON = 3.0
"""Seconds within which a server that is there answers what costs it nothing."""
ECHO = 10.0
"""Seconds without an answer after which a connection is asked whether it is there."""


class TableConnections(ABC):
    """Open while a table, a `user`, is: of one source there may be many. At most `most` are kept, a minute each."""

    away: ClassVar[tuple[type[Exception], ...]]
    """What the driver raises for a connection, or a server, that is not there."""

    def __init__(self, address: Any, source: TableSource, most: int) -> None:
        self.address = address
        self._most = most
        self.slots = asyncio.Semaphore(most)
        """Held while a transaction is open."""
        self.turn = asyncio.Lock()
        """Held while the one that looks is used."""
        self.time = ServerTime()
        self._looking: Any = None
        self.answered = 0.0
        """When the one that looks was last used, by the steady clock."""
        self._idle: Idle[Any] = Idle(self.drop)
        self._users: set[object] = set()

    @abstractmethod
    async def _connect(self, *, looking: bool) -> Any: ...
    @abstractmethod
    async def _asked(self, connection: Any) -> None:
        """It answers."""

    @abstractmethod
    async def _begin(self, connection: Any) -> Any:
        """Begin a transaction; what the driver has for it."""

    @abstractmethod
    async def _reset(self, connection: Any) -> None:
        """What a handler has set, become or locked is not the next one's."""

    @abstractmethod
    def _usable(self, connection: Any) -> bool: ...
    @abstractmethod
    def drop(self, connection: Any) -> None:
        """Let go of it at once: the server rolls back what is open."""

    @abstractmethod
    async def _end(self, connection: Any) -> None:
        """Close it in order."""

    def open(self, user: object) -> None:
        self._users.add(user)

    async def close(self, user: object) -> None:
        self._users.discard(user)
        if self._users:
            return
        left = [one for one in (self._looking, *self._idle.take_all()) if one is not None]
        self._looking = None
        await asyncio.gather(*(self._tried(one, self._end(one)) for one in left), return_exceptions=True)

    async def looker(self) -> Any:
        """The connection that looks; a new one if the last broke."""
        if not self._users:
            raise StoreUnavailable(f"{self.address.shown}: not open")
        looking = self._looking
        if looking is not None and self._usable(looking) and time.monotonic() - self.answered > ECHO:
            with suppress(*self.away):
                await self._tried(looking, self._asked(looking))
        if looking is None or not self._usable(looking):
            looking = self._looking = await self._connect(looking=True)
        self.answered = time.monotonic()
        return looking

    async def begun(self) -> tuple[Any, Any]:
        """A connection, and the transaction that has just begun on it."""
        while True:
            if not self._users:
                raise StoreUnavailable(f"{self.address.shown}: not open")
            idle = self._idle.take()
            connection = await self._connect(looking=False) if idle is None else idle
            try:
                within = SILENCE if idle is None else SOON
                return connection, await self._tried(connection, self._begin(connection), within)
            except self.away:
                if idle is None:
                    raise
                self._idle.drop_all()

    async def give_back(self, connection: Any, *, lent: bool) -> None:
        """Keep it for later. `lent`: a handler had it."""
        if lent and self._usable(connection):
            with suppress(*self.away):
                await self._tried(connection, self._reset(connection))
        if not self._users or not self._usable(connection) or len(self._idle) >= self._most:
            self.drop(connection)
            return
        self._idle.keep(connection)

    async def _tried(self, connection: Any, doing: Awaitable[T], within: float | None = None) -> T:
        """Let go of the connection if it cannot be done in time."""
        try:
            async with asyncio.timeout(SOON if within is None else within):
                return await doing
        except BaseException:
            self.drop(connection)
            raise


class ServerTable(ABC):
    """How rows are handed on, by a transaction that takes them."""

    _kind: ClassVar[type[TableConnections]]
    _address_of: ClassVar[Callable[[str], Any]]
    _times: Any
    """None: the table is to be examined, anew maybe."""

    def __init__(
        self, source: TableSource, connections: Any, lookers: Any, clock: str, using: Callable[[Any], Joined] | None
    ) -> None:
        self._address = connections.address
        self._source = source
        self._connections = connections
        self._lookers: Any = lookers
        """The same, or those to a replica, which is asked what is due by the time of the other."""
        self._time: ServerTime = connections.time
        self._by_server = clock == "server"
        self._using = using
        self._doubted: set[str] = set()

    @classmethod
    def each(
        cls,
        url: str,
        source: TableSource,
        *,
        connections: int,
        clock: Literal["server", "caller"] = "server",
        using: Callable[[Any], Joined] | None = None,
    ) -> list[Self]:
        """The tables of a source, which share so many connections."""
        shared = lookers = cls._kind(cls._address_of(url), source, connections)
        if source.reads is not None:
            try:
                lookers = cls._kind(cls._address_of(source.reads), source, 0)
            except BadInput as error:
                raise BadInput("reads", error.value, f"as for the database itself: {error.accepted}") from None
        return [cls(one, shared, lookers, clock, using) for one in source.each()]

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._by_server else None

    async def open(self) -> list[Finding]:
        self._connections.open(self)
        self._lookers.open(self)
        try:
            return await self._where_it_fires(self._examine)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._connections.close(self)
        await self._lookers.close(self)

    @abstractmethod
    def _ours(self, asked: TableConnections | None = None) -> AbstractContextManager[None]:
        """What goes wrong with a statement of ours, in bide's words."""

    @abstractmethod
    async def _examine(self, connection: Any) -> list[Finding]: ...
    @abstractmethod
    async def _micros(self, connection: Any) -> int:
        """What time it is there, in microseconds."""

    async def _tell_time(self, connection: Any) -> Millis:
        return await self._time.look(lambda: self._micros(connection)) // 1000

    async def _where_it_fires(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        async with self._connections.turn:
            with self._ours():
                connection = await self._connections.looker()
                try:
                    return await ask(connection)
                except BaseException:
                    self._connections.drop(connection)
                    raise

    async def _ready_to_look(self) -> None:
        """The table was examined, and what is known of the time is fresh, also where a replica is asked."""
        if self._times is None:
            await self._where_it_fires(self._examine)
        elif self._lookers is not self._connections and time.monotonic() - self._connections.answered > ECHO:
            await self._where_it_fires(self._tell_time)

    @property
    def _known(self) -> Any:
        if self._times is None:
            raise Raced("the table is to be examined anew")
        return self._times

    def _maybe_altered(self, error: Exception) -> bool:
        """Whether a change failed since the table may have been altered: then it is examined anew.

        If the same comes again after that it was a row's own, such as a trigger of its that names a missing table.
        """
        text = str(error)
        if text in self._doubted:
            return False
        if len(self._doubted) >= _MOST_DOUBTED:
            self._doubted.clear()
        self._doubted.add(text)
        return True

    def _server_s(self, query: str) -> bool:
        """Whether this statement goes by the clock of the server that it is for."""
        return self._by_server and (self._lookers is self._connections or not query.startswith("head"))

    @asynccontextmanager
    async def _in_turn(self, *args: Any, **options: Any) -> AsyncIterator[Taken]:
        """`_taken`, once there is a connection for it."""
        async with self._connections.slots, self._taken(*args, **options) as taken:
            yield taken

    @property
    def joins(self) -> bool:
        return self._using is not None

    @abstractmethod
    def _taken(
        self, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None, lent: bool = False
    ) -> AbstractAsyncContextManager[Taken]:
        """Rows that are due, or the one whose id is `dead`, changed; `lent` to a handler."""

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        async with self._in_turn(now, limit, skip) as taken:
            if new_task is not None and taken.rows:
                assert taken.joined is not None
                try:
                    await taken.joined.add([new_task(row) for row in taken.rows], now=now)
                except BadInput as error:
                    raise RowRefused(taken.rows, f"it makes no task: {error}") from error
        return [row.id for row in taken.rows]

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        async with self._in_turn(now, 1, (), dead=identity) as taken:
            return bool(taken.rows)

    def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AbstractAsyncContextManager[Taken]:
        return self._in_turn(now, limit, skip, lent=True)

    def _identity(self, values: Sequence[Any]) -> Any:
        return values[0] if len(self._source.ids) == 1 else tuple(values)
