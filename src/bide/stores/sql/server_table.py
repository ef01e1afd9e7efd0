"""A watched table on a database server, and its connections.

One connection polls, and others carry the rows' transactions. An idle connection may be half open, after a firewall
has dropped it or the machine has vanished. So the polling connection is tested after idle time, and a reused one gets
a short timeout for its BEGIN. If that fails, all connections that have been idle for longer are dropped too.
Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar

from bide.core.errors import BadInput, StoreError, StoreUnavailable
from bide.core.instants import Millis, as_datetime
from bide.core.records import NewTask
from bide.core.table_source import TableSource
from bide.ports import Clock, DueRow, Finding, Head, Joined, Raced, Taken
from bide.stores.resending import Lost, NotSent
from bide.stores.server import ServerTime, StoreClock
from bide.stores.sql.dialect import TransactionConflict
from bide.stores.sql.transactions import Pool
from bide.stores.sql.watched_table import Give, Rows, TableTimes, WatchedTable

T = TypeVar("T")
SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's statements have no such limit."""
SOON = 3.0
"""Seconds within which a reachable server answers a trivial statement."""
ECHO = 10.0
"""Seconds without an answer after which a connection is tested before use."""
_MOST_DOUBTED = 100
"""The maximum of remembered error texts that led to a new examination of an unchanged table."""


class TableConnections(Pool):
    """The connections that all tables of one source share; open while any of those tables (a `user`) is open."""

    def __init__(self, address: Any, source: TableSource, most: int) -> None:
        super().__init__(address, most)
        self.turn = asyncio.Lock()
        """Held while the polling connection is in use."""
        self.time = ServerTime()
        self._polling: Any = None
        self.answered = 0.0
        """When the polling connection was last used, by the monotonic clock."""
        self._users: set[object] = set()

    @abstractmethod
    async def _connect(self, *, polling: bool) -> Any: ...

    @property
    def _is_open(self) -> bool:
        return bool(self._users)

    def open(self, user: object) -> None:
        self._users.add(user)

    async def close(self, user: object) -> None:
        self._users.discard(user)
        if self._users:
            return
        left = [one for one in (self._polling, *self._take_all()) if one is not None]
        self._polling = None
        await asyncio.gather(*(self._tried(one, one.end(within=SOON), SOON) for one in left), return_exceptions=True)

    async def poller(self) -> Any:
        """The polling connection; a new one if the last one broke."""
        if not self._is_open:
            raise StoreUnavailable(f"{self.address.shown}: not open")
        polling = self._polling
        if polling is not None and polling.usable and time.monotonic() - self.answered > ECHO:
            await self._echo(polling)
        if polling is None or not polling.usable:
            polling = self._polling = await self._connect(polling=True)
        self.answered = time.monotonic()
        return polling

    async def _echo(self, connection: Any) -> None:
        """Test whether the connection answers; if not, it becomes unusable."""
        with suppress(*self.dialect.away):
            await self._tried(connection, connection.ask("SELECT 1"), SOON)

    async def begun(self) -> Any:
        """A connection on which a transaction has just begun."""
        while True:
            kept = self._take()
            connection = await self._connect(polling=False) if kept is None else kept
            try:
                await self._tried(connection, self._begin(connection), SILENCE if kept is None else SOON)
                return connection
            except self.dialect.away:
                if kept is None:
                    raise
                for one in self._take_all():  # idle for longer, so they are dead as well
                    one.drop()


