"""Transactions of our own that a handler's statements take part in, on connections that are kept for them.

They have none of our other connections' settings: a handler may set what it likes, and take its time. A commit whose
answer was lost is looked up: the transaction's last statement wrote its number into a row, and whoever writes that row
next has to wait until the server has made an end of it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from bide.core.errors import OutcomeUnknown, SetupError, StoreUnavailable
from bide.stores.driver_adapters import Borrowed
from bide.stores.sql.dialect import Dialect, Lost, NotSent, plain
from bide.stores.sql.joined import Known, to_its_end

MOST = 10
"""Transactions at a time in one process: each is a connection."""
T = TypeVar("T")


KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""


class Pool(ABC):
    """Connections that transactions are lent: each is kept for a minute when nobody uses it, the last used goes first.

    Belongs to one event loop.
    """

    dialect: Dialect

    def __init__(self, address: Any, most: int) -> None:
        self.address = address
        self._most = most
        self.slots = asyncio.Semaphore(most)
        """Held while a transaction is open."""
        self._kept: list[tuple[float, Any]] = []
        self._sweep: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def _is_open(self) -> bool: ...
    def _take(self) -> Any:
        """The connection that was used last; None: there is none. Raises StoreUnavailable."""
        if not self._is_open:
            raise StoreUnavailable(f"{self.address.shown}: not open")
        return self._kept.pop()[1] if self._kept else None

    async def _tried(self, connection: Any, doing: Awaitable[T], within: float) -> T:
        """Let go of the connection if it cannot be done in time."""
        try:
            async with asyncio.timeout(within):
                return await doing
        except BaseException:
            connection.drop()
            raise

    async def _give_back(self, connection: Any, *, reset: bool, within: float) -> None:
        """Keep it for later. `reset`: a handler had it, and the next is to find it as if nobody had used it."""
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
    """Those of an open store."""

    def __init__(self, runtime: Any, *, silence: float) -> None:
        """`runtime`: the open store's. A lost commit is looked up on its connection `keep`."""
        super().__init__(runtime.address, MOST)
        self.dialect = runtime.dialect
        self._runtime = runtime
        self._keep = runtime.connections["keep"]
        self._silence = silence
        self._owners: set[asyncio.Task[Any] | None] = set()
        self._made = 0
        self._closed = False

    @property
    def _is_open(self) -> bool:
        return not self._closed

    # --- the server's part

    @abstractmethod
    async def _connect(self) -> Any:
        """Open a connection, see `sql.dialect.Connection`."""

    @abstractmethod
    async def _begin(self, connection: Any) -> None:
        """Begin a transaction."""

    @abstractmethod
    async def _mark(self, connection: Any) -> None:
        """Write the transaction's number into its row. Raises SetupError where it is over already."""

    async def _commit(self, connection: Any) -> None:
        await connection.ask("COMMIT")

    async def _rollback(self, connection: Any) -> None:
        await connection.rollback()

    @abstractmethod
    async def _marked(self, connection: Any) -> int:
        """Ask for the number in the row, once the server has made an end of the transaction."""

    def _done(self, joined: Any) -> None:
        """Tell what was committed."""
        if joined.wakes:
            self._runtime.tell(joined.wakes)

    def _refused(self, error: Exception, found: Exception) -> Exception:
        """The error to raise where the server refuses to commit."""
        return plain(found)

    # --- transactions

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A transaction, committed when left without an error."""
        own = asyncio.current_task()
        if own in self._owners:  # ten of them would wait for one another
            raise SetupError(f"{self.address.shown}: a transaction within a transaction; use the one that is open")
        async with self.slots:
            connection = await self._begun()
            self._owners.add(own)
            joined = self._runtime.joined(self._runtime, Borrowed(connection.driver), own=True)
            known = self._runtime.known.setdefault(joined.connection, Known())
            known.ours, known.gone = True, False
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
            await self._give_back(connection, reset=True, within=self._silence)

    async def _begun(self) -> Any:
        """A connection with a transaction that has just begun. Raises StoreUnavailable."""
        ends = time.monotonic() + self._keep.patience
        while True:
            try:
                connection = self._take()
                if connection is None:
                    connection = await self._connect()
                    self._made += 1
                    connection.name, connection.number = f"{self._runtime.name}:transaction{self._made}", 0
                connection.number += 1
                await self._tried(connection, self._begin(connection), self._silence)
                return connection
            except self.dialect.away as error:
                found = self.dialect.meaning(error, self.address.shown)
                if not isinstance(found, Lost | NotSent):
                    raise plain(found) from error
                if time.monotonic() >= ends:  # nothing was done yet: with another connection, then
                    raise StoreUnavailable(str(found)) from error
                if not self._kept:
                    await asyncio.sleep(0.1)

    async def _committed(self, connection: Any) -> None:
        """Raises SetupError where it is over already, StoreUnavailable: not done, OutcomeUnknown."""
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
                raise StoreUnavailable(f"{found}; the transaction came to nothing") from error

    async def _was_committed(self, connection: Any, why: Exception) -> bool:
        """Find out what became of a commit whose answer was lost. Raises OutcomeUnknown."""
        try:
            return bool(await self._marked(connection) == connection.number)
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, connection: Any) -> None:
        """Roll back what is not committed."""
        if connection.usable:
            with suppress(*self.dialect.away):
                await self._tried(connection, self._rollback(connection), self._silence)
            await self._give_back(connection, reset=True, within=self._silence)

    async def close(self) -> None:
        """Let go of the connections; a transaction that is open comes to nothing when it is left."""
        self._closed = True
        for connection in self._take_all():
            await connection.end(within=self._silence)
