"""Transactions of our own that a handler's statements take part in, on connections that are kept for them.

They have none of a lane's settings: text is text there, and a handler may take its time. A commit whose answer was lost
is looked up: the transaction's last statement wrote its number into a row, and whoever locks that row next has to wait
until the server has made an end of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Settlement, Topic
from bide.stores.borrowed import Driver, driver_of
from bide.stores.mysql.address import Address
from bide.stores.mysql.connecting import Connection, connect
from bide.stores.mysql.errors import Again, Broken, Lost, NotSent, meaning
from bide.stores.mysql.joined import JoinedVerbs, Joins
from bide.stores.mysql.lane import Call, Lane
from bide.stores.mysql.leased_rows import LeasedRows, Settling
from bide.stores.mysql.queries import THERE_ANYWHERE
from bide.stores.mysql.statements import Code, in_hexadecimal
from bide.stores.whole import Known, to_its_end

MOST = 10
"""Transactions at a time in one process: each is a connection."""
_KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""
_IN_TRANSACTION = 1


class Lent:
    """A connection of the pool."""

    __slots__ = ("connection", "idle_since", "name", "number")

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        """What its row among the callers is called."""
        self.number = 0
        """The transactions on it so far."""
        self.idle_since = 0.0

    @property
    def in_transaction(self) -> bool:
        """As the server said in its last answer."""
        return bool(self.connection.driver.server_status & _IN_TRANSACTION)


class OwnTransaction(JoinedVerbs):
    """The verbs while the transaction is open."""

    over = False

    def __init__(self, joins: Joins, connection: Any, leased: LeasedRows) -> None:
        super().__init__(joins, connection)
        self._leased = leased
        self.settled: list[Settling] = []
        """What it has settled, once it is committed."""

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        known = self._leased.of(outcomes)
        answers = await super().settle(outcomes, now=now)
        self.settled.append(known)
        return answers

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
        leased: LeasedRows,
        committed: Callable[[Mapping[Topic, Millis]], None],
        *,
        silence: float,
    ) -> None:
        """`keep`: the lane on which a lost commit is looked up; `committed` is told what wakes earlier by one.

        `leased`: what was leased here, which is told what was settled.
        """
        self._address = address
        self._name = name
        self._joins = joins
        self._keep = keep
        self._leased = leased
        self._committed = committed
        self._silence = silence
        self._places = asyncio.Semaphore(MOST)
        self._idle: list[Lent] = []
        self._made = 0
        self._closed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[OwnTransaction]:
        """A transaction, committed when left without an error."""
        async with self._places:
            lent = await self._begun()
            driver = lent.connection.driver
            joined = OwnTransaction(self._joins, driver, self._leased)
            known = self._joins.known.setdefault(driver, Known())
            known.ours, known.gone = True, False
            try:
                yield joined
                joined.over = True
                await to_its_end(self._commit(lent))
            except BaseException:
                joined.over = True
                await self._undo(lent)
                raise
            self._leased.settled(joined.settled)
            if joined.wakes:
                self._committed(joined.wakes)
            await self._give_back(lent)

    async def _begun(self) -> Lent:
        """A connection with a transaction that has just begun. Raises StoreUnavailable."""
        ends = time.monotonic() + self._keep.patience
        while True:
            if self._closed:
                raise StoreUnavailable(f"{self._address.shown}: the store is not open")
            lent: Lent | None = None
            try:
                lent = self._idle.pop() if self._idle else await self._made_new()
                lent.connection.check_writable(self._address.shown)
                lent.number += 1
                async with asyncio.timeout(self._silence):
                    await lent.connection.begin()
                return lent
            except BaseException as error:
                if lent is not None:
                    lent.connection.drop()
                if not isinstance(error, NotSent | MySQLError | Broken | OSError | TimeoutError):
                    raise
                found = meaning(error, self._address.shown)  # nothing was done yet: with another connection, then
                if not isinstance(found, Lost | NotSent):
                    raise found from error
                if time.monotonic() >= ends:
                    raise StoreUnavailable(str(found)) from error
                if not self._idle:
                    await asyncio.sleep(0.1)

    async def _made_new(self) -> Lent:
        self._made += 1
        connection = await connect(self._address, within=self._silence, plain=True)
        return Lent(connection, f"{self._name}:transaction{self._made}")

    async def _commit(self, lent: Lent) -> None:
        """Raises SetupError where it is over already, StoreUnavailable: not done, OutcomeUnknown."""
        if lent.connection.usable and not lent.in_transaction:
            raise _ended(self._address.shown)
        kept = self._joins.queries["keep_transaction"].write(
            in_hexadecimal, me=lent.name, number=lent.number, there=Code(THERE_ANYWHERE.encode())
        )
        sent = False
        try:
            async with asyncio.timeout(self._silence):
                await lent.connection.ask(kept)
                sent = True
                await lent.connection.ask("COMMIT")
        except (MySQLError, Broken, OSError, TimeoutError) as error:
            found = meaning(error, self._address.shown)
            if not isinstance(found, Lost | NotSent):
                raise StoreUnavailable(str(found)) if isinstance(found, Again) else found from error
            lent.connection.drop()
            if not sent or not await self._was_committed(lent, found):
                raise StoreUnavailable(f"{found}; the transaction came to nothing") from error

    async def _was_committed(self, lent: Lent, why: Exception) -> bool:
        """What became of a commit whose answer was lost. Raises OutcomeUnknown."""

        async def look(call: Call) -> int:
            [rows] = await call.send(call.write("repeated", me=lent.name))
            return int(rows[0][0]) if rows else 0

        try:
            return await self._keep.repeat(look) == lent.number
        except Exception as error:
            raise OutcomeUnknown(f"{why}; and whether it was committed cannot be found out: {error}") from error

    async def _undo(self, lent: Lent) -> None:
        """Roll back what is not committed."""
        connection = lent.connection
        try:
            if connection.usable:
                async with asyncio.timeout(self._silence):
                    await connection.ask("ROLLBACK")
                await self._give_back(lent)
        except (MySQLError, Broken, OSError, TimeoutError):
            connection.drop()
        except BaseException:
            connection.drop()
            raise

    async def _give_back(self, lent: Lent) -> None:
        """To who comes next, as if nobody had used it; else it is dropped."""
        try:
            async with asyncio.timeout(self._silence):
                await lent.connection.reset()
        except (MySQLError, Broken, OSError, TimeoutError):
            lent.connection.drop()
        except BaseException:
            lent.connection.drop()
            raise
        now = time.monotonic()
        if self._closed or not lent.connection.usable:
            lent.connection.drop()
        else:
            lent.idle_since = now
            self._idle.append(lent)
        while self._idle and self._idle[0].idle_since < now - _KEPT:
            self._idle.pop(0).connection.drop()

    async def close(self) -> None:
        """Let go of the connections; a transaction that is open comes to nothing when it is left."""
        self._closed = True
        for lent in self._idle:
            await lent.connection.close(within=self._silence)
        self._idle.clear()


def _ended(where: str) -> SetupError:
    return SetupError(
        f"{where}: the transaction was committed or rolled back inside its block, so the task could not be completed "
        "with it; leave that to the end of the block"
    )