class ServerTable(WatchedTable):
    """See `ports.Table`. `using` joins a transaction to the app's store on the same server (PostgreSQL: database)."""

    _kind: ClassVar[type[TableConnections]]
    _times_of: ClassVar[type[TableTimes]]
    _clock: ClassVar[str]
    """An expression for the server's time."""
    _altered: ClassVar[Collection[str | int]]
    """Error codes that mean that the table's definition has changed since it was last examined."""
    _outdated: ClassVar[tuple[type[Exception], ...]] = ()
    """Other errors after which the table has to be examined again."""

    def __init__(
        self, source: TableSource, connections: Any, pollers: Any, clock: str, using: Callable[[Any], Joined] | None
    ) -> None:
        super().__init__(source)
        self._address = connections.address
        self._connections = connections
        self._pollers: Any = pollers
        """The connections that poll: the same, or those to a replica, whose polls use the primary's time."""
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
        """The tables of a source, which share this number of connections."""
        address_of = cls._kind.dialect.address_of
        shared = pollers = cls._kind(address_of(url), source, connections)
        if source.reads is not None:
            try:
                pollers = cls._kind(address_of(source.reads), source, 0)
            except BadInput as error:
                raise BadInput("reads", error.value, f"as for the database itself: {error.accepted}") from None
        return [cls(one, shared, pollers, clock, using) for one in source.each()]

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._by_server else None

    @property
    def joins(self) -> bool:
        return self._using is not None

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """None: this server sends no notifications."""
        return None

    # --- the server's part

    @staticmethod
    @abstractmethod
    def _code(error: BaseException) -> str | int | None:
        """The server's code of an error."""

    async def _poll(self, connection: Any, text: str, values: Sequence[Any]) -> Rows:
        """The rows of a statement that only reads."""
        return await self._ask(connection, text, values)

    @abstractmethod
    async def _commit(self, connection: Any, rows: Sequence[DueRow]) -> None:
        """Commit. Raises SetupError if the handler has ended the transaction."""

    async def _undo(self, connection: Any, error: BaseException) -> bool:
        """Roll back; return whether the connection is still usable."""
        with suppress(*self._connections.dialect.away):
            async with asyncio.timeout(SOON):
                await connection.rollback()
                return bool(connection.usable)
        return False

    # --- open

    async def open(self) -> list[Finding]:
        self._connections.open(self)
        self._pollers.open(self)
        try:
            return await self._where_it_fires(self._examine)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._connections.close(self)
        await self._pollers.close(self)

    async def _prepare(self, connection: Any, kind: str) -> Millis:
        times = self._times_of(self._source, kind)
        now = await self._read_clock(connection)
        if self._by_server:
            self._time.warn_of_skew(self._where)
        self._times = times
        return now

    async def _read_clock(self, connection: Any) -> Millis:
        async def micros() -> int:
            [(micros,)] = await self._ask(connection, self._queries["clock"])
            return int(micros)

        return await self._time.read(micros) // 1000

    async def _where_it_fires(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        async with self._connections.turn:
            with self._ours():
                connection = await self._connections.poller()
                try:
                    return await ask(connection)
                except BaseException:
                    connection.drop()
                    raise

    # --- statements

    def _compared(self, query: str, now: Millis, give: Give) -> Mapping[str, Callable[[], str]]:
        times = self._known
        about = int(self._time.seconds() * 1000) if self._by_server else now

        @cache
        def at() -> str:
            return self._clock if self._server_s(query) else give(as_datetime(about), times.zoned)

        return {
            "now": at,
            "cutoff": lambda: times.cutoff(at(), about, give),
            "written": lambda: f"({times.shown_at(at(), about, give)})",
        }

    def _server_s(self, query: str) -> bool:
        """Tell whether this statement uses the clock of the server that runs it."""
        return self._by_server and (self._pollers is self._connections or query != "head")

    # --- errors

    @contextmanager
    def _ours(self, asked: TableConnections | None = None) -> Iterator[None]:
        """Raise the errors of our statements as bide's own."""
        connections = asked or self._connections
        dialect, shown = connections.dialect, connections.address.shown
        try:
            yield
        except (*dialect.away, Lost, TransactionConflict) as error:
            altered = self._code(error) in self._altered
            if altered or isinstance(error, self._outdated):
                self._times = None
            found = dialect.meaning(error, shown)
            if isinstance(found, TransactionConflict):
                raise Raced(str(found)) from error
            if altered or not isinstance(found, StoreError):
                found = StoreUnavailable(f"{shown}: {dialect.said(error)}")
            raise found from error

    def _is_of_rows(self, error: Exception) -> bool:
        if isinstance(self._kind.dialect.meaning(error, ""), Lost | NotSent | TransactionConflict):
            return False
        if self._code(error) in self._altered and self._maybe_altered(error):
            return False
        if type(error) in self._outdated:  # our values no longer fit: a column may have changed its type
            self._times = None
        return True

    def _maybe_altered(self, error: Exception) -> bool:
        """Tell whether a change may have failed because the table was altered; the table is then examined again.

        If the same error returns after that, the row caused it: a trigger may name a missing table, for example.
        """
        text = str(error)
        if text in self._doubted:
            return False
        if len(self._doubted) >= _MOST_DOUBTED:
            self._doubted.clear()
        self._doubted.add(text)
        return True

    # --- poll

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        # make sure that the table was examined, and that the known time is fresh, even if a replica is polled
        if self._times is None:
            await self._where_it_fires(self._examine)
        elif self._pollers is not self._connections and time.monotonic() - self._connections.answered > ECHO:
            await self._where_it_fires(self._read_clock)
        async with self._pollers.turn:
            with self._ours(self._pollers):
                connection = await self._pollers.poller()
                try:
                    text, values = self._write("head", now, skip=skip, beyond=beyond)
                    sent = time.monotonic()
                    [(micros, due, *identity)] = await self._poll(connection, text, values)
                except BaseException as error:
                    if not self._answered(error):
                        connection.drop()
                    raise
        if self._server_s("head"):
            self._time.saw(int(micros), sent, time.monotonic())
        if due is None:
            return Head(None, int(micros) // 1000)
        row = self._row((*identity, due))
        return Head(row.due, int(micros) // 1000, row.id)

    def _answered(self, error: BaseException) -> bool:
        """Tell whether the connection is still usable after this error."""
        return False

    # --- take

    @asynccontextmanager
    async def _taken(
        self, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None, lent: bool = False
    ) -> AsyncIterator[Taken]:
        """Take due rows, or the one whose id is `dead`, and change them. `lent`: a handler gets the connection."""
        async with self._connections.slots:
            with self._ours():
                connection = await self._connections.begun()
            usable = False
            try:
                try:
                    rows = await self._take(connection, now, limit, skip, dead)
                    driver = connection.driver
                    yield Taken(rows, driver, None if self._using is None else self._using(driver))
                except BaseException as error:
                    usable = await self._undo(connection, error)
                    raise
                with self._ours():
                    async with asyncio.timeout(SILENCE):
                        await self._commit(connection, rows)
                usable = True
            finally:
                if usable:
                    await self._connections.give_back(connection, reset=lent, within=SOON)
                else:
                    connection.drop()  # the server rolls back an open transaction

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        async with self._taken(now, limit, skip) as taken:
            if new_task is not None and taken.rows:
                assert taken.joined is not None
                await taken.joined.add([new_task(row) for row in taken.rows], now=now)
        return [row.id for row in taken.rows]

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        async with self._taken(now, 1, (), dead=identity) as taken:
            return bool(taken.rows)

    def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AbstractAsyncContextManager[Taken]:
        return self._taken(now, limit, skip, lent=True)
