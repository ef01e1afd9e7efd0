"""The verbs in a transaction: the caller's own, or one of ours that a handler's statements join.

Each verb runs the same operation as on the store's own connections, but within a savepoint: it is done completely or
not at all, and the surrounding transaction can go on. The call needs no number: it was done if that transaction was
committed.

Our transactions have a separate pool of connections, without the settings of the store's other connections: a
handler may change any setting and take its time. If the answer to the commit is lost, the outcome is read back. The
transaction's last statement wrote the transaction's number into a row, and the next statement that writes this row
waits until the server has ended the transaction.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, ClassVar, Self, TypeVar

from msgspec import Struct, field

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement, Topic
from bide.stores.batches import merge_earliest
from bide.stores.driver_adapters import ConnectionSource, Driver, on_a_loop, pause
from bide.stores.resending import Lost, NotSent, Resending
from bide.stores.sql.dialect import Dialect, LockTimeout, TransactionConflict, plain
from bide.stores.sql.operations import insert_events
from bide.stores.sql.reading import find

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""An operation on a call."""


class Unjournaled:
    """Replaces the JournaledConnection of a call in a caller's transaction, which has no number and learns no time."""

    name = number = time = None
    pooled = False


class RunsInSavepoint:
    """A call within a savepoint that runs operations itself, as a connection does."""

    __slots__ = ()
    passes = False

    async def run(self, work: Work[T], repeated: object, **_: Any) -> T:
        return await work(self)

    async def commit(self) -> None:
        """Do nothing: the caller commits the transaction."""


