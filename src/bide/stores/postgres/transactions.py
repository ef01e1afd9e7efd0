"""Transactions of our own that a handler's statements take part in, on connections that are kept for them.

They have none of a lane's settings: the planner is the handler's, and a handler may take its time. A commit whose
answer was lost is looked up: the transaction's last statement wrote its number into a row, and whoever writes that row
next has to wait until the server has made an end of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from bide.core.errors import BideError, OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.borrowed import Driver, driver_of
from bide.stores.postgres.address import Address
from bide.stores.postgres.connecting import connect
from bide.stores.postgres.errors import Lost, NotSent, meaning
from bide.stores.postgres.joined import JoinedVerbs, Joins
from bide.stores.postgres.lane import CALLS_OF_A_ROW, Call, Lane
from bide.stores.whole import Known, to_its_end

MOST = 10
"""Transactions at a time in one process: each is a connection."""
_KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""
_SESSION = {
    # a process that is gone without a word keeps its locks for half a minute
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}


class Lent:
    """A connection of the pool."""

    __slots__ = ("connection", "first_name", "idle_since", "name", "number", "transaction")

    def __init__(self, connection: Any, name: str) -> None:
        self.connection = connection
        self.name = name
        """What its row among the callers is called by now."""
        self.first_name = name
        self.number = 0
        """The transactions on it so far."""
        self.transaction: Any = None
        """The driver's own, so that a handler may have savepoints in it: `conn.transaction()`."""
        self.idle_since = 0.0


class OwnTransaction(JoinedVerbs):
    """The verbs while the transaction is open."""

    over = False

    async def _driver(self) -> Driver:
        if self.over:
            raise SetupError(f"{self._joins.where}: this transaction has ended; use the store, or begin another")
        driver = driver_of(self._connection)
        assert driver is not None
        if driver.alone and not driver.closed:
            raise _ended(self._joins.where)
        return driver


