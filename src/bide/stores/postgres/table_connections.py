"""The connections to a database with watched tables: one that looks, and listens; others for the rows' transactions.

A connection that has been idle may be half open: a firewall has forgotten it, or the machine is gone. So one that has
done nothing for a while is asked for a sign of life before it is used, and so is one that listens, since else nobody
would notice that nothing can be heard any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg

from bide.core.errors import StoreUnavailable
from bide.stores.idle_connections import IdleConnections
from bide.stores.postgres.address import Address
from bide.stores.postgres.connecting import AFRESH, PLANNER, connect
from bide.stores.postgres.errors import NotSent

SILENCE = 30.0
"""Seconds that one statement of ours may take; a handler's own are its own."""
SOON = 3.0
"""Seconds within which a server that is there answers what costs it nothing."""
_ECHO = 10.0
"""Seconds without an answer after which a connection is asked whether it is there."""
_ALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""A machine that is gone without a word holds its rows for three quarters of a minute."""
_RESET = AFRESH + "".join(f"SET {name} = {value};" for name, value in _ALIVE.items())
AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, NotSent)


class TableConnections:
    """Belongs to one event loop. `turn` is held while the one that looks is used."""

    def __init__(self, address: Address, channel: str | None, *, kept: int) -> None:
        self.heard: Callable[[], None] | None = None
        """Called when something is notified, and when nothing can be heard any more."""
        self.turn = asyncio.Lock()
        self._address = address
        self._channel = None if address.pooled else channel
        self._looking: Any = None
        self._answered = 0.0
        self._idle = IdleConnections(kept, lambda connection: connection.terminate())
        self._echo: asyncio.Task[None] | None = None
        self._closed = True

    def open(self) -> None:
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        if self._echo is not None:
            self._echo.cancel()
            self._echo = None
        looking, self._looking = self._looking, None
        await asyncio.gather(*(_let_go(one) for one in (looking, *self._idle.take_all()) if one is not None))

    # --- the one that looks

    async def looker(self) -> Any:
        """The connection that looks; a new one if the last broke, and then it listens anew."""
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: not open")
        looking = self._looking
        if looking is not None and not looking.is_closed() and time.monotonic() - self._answered > _ECHO:
            try:
                await looking.execute("SELECT 1", timeout=SOON)
            except AWAY:
                looking.terminate()
            except BaseException:
                looking.terminate()
                raise
        if looking is None or looking.is_closed():
            looking = await connect(self._address, within=SILENCE, session=PLANNER)
            if self._channel is not None:
                await looking.add_listener(self._channel, self._told)
                looking.add_termination_listener(self._told)
                if self._echo is None:
                    self._echo = asyncio.get_running_loop().create_task(self._listen_on(), name="bide echo")
            self._looking = looking
        self._answered = time.monotonic()
        return looking

    def _told(self, *_: Any) -> None:
        if self.heard is not None and not self._closed:
            self.heard()

    async def _listen_on(self) -> None:
        """Ask the connection that listens for a sign of life, now and then."""
        while True:
            await asyncio.sleep(_ECHO)
            async with self.turn:
                looking = self._looking
                try:
                    await looking.execute("SELECT 1", timeout=SOON)
                    self._answered = time.monotonic()
                except AWAY:
                    looking.terminate()
                    self._told()

    # --- those for transactions

    async def begun(self) -> tuple[Any, Any]:
        """A connection, and the transaction that has just begun on it."""
        while True:
            if self._closed:
                raise StoreUnavailable(f"{self._address.shown}: not open")
            connection = self._idle.pop()
            idle = connection is not None
            if not idle:
                connection = await connect(self._address, within=SILENCE, session=_ALIVE)
            transaction = connection.transaction(isolation="read_committed")
            try:
                async with asyncio.timeout(SOON if idle else SILENCE):
                    await transaction.start()
                return connection, transaction
            except AWAY:
                connection.terminate()
                if not idle:
                    raise
                self._idle.drop_all()
            except BaseException:
                connection.terminate()
                raise

    async def give_back(self, connection: Any, *, lent: bool) -> None:
        """Keep it for later. `lent`: a handler had it, and what it has set is not the next one's."""
        if lent and not self._address.pooled and not connection.is_closed():
            try:
                await connection.execute(_RESET, timeout=SOON)
            except BaseException as error:
                connection.terminate()
                if not isinstance(error, AWAY):
                    raise
        if connection.is_closed() or self._closed:
            connection.terminate()
        else:
            self._idle.put(connection)


async def _let_go(connection: Any) -> None:
    with suppress(*AWAY):
        await connection.close(timeout=SOON)