class JoinedVerbs(ABC):
    """The verbs on one connection. Each is done completely or not at all; the surrounding transaction stays open.

    The caller opened the connection, or it carries one of our transactions, which must still be open. On a caller's
    connection a verb joins the transaction that is open, or that the driver opens implicitly; without one, each verb
    is a separate transaction.
    """

    accepted: ClassVar[str]
    """The kinds of connections that are accepted, for error messages."""
    _place: ClassVar[str]
    """The required target of a connection, for error messages: a server, or a database on it."""
    _drivers: ClassVar[tuple[type[Driver], ...]]
    _at_once: ClassVar[int]
    """Tasks in one statement."""
    _calls: ClassVar[Callable[..., Any]]
    """Makes the call of a verb, from the driver, the statements, and `floor` (see `_savepoint`)."""

    def __init__(self, runtime: Any, source: ConnectionSource, *, own: bool = False) -> None:
        """`runtime`: the open store's. `own`: the transaction is ours."""
        self._runtime = runtime
        self._source = source
        self._own = own
        self.over = False
        """True once that transaction has ended."""
        self.wakes: dict[Topic, Millis] = {}
        """The wakes that this transaction makes earlier. Workers are notified of them after the commit."""

    @property
    def connection(self) -> Any:
        """The connection, for statements of your own."""
        return self._source.given

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._write("add", tasks, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write("change", changes, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write("settle", outcomes, now)

    async def record(self, events: Sequence[Event]) -> None:
        """Append to the event log; a purge trims it, since a trim here would lock lines until the commit."""
        await self._savepoint(lambda call: insert_events(call, events))

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        async def work(call: Any) -> list[Record | None]:
            reads = self._runtime.reads(call)
            return [one for part in slices(refs, self._at_once) for one in await reads.get(part)]

        return await self.read(work) if refs else []

    async def find(self, where: Filter, page: Page) -> Found:
        return await find(self, self._runtime.reads, where, page)

    async def _write(self, kind: str, asked: Sequence[Any], now: Millis) -> list[Any]:
        if not asked:
            return []
        runtime = self._runtime
        operation = getattr(runtime.operations, kind)
        there, about = runtime.now(now), runtime.about(now)
        floor = None if there is None else await runtime.reserve(there, 2 * len(asked))
        wakes: dict[Topic, Millis] = {}
        answers: list[Any] = []

        def messages_of(some: Mapping[Topic, Millis]) -> list[str]:
            merge_earliest(wakes, some)
            messages: list[str] = runtime.messages(some, about, joined=True)
            return messages

        async def work(call: Any) -> None:
            for part in slices(asked, self._at_once):
                answers.extend(await operation(call, part, there, about, messages_of))

        await self._savepoint(work, floor=floor, adding=kind == "add")
        merge_earliest(self.wakes, wakes)
        return answers

    async def read(self, work: Work[T]) -> T:
        """Run `work`, as the store's own connections do."""
        return await self._savepoint(work)

    async def _savepoint(self, work: Work[T], *, floor: int | None = None, adding: bool = False) -> T:
        """Do `work` completely or not at all. `floor`: the first token, if the store uses the caller's clock."""
        savepoint: Savepoint | None = None
        try:
            driver = await self._driver()
            turn = asyncio.Lock() if driver.asynchronous else ThreadTurn()
            state = self._runtime.connection_states.setdefault(driver.raw, ConnectionState(turn))
            async with state.turn:
                savepoint = await self._savepoint_on(driver, state)
                async with savepoint:
                    if not state.ours:
                        await self._check_identity(driver)
                        state.ours = True
                    return await work(self._calls(driver, self._runtime.joined_queries, floor))
        except Exception as error:
            found = self._error_of(error, adding=adding, committing=savepoint is not None and savepoint.committing)
            if found is error:
                raise
            raise found from error

    async def _driver(self) -> Driver:
        where = self._runtime.where
        if self.over:
            raise SetupError(f"{where}: this transaction has ended; use the store, or begin another")
        wrapper = self._source.begins
        if wrapper is None or not on_a_loop():
            driver = await self._source.driver()
        else:
            async with self._runtime.connection_states.setdefault(wrapper, ConnectionState()).turn:
                driver = await to_its_end(self._source.driver(), within=_LONGEST)
        if not isinstance(driver, self._drivers):
            raise BadInput("connection", self.connection, self.accepted)
        if self._own and driver.alone and not driver.closed:
            raise ended(where)
        if driver.closed and not self._own:
            raise SetupError(f"{where}: the connection is closed")
        return driver

    async def _check_identity(self, driver: Driver) -> None:
        """Check that the connection is to the store's database and returns values as we need them. Raises BadInput."""
        identity = await self._identity(driver)
        if identity is None or not await self._runtime.is_this(identity):
            other = f"this one is to another {self._place} than {self._runtime.where}"
            raise BadInput("connection", self.connection, f"{self.accepted}: {other}")

    def _error_of(self, error: Exception, *, adding: bool, committing: bool) -> Exception:
        """The error to raise: unlike a numbered call, a caller's transaction cannot be tried again here."""
        found = self._meaning(error, adding=adding)
        if isinstance(found, Lost):
            text = f"{found}; its transaction is gone with it"
            return OutcomeUnknown(str(found)) if committing else StoreUnavailable(text)
        if isinstance(found, LockTimeout):
            return StoreUnavailable(f"{found}: another transaction holds the task; nothing was done")
        if isinstance(found, (TransactionConflict, NotSent)) or not (found is error or isinstance(found, BideError)):
            return StoreUnavailable(f"{found}; nothing was done: begin the transaction again")
        return found

    # --- the server's part

    @abstractmethod
    async def _savepoint_on(self, driver: Driver, state: ConnectionState) -> Savepoint:
        """The savepoint of one verb. Raises SetupError if none can begin."""

    @abstractmethod
    async def _identity(self, driver: Driver) -> object | None:
        """The target of a connection; None: it has no tables of bide. Raises BadInput if values come back altered."""

    @abstractmethod
    def _meaning(self, error: Exception, *, adding: bool) -> Exception:
        """The meaning of an error of any of the drivers."""


def ended(where: str) -> SetupError:
    """The error to raise if the caller ended the transaction inside its block."""
    return SetupError(
        f"{where}: the transaction was committed or rolled back inside its block, so the task could not be completed "
        "with it; leave that to the end of the block"
    )


# --- savepoints

_LONGEST = 10.0
"""Seconds that a cancelled caller waits for an uninterruptible step to end; then the connection is closed."""
_NAME = "bide_verb"


class ConnectionState(Struct, eq=False):
    """The state of a caller's connection, kept for the lifetime of that connection."""

    turn: asyncio.Lock | ThreadTurn = field(default_factory=asyncio.Lock)
    """Serializes concurrent verbs: a connection does one thing at a time."""
    ours: bool = False
    """True once the connection is known to be to the store's database."""
    gone: bool = False
    """True while the server has rolled back the caller's transaction and the caller has not yet ended it."""


class ThreadTurn:
    """A lock for a synchronous connection, which threads may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            await pause(0.001)

    async def __aexit__(self, *exc_info: object) -> None:
        self._lock.release()


class Savepoint(Struct, eq=False):
    """A block of statements that is done completely or not at all, even if it is cancelled.

    It is a savepoint of the caller's transaction; without one, it is a separate transaction. The statements that
    begin and end it are never interrupted, so that its state is always known. The statements in between may be
    cancelled at every await, and are then rolled back. If the rollback fails the connection is closed, so that no part
    of the block can be committed.
    """

    driver: Driver
    first: Sequence[str] = ()
    """Statements that change settings within the block."""
    last: Sequence[str] = ()
    """Statements that restore the caller's settings."""
    gone: Callable[[Exception], Awaitable[bool]] | None = None
    """Called when the rollback fails. True: the server had undone the whole transaction, which is dealt with now."""
    committing: bool = False
    """True once the block has itself sent a COMMIT."""
    _alone: bool = False
    _begun: bool = False

    def __post_init__(self) -> None:
        self._alone = self.driver.alone

    async def __aenter__(self) -> Self:
        try:
            await self._carried(self._begin())
        except BaseException:
            await self._carried(self._undo())
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                await self._carried(self._end())
        finally:
            if self._begun:
                await self._carried(self._undo())

    async def _begin(self) -> None:
        await self.driver.command("BEGIN" if self._alone else f"SAVEPOINT {_NAME}", *self.first)
        self._begun = True

    async def _end(self) -> None:
        self.committing = self._alone
        await self.driver.command(*(("COMMIT",) if self._alone else (*self.last, f"RELEASE SAVEPOINT {_NAME}")))
        self._begun = False

    async def _undo(self) -> None:
        if self.driver.closed:
            return
        try:
            async with asyncio.timeout(_LONGEST) if on_a_loop() else nullcontext():
                if self._alone and (self._begun or self.driver.in_transaction):
                    await self.driver.command("ROLLBACK")
                elif self._begun:
                    await self.driver.command(f"ROLLBACK TO {_NAME}", f"RELEASE SAVEPOINT {_NAME}")
            self._begun = False
        except BaseException as error:
            usable = False
            try:
                usable = isinstance(error, Exception) and self.gone is not None and await self.gone(error)
            finally:
                if not usable:
                    await self.driver.close()
            if not isinstance(error, Exception):
                raise

    async def _carried(self, step: Coroutine[Any, Any, None]) -> None:
        if self.driver.asynchronous and on_a_loop():
            await to_its_end(step, within=_LONGEST)
        else:  # a synchronous driver blocks its thread until the step is done
            await step


async def to_its_end(step: Coroutine[Any, Any, T], *, within: float | None = None) -> T:
    """The result of `step`, which runs to its end: a cancellation is raised only after that.

    `within`: seconds after a cancellation at which `step` itself is cancelled.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(step, name="bide to its end")
    ended: asyncio.Future[None] = loop.create_future()  # `asyncio.wait` would take three times as long
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    try:
        await ended
    except asyncio.CancelledError as error:
        cancelled = error
    else:
        return task.result()
    while not task.done():
        try:
            await asyncio.wait([task], timeout=within)
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            if not task.done():
                task.cancel()
    with suppress(asyncio.CancelledError):
        task.exception()
    raise cancelled


# --- transactions of our own

MOST = 10
"""The maximum of concurrent transactions in one process: each takes a connection."""

KEPT = 60.0
"""Seconds that an unused connection is kept."""


class Pool(ABC):
    """Connections for transactions. An unused one is kept for a minute; the most recently used is reused first.

    Belongs to one event loop.
    """

    dialect: Dialect

    def __init__(self, address: Any, most: int) -> None:
        self.address = address
        self._most = most
        self.slots = asyncio.Semaphore(most)
        """Held while a transaction is open."""
        self._closed = False
        self._kept: list[tuple[float, Any]] = []
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def _is_open(self) -> bool:
        return not self._closed

    @abstractmethod
    async def _begin(self, connection: Any) -> None:
        """Begin a transaction."""

    def _take(self) -> Any:
        """The most recently used connection; None: there is none. Raises StoreUnavailable."""
        if not self._is_open:
            raise StoreUnavailable(f"{self.address.shown}: not open")
        return self._kept.pop()[1] if self._kept else None

    async def _tried(self, connection: Any, doing: Awaitable[T], within: float) -> T:
        """The result of `doing`. Drops the connection if that fails or takes too long."""
        try:
            async with asyncio.timeout(within):
                return await doing
        except BaseException:
            connection.drop()
            raise

    async def give_back(self, connection: Any, *, reset: bool, within: float) -> None:
        """Return the connection to the pool. `reset`: a handler used it, and the next user must find it like new."""
        if reset and connection.usable:
            with suppress(*self.dialect.away):
                await self._tried(connection, connection.reset(), within)
        if not self._is_open or not connection.usable or len(self._kept) >= self._most:
            connection.drop()
            return
        self._kept.append((time.monotonic(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)

    def _take_all(self) -> list[Any]:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        kept, self._kept = self._kept, []
        return [connection for _, connection in kept]

    def _tidy(self) -> None:
        self._sweep = None
        while self._kept and self._kept[0][0] <= time.monotonic() - KEPT:
            self._kept.pop(0)[1].drop()
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)


class OwnTransactions(Pool):
    """The transactions of an open store."""

    _options: ClassVar[Mapping[str, Any]]
    """The options with which connections are opened."""

    def __init__(self, runtime: Any, *, silence: float) -> None:
        """`runtime`: the open store's. Its connection `settle` reads the outcome of a commit whose answer was lost."""
        super().__init__(runtime.address, MOST)
        self.dialect = runtime.dialect
        self._runtime = runtime
        self._settling = runtime.connections["settle"]
        self._silence = silence
        self._owners: set[asyncio.Task[Any] | None] = set()
        self._made = 0

    # --- the server's part

    @abstractmethod
    async def _mark(self, connection: Any) -> None:
        """Write the transaction's number into its row. Raises SetupError if the transaction has already ended."""

    async def _commit(self, connection: Any) -> None:
        await connection.ask("COMMIT")

    @abstractmethod
    async def _marked(self, connection: Any) -> int:
        """Read the number in the row, after waiting for the server to end the transaction."""

    def _done(self, joined: Any) -> None:
        """Notify workers of the committed wakes."""
        if joined.wakes:
            self._runtime.notify(joined.wakes)

    def _refused(self, error: Exception, found: Exception) -> Exception:
        """The error to raise if the server refuses to commit."""
        return plain(found)

    # --- transactions

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A transaction, committed when left without an error."""
        own = asyncio.current_task()
        if own in self._owners:  # ten nested transactions would wait for each other
            raise SetupError(f"{self.address.shown}: a transaction is already open in this task; use that one")
        async with self.slots:
            connection = await self._begun()
            self._owners.add(own)
            joined = self._runtime.joined(self._runtime, ConnectionSource(connection.driver), own=True)
            state = self._runtime.connection_states.setdefault(joined.connection, ConnectionState())
            state.ours, state.gone = True, False
            try:
                yield joined
                joined.over = True
                await to_its_end(self._committed(connection))
            except BaseException:
                joined.over = True
                await self._undo(connection)
                raise
            finally:
                self._owners.discard(own)
            self._done(joined)
            await self.give_back(connection, reset=True, within=self._silence)

    async def _begun(self) -> Any:
        """A connection with a transaction that has just begun. Raises StoreUnavailable."""
        resending = Resending(self._settling.patience)
        while True:
            try:
                connection = self._take()
                if connection is None:
                    connection = await self.dialect.connect(self.address, within=self._silence, **self._options)
                    self._made += 1
                    connection.name, connection.number = f"{self._runtime.name}:transaction{self._made}", 0
                connection.number += 1
                await self._tried(connection, self._begin(connection), self._silence)
                return connection
            except self.dialect.away as error:
                found = self.dialect.meaning(error, self.address.shown)
                if not isinstance(found, Lost | NotSent):
                    raise plain(found) from error
                # nothing was done yet: try another connection
                await resending.pause(str(found), seconds=0.0 if self._kept else None)

    async def _committed(self, connection: Any) -> None:
        """Commit. Raises SetupError (the transaction ended earlier), StoreUnavailable (not done), OutcomeUnknown."""
        sent = False
        try:
            async with asyncio.timeout(self._silence):
                await self._mark(connection)
            sent = True
            async with asyncio.timeout(self._silence):
                await self._commit(connection)
        except self.dialect.away as error:
            found = self.dialect.meaning(error, self.address.shown)
            if not isinstance(found, Lost | NotSent):
                refused = self._refused(error, found)
                if refused is error:
                    raise
                raise refused from error
            connection.drop()
            if not sent or not await self._was_committed(connection, found):
                raise StoreUnavailable(f"{found}; the transaction was not committed") from error

    async def _was_committed(self, connection: Any, why: Exception) -> bool:
        """Determine the outcome of a commit whose answer was lost. Raises OutcomeUnknown."""
        try:
            return bool(await self._marked(connection) == connection.number)
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, connection: Any) -> None:
        """Roll back the open transaction."""
        if connection.usable:
            with suppress(*self.dialect.away):
                await self._tried(connection, connection.rollback(), self._silence)
            await self.give_back(connection, reset=True, within=self._silence)

    async def close(self) -> None:
        """Close the unused connections. The connection of an open transaction is closed when its block ends."""
        self._closed = True
        for connection in self._take_all():
            await connection.end(within=self._silence)
