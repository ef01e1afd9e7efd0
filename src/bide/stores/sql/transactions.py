"""Transactions of our own that a handler's statements take part in, on connections that are kept for them.

They have none of our other connections' settings: a handler may set what it likes, and take its time. A commit whose
answer was lost is looked up: the transaction's last statement wrote its number into a row, and whoever writes that row
next has to wait until the server has made an end of it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from bide.core.errors import OutcomeUnknown, SetupError, StoreUnavailable
from bide.stores.driver_adapters import Borrowed
from bide.stores.sql.dialect import Lost, NotSent, plain
from bide.stores.sql.joined import Known, to_its_end

MOST = 10
"""Transactions at a time in one process: each is a connection."""


class Lent:
    """A connection of the pool."""

    def __init__(self, connection: Any, name: str) -> None:
        """`connection`: see `sql.dialect.Connection`."""
        self.connection = connection
        self.name = name
        """The name of its row among the callers."""
        self.number = 0
        """The transactions on it so far."""


class OwnTransactions(ABC):
    """The pool. Belongs to one event loop."""

    def __init__(self, runtime: Any, *, silence: float) -> None:
        """`runtime`: the open store's. A lost commit is looked up on its connection `keep`."""
        self._runtime = runtime
        self._address = runtime.address
        self._dialect = runtime.dialect
        self._keep = runtime.connections["keep"]
        self._silence = silence
        self._places = asyncio.Semaphore(MOST)
        self._owners: set[asyncio.Task[Any] | None] = set()
        self._idle: Idle[Any] = Idle(lambda lent: lent.connection.drop())
        self._made = 0
        self._closed = False

    # --- the server's part

    @abstractmethod
    async def _connect(self, name: str) -> Lent:
        """Open a connection."""

    @abstractmethod
    async def _begin(self, lent: Any) -> None:
        """Begin a transaction."""

    @abstractmethod
    async def _mark(self, lent: Any) -> None:
        """Write the transaction's number into its row. Raises SetupError where it is over already."""

    async def _commit(self, lent: Any) -> None:
        await lent.connection.ask("COMMIT")

    async def _rollback(self, lent: Any) -> None:
        await lent.connection.rollback()

    @abstractmethod
    async def _marked(self, lent: Any) -> int:
        """Ask for the number in the row, once the server has made an end of the transaction."""

    def _done(self, joined: Any) -> None:
        """Tell what was committed."""
        if joined.wakes:
            self._runtime.tell(joined.wakes)

    def _refused(self, error: Exception, found: Exception) -> Exception:
        """The error to raise where the server refuses to commit."""
        return plain(found)

    # --- the pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A transaction, committed when left without an error."""
        own = asyncio.current_task()
        if own in self._owners:  # ten of them would wait for one another
            raise SetupError(f"{self._address.shown}: a transaction within a transaction; use the one that is open")
        async with self._places:
            lent = await self._begun()
            self._owners.add(own)
            joined = self._runtime.joined(self._runtime, Borrowed(lent.connection.driver), own=True)
            known = self._runtime.known.setdefault(joined.connection, Known())
            known.ours, known.gone = True, False
            try:
                yield joined
                joined.over = True
                await to_its_end(self._committed(lent))
            except BaseException:
                joined.over = True
                await self._undo(lent)
                raise
            finally:
                self._owners.discard(own)
            self._done(joined)
            await self._give_back(lent)

    async def _begun(self) -> Lent:
        """A connection with a transaction that has just begun. Raises StoreUnavailable."""
        ends = time.monotonic() + self._keep.patience
        while True:
            if self._closed:
                raise StoreUnavailable(f"{self._address.shown}: the store is not open")
            lent: Lent | None = None
            try:
                lent = self._idle.take() or await self._made_new()
                lent.number += 1
                async with asyncio.timeout(self._silence):
                    await self._begin(lent)
                return lent
            except BaseException as error:
                if lent is not None:
                    lent.connection.drop()
                if not isinstance(error, self._dialect.away):
                    raise
                found = self._dialect.meaning(error, self._address.shown)
                if not isinstance(found, Lost | NotSent):
                    raise plain(found) from error
                if time.monotonic() >= ends:  # nothing was done yet: with another connection, then
                    raise StoreUnavailable(str(found)) from error
                if not self._idle:
                    await asyncio.sleep(0.1)

    async def _made_new(self) -> Lent:
        self._made += 1
        return await self._connect(f"{self._runtime.name}:transaction{self._made}")

    async def _committed(self, lent: Lent) -> None:
        """Raises SetupError where it is over already, StoreUnavailable: not done, OutcomeUnknown."""
        sent = False
        try:
            async with asyncio.timeout(self._silence):
                await self._mark(lent)
            sent = True
            async with asyncio.timeout(self._silence):
                await self._commit(lent)
        except self._dialect.away as error:
            found = self._dialect.meaning(error, self._address.shown)
            if not isinstance(found, Lost | NotSent):
                refused = self._refused(error, found)
                if refused is error:
                    raise
                raise refused from error
            lent.connection.drop()
            if not sent or not await self._was_committed(lent, found):
                raise StoreUnavailable(f"{found}; the transaction came to nothing") from error

    async def _was_committed(self, lent: Lent, why: Exception) -> bool:
        """Find out what became of a commit whose answer was lost. Raises OutcomeUnknown."""
        try:
            return await self._marked(lent) == lent.number
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, lent: Lent) -> None:
        """Roll back what is not committed."""
        if lent.connection.usable and await self._tried(lent, self._rollback(lent)):
            await self._give_back(lent)

    async def _give_back(self, lent: Lent) -> None:
        """To the next one, as if nobody had used it; else it is closed."""
        connection = lent.connection
        if connection.usable:
            await self._tried(lent, connection.reset())
        if self._closed or not connection.usable:
            connection.drop()
            return
        self._idle.keep(lent)

    async def _tried(self, lent: Lent, doing: Awaitable[None]) -> bool:
        """Tell whether it could be done in time; else the connection is closed."""
        try:
            async with asyncio.timeout(self._silence):
                await doing
        except self._dialect.away:
            lent.connection.drop()
            return False
        except BaseException:
            lent.connection.drop()
            raise
        return True

    async def close(self) -> None:
        """Let go of the connections; a transaction that is open comes to nothing when it is left."""
        self._closed = True
        for lent in self._idle.take_all():
            await lent.connection.end(within=self._silence)


# --- connections that nobody uses

T = TypeVar("T")
KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""


class Idle(Generic[T]):
    """Connections that nobody uses: each is kept for a minute, and the one that was used last is lent first.

    Belongs to one event loop. `drop` closes a connection at once.
    """

    def __init__(self, drop: Callable[[T], None]) -> None:
        self._drop = drop
        self._kept: list[tuple[float, T]] = []
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> T | None:
        """The one that was used last; None: there is none."""
        return self._kept.pop()[1] if self._kept else None

    def keep(self, connection: T) -> None:
        self._kept.append((time.monotonic(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)

    def take_all(self) -> list[T]:
        """End the sweeping, and hand over all that are kept."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        kept, self._kept = self._kept, []
        return [connection for _, connection in kept]

    def drop_all(self) -> None:
        for connection in self.take_all():
            self._drop(connection)

    def _tidy(self) -> None:
        self._sweep = None
        while self._kept and self._kept[0][0] <= time.monotonic() - KEPT:
            self._drop(self._kept.pop(0)[1])
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)
