"""Transactions of our own that a handler's statements take part in, on connections that are kept for them.

They have none of a lane's settings: a handler may set what it likes, and take its time. A commit whose answer was lost
is looked up: the transaction's last statement wrote its number into a row, and whoever writes that row next has to wait
until the server has made an end of it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from bide.core.errors import OutcomeUnknown, SetupError, StoreUnavailable
from bide.stores.driver_adapters import Driver, driver_of
from bide.stores.sql.dialect import Dialect
from bide.stores.sql.errors import Lost, NotSent, plain
from bide.stores.sql.idle import Idle
from bide.stores.sql.savepoint import Known, to_its_end

MOST = 10
"""Transactions at a time in one process: each is a connection."""


class Lent:
    """A connection of the pool."""

    def __init__(self, connection: Any, name: str) -> None:
        self.connection = connection
        self.name = name
        """The name of its row among the callers."""
        self.number = 0
        """The transactions on it so far."""


class Own:
    """Of the verbs on a connection of the pool: they hold while the transaction is open."""

    over = False
    _joins: Any
    _connection: Any

    async def _driver(self) -> Driver:
        if self.over:
            raise SetupError(f"{self._joins.where}: this transaction has ended; use the store, or begin another")
        driver = driver_of(self._connection)
        assert driver is not None
        if driver.alone and not driver.closed:
            raise ended(self._joins.where)
        return driver


class OwnTransactions(ABC):
    """The pool. Belongs to one event loop."""

    _dialect: ClassVar[Dialect]

    def __init__(self, address: Any, opened: Any, *, silence: float) -> None:
        """`opened`: what the open store has. Its lane `keep` is the one on which a lost commit is looked up."""
        self._address = address
        self._opened = opened
        self._joins = opened.joins
        self._keep = opened.lanes["keep"]
        self._silence = silence
        self._places = asyncio.Semaphore(MOST)
        self._owners: set[asyncio.Task[Any] | None] = set()
        self._idle: Idle[Any] = Idle(self._drop)
        self._made = 0
        self._closed = False

    # --- the driver's part

    @abstractmethod
    async def _connect(self, name: str) -> Lent:
        """Open a connection."""

    @abstractmethod
    async def _begin(self, lent: Any) -> None:
        """Begin a transaction."""

    @abstractmethod
    async def _mark(self, lent: Any) -> None:
        """Write the transaction's number into its row. Raises SetupError where it is over already."""

    @abstractmethod
    async def _end(self, lent: Any) -> None:
        """Commit."""

    @abstractmethod
    async def _marked(self, lent: Any) -> int:
        """Ask the other lane for the number in the row, once the server has made an end of the transaction."""

    @abstractmethod
    async def _rollback(self, lent: Any) -> None:
        """Undo what is not committed."""

    @abstractmethod
    async def _reset(self, lent: Any) -> None:
        """Take back what a handler has set, locked or made in its session."""

    @abstractmethod
    def _usable(self, lent: Any) -> bool:
        """Whether the connection is open."""

    @abstractmethod
    def _drop(self, lent: Any) -> None:
        """Close it at once, without a word to the server."""

    @abstractmethod
    async def _close(self, lent: Any) -> None:
        """Close it in order."""

    @abstractmethod
    def _joined(self, lent: Any) -> Any:
        """Make the verbs on it."""

    def _done(self, joined: Any) -> None:
        """Tell what was committed."""
        if joined.wakes:
            self._opened.tell(joined.wakes)

    def _refused(self, error: Exception, found: Exception) -> Exception:
        """What to raise where the server refuses to commit."""
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
            joined = self._joined(lent)
            known = self._joins.known.setdefault(joined.connection, Known())
            known.ours, known.gone = True, False
            try:
                yield joined
                joined.over = True
                await to_its_end(self._commit(lent))
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
                    self._drop(lent)
                if not isinstance(error, self._dialect.away):
                    raise
                found = self._dialect.meaning(error, self._address.shown)
                if not self._is_away(found):
                    raise plain(found) from error
                if time.monotonic() >= ends:  # nothing was done yet: with another connection, then
                    raise StoreUnavailable(str(found)) from error
                if not self._idle:
                    await asyncio.sleep(0.1)

    async def _made_new(self) -> Lent:
        self._made += 1
        return await self._connect(f"{self._opened.name}:transaction{self._made}")

    def _is_away(self, found: Exception) -> bool:
        return isinstance(found, Lost | NotSent)

    async def _commit(self, lent: Lent) -> None:
        """Raises SetupError where it is over already, StoreUnavailable: not done, OutcomeUnknown."""
        sent = False
        try:
            async with asyncio.timeout(self._silence):
                await self._mark(lent)
            sent = True
            async with asyncio.timeout(self._silence):
                await self._end(lent)
        except self._dialect.away as error:
            found = self._dialect.meaning(error, self._address.shown)
            if not self._is_away(found):
                refused = self._refused(error, found)
                if refused is error:
                    raise
                raise refused from error
            self._drop(lent)
            if not sent or not await self._was_committed(lent, found):
                raise StoreUnavailable(f"{found}; the transaction came to nothing") from error

    async def _was_committed(self, lent: Lent, why: Exception) -> bool:
        """What became of a commit whose answer was lost. Raises OutcomeUnknown."""
        try:
            return await self._marked(lent) == lent.number
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, lent: Lent) -> None:
        """Roll back what is not committed."""
        try:
            if self._usable(lent):
                async with asyncio.timeout(self._silence):
                    await self._rollback(lent)
                await self._give_back(lent)
        except self._dialect.away:
            self._drop(lent)
        except BaseException:
            self._drop(lent)
            raise

    async def _give_back(self, lent: Lent) -> None:
        """To the next one, as if nobody had used it; else it is closed."""
        try:
            if self._usable(lent):
                async with asyncio.timeout(self._silence):
                    await self._reset(lent)
        except self._dialect.away:
            self._drop(lent)
        except BaseException:
            self._drop(lent)
            raise
        if self._closed or not self._usable(lent):
            self._drop(lent)
            return
        self._idle.keep(lent)

    async def close(self) -> None:
        """Let go of the connections; a transaction that is open comes to nothing when it is left."""
        self._closed = True
        for lent in self._idle.take_all():
            await self._close(lent)


def ended(where: str) -> SetupError:
    """The error of a block in which somebody ended the transaction."""
    return SetupError(
        f"{where}: the transaction was committed or rolled back inside its block, so the task could not be completed "
        "with it; leave that to the end of the block"
    )
