"""The connections to a database with watched tables: one that looks, and others for the rows' transactions."""

from __future__ import annotations

import asyncio
import time

from asyncmy.errors import MySQLError

from bide.core.errors import StoreUnavailable
from bide.stores.idle_connections import IdleConnections
from bide.stores.mysql.address import Address
from bide.stores.mysql.connecting import AFRESH, Connection, connect
from bide.stores.mysql.errors import Broken

SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
SOON = 3.0
"""Seconds within which a server that is there answers what costs it nothing."""
_ECHO = 10.0
"""Seconds without an answer after which a connection is asked whether it is there."""
_AWAY = (MySQLError, Broken, OSError, TimeoutError)


class TableConnections:
    """Belongs to one event loop."""

    def __init__(self, address: Address, *, kept: int) -> None:
        self._address = address
        self._looking: Connection | None = None
        self._answered = 0.0
        self._idle = IdleConnections(kept, Connection.drop)
        self._closed = True

    def open(self) -> None:
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        looking, self._looking = self._looking, None
        left = (one for one in (looking, *self._idle.take_all()) if one is not None)
        await asyncio.gather(*(connection.close(within=SOON) for connection in left))

    async def looker(self) -> Connection:
        """The connection that looks. One that was idle may be half open, and is asked for a sign of life."""
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        looking = self._looking
        if looking is not None and looking.usable and time.monotonic() - self._answered > _ECHO:
            await _asked(looking, "DO 0")
        if looking is None or not looking.usable:
            looking = self._looking = await connect(self._address, within=SILENCE, plain=True)
        self._answered = time.monotonic()
        return looking

    async def begun(self) -> Connection:
        """A connection on which a transaction has just begun."""
        while True:
            if self._closed:
                raise StoreUnavailable(f"{self._address.shown}: not open")
            idle: Connection | None = self._idle.pop()
            connection = idle or await connect(self._address, within=SILENCE, plain=True)
            begin = f"{AFRESH}; BEGIN; SAVEPOINT bide_row"
            if idle is None:
                await _asked(connection, begin, within=SILENCE, raises=True)
            elif not await _asked(connection, begin):
                self._idle.drop_all()
                continue
            return connection

    async def give_back(self, connection: Connection, *, lent: bool) -> None:
        """Keep it for later. `lent`: a handler had it, and what it has set or locked is not the next one's."""
        try:
            if lent and connection.usable:
                async with asyncio.timeout(SOON):
                    await connection.reset()
        except _AWAY:
            connection.drop()
        except BaseException:
            connection.drop()
            raise
        if connection.usable and not self._closed:
            self._idle.put(connection)
        else:
            connection.drop()


async def _asked(connection: Connection, packet: str, *, within: float = SOON, raises: bool = False) -> bool:
    """Whether it was done; else the connection is let go of."""
    try:
        async with asyncio.timeout(within):
            await connection.ask(packet)
        return True
    except BaseException as error:
        connection.drop()
        if raises or not isinstance(error, _AWAY):
            raise
        return False
