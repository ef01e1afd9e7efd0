"""A table of somebody's own: its due rows are locked, changed and handed on in one transaction each.

One connection looks, and the handlers have others. None of it needs tables of bide's.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from bide.core.errors import BadInput, SetupError, StoreError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import NewTask
from bide.core.table_source import UNREADABLE, VIEW, TableSource
from bide.ports import Clock, DueRow, Finding, Head, Joined, Raced, RowRefused, Taken, is_unique
from bide.stores.server_time import ServerTime, StoreClock
from bide.stores.sql.dialect import Again, Lost, NotSent
from bide.stores.sql.table_connections import ECHO, SILENCE, TableConnections
from bide.stores.sql.table_times import TableTimes

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
_MOST_DOUBTED = 100
"""Texts of errors for which a table was examined anew, and found as it was."""


class Plan(NamedTuple):
    """How the server finds the due rows, and tells rows apart."""

    served: bool
    """True if an index leads to them."""
    unique: bool
    making: str
    """The statement that makes such an index."""


class SqlTable(ABC):
    """See `ports.Table`. `using` joins a transaction on the app's store, where that is on the same server."""

    _kind: ClassVar[type[TableConnections]]
    _times_of: ClassVar[type[TableTimes]]
    _queries: ClassVar[Mapping[str, str]]
    _refusals: ClassVar[type[Exception]]
    """The driver's errors that the server reports."""
    _altered: ClassVar[Collection[str | int]]
    """Codes of errors that the table's definition is to blame for: it is not as it was at the last look at that."""
    _outdated: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors after which the table is to be examined anew as well."""
    _refused: ClassVar[tuple[type[Exception], ...]]
    """Errors that the program's own SQL is to blame for."""

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
        self._times: Any = None
        """The TableTimes; None: the table is to be examined, anew maybe."""
        self._names = {
            "table": ".".join(self._quoted(part) for part in source.table.split(".")),
            "id": ", ".join(map(self._quoted, source.ids)),
            "due": self._quoted(source.due),
            "where": source.where,
            "columns": "".join(f", {self._quoted(column)}" for column in source.loaded),
        }

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
        address_of = cls._kind.dialect.address_of
        shared = lookers = cls._kind(address_of(url), source, connections)
        if source.reads is not None:
            try:
                lookers = cls._kind(address_of(source.reads), source, 0)
            except BadInput as error:
                raise BadInput("reads", error.value, f"as for the database itself: {error.accepted}") from None
        return [cls(one, shared, lookers, clock, using) for one in source.each()]

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._by_server else None

    @property
    def joins(self) -> bool:
        return self._using is not None

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        """Nobody can tell here."""
        return None

    # --- the server's part

    @staticmethod
    @abstractmethod
    def _quoted(name: str) -> str: ...
    @staticmethod
    @abstractmethod
    def _code(error: BaseException) -> str | int | None:
        """The server's code of an error."""

    @abstractmethod
    async def _ask(self, connection: Any, text: str, arguments: Sequence[Any] = ()) -> Rows:
        """The rows of a statement."""

    async def _look(self, connection: Any, text: str, arguments: Sequence[Any]) -> Rows:
        """The rows of a statement that only looks."""
        return await self._ask(connection, text, arguments)

    @abstractmethod
    def _write(self, query: str, now: Millis, skip: Collection[Any]) -> tuple[str, Sequence[Any]]:
        """A statement and its arguments."""

    @abstractmethod
    async def _rows(self, connection: Any, now: Millis, limit: int, skip: Collection[Any], dead: Any) -> list[DueRow]:
        """The rows, locked and changed."""

    @abstractmethod
    async def _commit(self, connection: Any, transaction: Any, rows: Sequence[DueRow]) -> None:
        """Raises SetupError where the handler has ended the transaction."""

    @abstractmethod
    async def _undo(self, connection: Any, transaction: Any, error: BaseException) -> bool:
        """Undo what is not committed; whether the connection is of use."""

    @abstractmethod
    async def _types(self, connection: Any) -> Mapping[str, str]:
        """The types of the table's columns; none, if it is not there."""

    @abstractmethod
    async def _is_view(self, connection: Any) -> bool: ...
    @abstractmethod
    async def _plan(self, connection: Any, now: Millis, types: Mapping[str, str]) -> Plan:
        """Try the statements, without carrying them out. Raises the driver's errors, SetupError."""

    def _column(self, name: str) -> str:
        """As the catalog has it."""
        return name

    # --- open

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

    async def _examine(self, connection: Any) -> list[Finding]:
        """See whether the table is there, and is as the source says."""
        source, where = self._source, self._where
        types = await self._types(connection)
        if not types:
            raise SetupError(f"{where}: there is no table {source.table} (names are as the catalog has them)")
        for column, field in source.named.items():
            if self._column(column) not in types:
                there = ", ".join(types)
                raise SetupError(f"{where}: {source.table} has no column {column!r} ({field}); it has {there}")
        if await self._is_view(connection):
            raise SetupError(f"{where}: {source.table} is {VIEW}")
        times = self._times_of(source, types[self._column(source.due)])
        now = await self._tell_time(connection)
        if self._by_server:
            self._time.warn_of_skew(where)
        self._times = times
        try:
            plan = await self._plan(connection, now, types)
        except BaseException as error:
            self._times = None
            if not isinstance(error, self._refused):
                raise
            raise SetupError(f"{where}: {source.table}: `where` or `changes` is refused: {error}") from error
        what = f"{source.table}: {'an index leads' if plan.served else 'no index leads'} to the due rows"
        advice = "" if plan.served else f"each look reads rows that are not due; run: {plan.making}"
        return [Finding(plan.served, what, advice), is_unique(source, unique=plan.unique)]

    @property
    @abstractmethod
    def _where(self) -> str:
        """The server, or the database, in what is said of the table."""

    async def _tell_time(self, connection: Any) -> Millis:
        async def micros() -> int:
            [(micros,)] = await self._ask(connection, self._queries["clock"])
            return int(micros)

        return await self._time.look(micros) // 1000

    async def _where_it_fires(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        async with self._connections.turn:
            with self._ours():
                connection = await self._connections.looker()
                try:
                    return await ask(connection)
                except BaseException:
                    connection.drop()
                    raise

    @property
    def _known(self) -> Any:
        if self._times is None:
            raise Raced("the table is to be examined anew")
        return self._times

    # --- errors

    @contextmanager
    def _ours(self, asked: TableConnections | None = None) -> Iterator[None]:
        """Put the errors of our statements in bide's words."""
        connections = asked or self._connections
        dialect, shown = connections.dialect, connections.address.shown
        try:
            yield
        except (*dialect.away, Lost, Again) as error:
            altered = self._code(error) in self._altered
            if altered or isinstance(error, self._outdated):
                self._times = None
            found = dialect.meaning(error, shown)
            if isinstance(found, Again):
                raise Raced(str(found)) from error
            if altered or not isinstance(found, StoreError):
                found = StoreUnavailable(f"{shown}: {dialect.said(error)}")
            raise found from error

    @contextmanager
    def _refusing(self, rows: Sequence[DueRow]) -> Iterator[None]:
        """Refuse the rows for errors that are their own: not for those that pass, nor for those of the table."""
        try:
            yield
        except self._refusals as error:
            passes = isinstance(self._kind.dialect.meaning(error, ""), Lost | NotSent | Again)
            if not rows or passes or (self._code(error) in self._altered and self._maybe_altered(error)):
                raise
            if type(error) in self._outdated:  # of our arguments: the type of a column may be another now
                self._times = None
            raise RowRefused(rows, f"the database refuses the changes: {error}") from error

    def _maybe_altered(self, error: Exception) -> bool:
        """Tell whether a change failed since the table may have been altered: then it is examined anew.

        If the same comes again after that it was a row's own, such as a trigger of its that names a missing table.
        """
        text = str(error)
        if text in self._doubted:
            return False
        if len(self._doubted) >= _MOST_DOUBTED:
            self._doubted.clear()
        self._doubted.add(text)
        return True

    # --- look

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        # the table was examined, and what is known of the time is fresh, also where a replica is asked
        if self._times is None:
            await self._where_it_fires(self._examine)
        elif self._lookers is not self._connections and time.monotonic() - self._connections.answered > ECHO:
            await self._where_it_fires(self._tell_time)
        async with self._lookers.turn:
            with self._ours(self._lookers):
                connection = await self._lookers.looker()
                try:
                    text, arguments = self._write("head_beyond" if beyond else "head", now, skip)
                    sent = time.monotonic()
                    [(micros, due, *identity)] = await self._look(connection, text, arguments)
                except BaseException as error:
                    if not self._answered(error):
                        connection.drop()
                    raise
        if self._server_s("head"):
            self._time.saw(int(micros), sent, time.monotonic())
        if due is None:
            return Head(None, int(micros) // 1000)
        row = self._row(identity, due)
        return Head(row.due, int(micros) // 1000, row.id)

    def _answered(self, error: BaseException) -> bool:
        """Tell whether the connection is of use after this error."""
        return False

    def _server_s(self, query: str) -> bool:
        """Tell whether this statement goes by the clock of the server that it is for."""
        return self._by_server and (self._lookers is self._connections or not query.startswith("head"))

    def _row(self, identity: Sequence[Any], due: Any, columns: Sequence[Any] | None = None) -> DueRow:
        """Raises RowRefused for one whose time cannot be read."""
        found = self._identity(identity)
        try:
            at = self._known.instant_of(due)
        except ValueError as error:
            raise RowRefused([DueRow(found, 0, {})], f"{UNREADABLE}: {error}") from error
        return DueRow(found, at, {} if columns is None else dict(zip(self._source.loaded, columns, strict=True)))

    def _identity(self, values: Sequence[Any]) -> Any:
        return values[0] if len(self._source.ids) == 1 else tuple(values)

    # --- take

    @asynccontextmanager
    async def _taken(
        self, now: Millis, limit: int, skip: Collection[Any], *, dead: Any = None, lent: bool = False
    ) -> AsyncIterator[Taken]:
        """Rows that are due, or the one whose id is `dead`, changed; `lent` to a handler."""
        async with self._connections.slots:
            with self._ours():
                connection, transaction = await self._connections.begun()
            usable = False
            try:
                try:
                    rows = await self._rows(connection, now, limit, skip, dead)
                    driver = connection.driver
                    yield Taken(rows, driver, None if self._using is None else self._using(driver))
                except BaseException as error:
                    usable = await self._undo(connection, transaction, error)
                    raise
                with self._ours():
                    async with asyncio.timeout(SILENCE):
                        await self._commit(connection, transaction, rows)
                usable = True
            finally:
                if usable:
                    await self._connections.give_back(connection, lent=lent)
                else:
                    connection.drop()  # the server rolls back what is open

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        async with self._taken(now, limit, skip) as taken:
            if new_task is not None and taken.rows:
                assert taken.joined is not None
                try:
                    await taken.joined.add([new_task(row) for row in taken.rows], now=now)
                except BadInput as error:
                    raise RowRefused(taken.rows, f"it makes no task: {error}") from error
        return [row.id for row in taken.rows]

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        async with self._taken(now, 1, (), dead=identity) as taken:
            return bool(taken.rows)

    def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AbstractAsyncContextManager[Taken]:
        return self._taken(now, limit, skip, lent=True)