class Transactions:
    """The pool. Belongs to one event loop."""

    def __init__(
        self,
        address: Address,
        name: str,
        joins: Joins,
        keep: Lane,
        committed: Callable[[Mapping[Topic, Millis]], None],
        *,
        silence: float,
    ) -> None:
        """`keep`: the lane on which a lost commit is looked up; `committed` is told what wakes earlier by one."""
        self._address = address
        self._name = name
        self._joins = joins
        self._keep = keep
        self._committed = committed
        self._silence = silence
        self._places = asyncio.Semaphore(MOST)
        self._owners: set[asyncio.Task[Any] | None] = set()
        self._idle: list[Lent] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._made = 0
        self._closed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[OwnTransaction]:
        """A transaction, committed when left without an error."""
        own = asyncio.current_task()
        if own in self._owners:  # ten of them would wait for one another
            raise SetupError(f"{self._address.shown}: a transaction within a transaction; use the one that is open")
        async with self._places:
            lent = await self._begun()
            self._owners.add(own)
            joined = OwnTransaction(self._joins, lent.connection)
            self._joins.known.setdefault(lent.connection, Known()).ours = True
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
            if joined.wakes:
                self._committed(joined.wakes)
            await self._give_back(lent)

    async def _begun(self) -> Lent:
        """A connection with a transaction that has just begun. Raises StoreUnavailable."""
        ends = time.monotonic() + self._keep.patience
        while True:
            if self._closed:
                raise StoreUnavailable(f"{self._address.shown}: the store is not open")
            try:
                lent = self._idle.pop() if self._idle else await self._made_new()
                await self._begin(lent)
                return lent
            except (NotSent, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
                found = meaning(error, self._address.shown)  # nothing was done yet: with another connection, then
                if not isinstance(found, Lost | NotSent):
                    raise found if isinstance(found, BideError) else StoreUnavailable(str(found)) from error
                if time.monotonic() >= ends:
                    raise StoreUnavailable(str(found)) from error
                if not self._idle:
                    await asyncio.sleep(0.1)

    async def _begin(self, lent: Lent) -> None:
        lent.number += 1
        if lent.number % CALLS_OF_A_ROW == 0:  # see `lane`; the row before it is forgotten in ten minutes
            lent.name = f"{lent.first_name}.{lent.number}"
        try:
            lent.transaction = lent.connection.transaction(isolation="read_committed")
            async with asyncio.timeout(self._silence):
                await lent.transaction.start()
                await lent.connection.execute(f"SET LOCAL bide.transaction = '{lent.number}'")
        except BaseException:
            lent.connection.terminate()
            raise

    async def _made_new(self) -> Lent:
        self._made += 1
        connection = await connect(self._address, within=self._silence, session=_SESSION)
        return Lent(connection, f"{self._name}:transaction{self._made}")

    async def _commit(self, lent: Lent) -> None:
        """Raises SetupError where it is over already, StoreUnavailable: not done, OutcomeUnknown."""
        sent = False
        try:
            kept = await lent.connection.fetch(
                self._joins.queries["keep_transaction"], lent.name, lent.number, timeout=self._silence
            )
            if not kept:
                raise _ended(self._address.shown)
            sent = True
            async with asyncio.timeout(self._silence):
                await lent.transaction.commit()
        except asyncpg.IntegrityConstraintViolationError:
            raise  # a constraint of the handler's tables that is looked at by the commit: as any other error of theirs
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            found = meaning(error, self._address.shown)
            if not isinstance(found, Lost | NotSent):
                if isinstance(error, asyncpg.InFailedSQLTransactionError):
                    found = SetupError(
                        f"{self._address.shown}: a statement inside failed, so the transaction cannot be committed; "
                        "let its error out of the block, or put the statement into a savepoint (`conn.transaction()`)"
                    )
                elif type(found).__module__ == "bide.stores.postgres.errors":
                    found = StoreUnavailable(str(found))
                raise found from error
            lent.connection.terminate()
            if not sent or not await self._was_committed(lent, found):
                raise StoreUnavailable(f"{found}; the transaction came to nothing") from error

    async def _was_committed(self, lent: Lent, why: Exception) -> bool:
        """What became of a commit whose answer was lost. Raises OutcomeUnknown."""

        async def look(call: Call) -> int:
            [(number,)] = await call.fetch("was_kept", lent.name)
            return int(number)

        try:
            return await self._keep.read(look) == lent.number
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, lent: Lent) -> None:
        """Roll back what is not committed."""
        connection = lent.connection
        try:
            if connection.is_closed():
                return
            if connection.is_in_transaction():
                async with asyncio.timeout(self._silence):
                    await lent.transaction.rollback()
                await self._give_back(lent)
            else:  # somebody ended it, and the driver does not know
                connection.terminate()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            connection.terminate()
        except BaseException:
            connection.terminate()
            raise

    async def _give_back(self, lent: Lent) -> None:
        """To who comes next, as if nobody had used it; else it is closed."""
        connection = lent.connection
        try:
            if not self._address.pooled:  # there the session is nobody's
                await connection.reset(timeout=self._silence)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            connection.terminate()
        except BaseException:
            connection.terminate()
            raise
        if self._closed or connection.is_closed():
            connection.terminate()
            return
        lent.idle_since = time.monotonic()
        self._idle.append(lent)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT, self._let_go)

    def _let_go(self) -> None:
        """Of those that nobody has used for long, and look again if some are left."""
        self._sweep = None
        while self._idle and self._idle[0].idle_since <= time.monotonic() - _KEPT:
            self._idle.pop(0).connection.terminate()
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT, self._let_go)

    async def close(self) -> None:
        """Let go of the connections; a transaction that is open comes to nothing when it is left."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for lent in self._idle:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                await lent.connection.close(timeout=self._silence)
        self._idle.clear()


def _ended(where: str) -> SetupError:
    return SetupError(
        f"{where}: the transaction was committed or rolled back inside its block, so the task could not be completed "
        "with it; leave that to the end of the block"
    )
