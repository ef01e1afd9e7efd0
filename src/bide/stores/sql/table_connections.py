"""How connections to a server with watched tables are kept.

One connection looks, and others carry the rows' transactions. One that has been idle may be half open: a firewall has
forgotten it, or the machine is gone. So it is asked for a sign of life, or has little time to begin; and if it is dead,
so are those that have been idle for longer. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from bide.core.errors import StoreUnavailable
from bide.core.table_source import TableSource
from bide.stores.server_time import ServerTime
from bide.stores.sql.dialect import Dialect
from bide.stores.sql.transactions import Idle

T = TypeVar("T")
SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
SOON = 3.0
"""Seconds within which a server that is there answers what costs it nothing."""
ECHO = 10.0
"""Seconds without an answer after which a connection is asked whether it is there."""


class TableConnections(ABC):
    """Open while a table, a `user`, is: of one source there may be many. At most `most` are kept, a minute each."""

    dialect: ClassVar[Dialect]

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
        self._idle: Idle[Any] = Idle(lambda connection: connection.drop())
        self._users: set[object] = set()

    @abstractmethod
    async def _connect(self, *, looking: bool) -> Any: ...
    @abstractmethod
    async def _begin(self, connection: Any) -> Any:
        """Begin a transaction; what the driver has for it."""

    def open(self, user: object) -> None:
        self._users.add(user)

    async def close(self, user: object) -> None:
        self._users.discard(user)
        if self._users:
            return
        left = [one for one in (self._looking, *self._idle.take_all()) if one is not None]
        self._looking = None
        await asyncio.gather(*(self._tried(one, one.end(within=SOON)) for one in left), return_exceptions=True)

    async def looker(self) -> Any:
        """The connection that looks; a new one if the last broke."""
        if not self._users:
            raise StoreUnavailable(f"{self.address.shown}: not open")
        looking = self._looking
        if looking is not None and looking.usable and time.monotonic() - self.answered > ECHO:
            await self._echo(looking)
        if looking is None or not looking.usable:
            looking = self._looking = await self._connect(looking=True)
        self.answered = time.monotonic()
        return looking

    async def _echo(self, connection: Any) -> None:
        """See whether it answers; if not, it is not usable any more."""
        with suppress(*self.dialect.away):
            await self._tried(connection, connection.ask("SELECT 1"))

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
            except self.dialect.away:
                if idle is None:
                    raise
                self._idle.drop_all()

    async def give_back(self, connection: Any, *, lent: bool) -> None:
        """Keep it for later. `lent`: a handler had it."""
        if lent and connection.usable:
            with suppress(*self.dialect.away):
                await self._tried(connection, connection.reset())
        if not self._users or not connection.usable or len(self._idle) >= self._most:
            connection.drop()
            return
        self._idle.keep(connection)

    async def _tried(self, connection: Any, doing: Awaitable[T], within: float | None = None) -> T:
        """Let go of the connection if it cannot be done in time."""
        try:
            async with asyncio.timeout(SOON if within is None else within):
                return await doing
        except BaseException:
            connection.drop()
            raise
