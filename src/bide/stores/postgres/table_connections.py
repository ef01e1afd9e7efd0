"""The connections to a PostgreSQL with watched tables. The one that looks also listens, and is missed when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bide.core.table_source import TableSource
from bide.stores.postgres.address import Address
from bide.stores.postgres.connecting import AFRESH, PLANNER, connect
from bide.stores.postgres.errors import AWAY
from bide.stores.sql.table import ECHO, SILENCE, SOON, TableConnections

_ALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""A machine that is gone without a word holds its rows for three quarters of a minute."""
_RESET = AFRESH + "".join(f"SET {name} = {value};" for name, value in _ALIVE.items())


class PostgresConnections(TableConnections):
    away = AWAY

    def __init__(self, address: Address, source: TableSource, most: int) -> None:
        super().__init__(address, source, most)
        self.heard: set[Callable[[], None]] = set()
        """Called when something is notified, and when nothing can be heard any more."""
        self._channel = None if address.pooled else source.channel
        self._echo: asyncio.Task[None] | None = None

    async def _connect(self, *, looking: bool) -> Any:
        connection = await connect(self.address, within=SILENCE, session=PLANNER if looking else _ALIVE)
        if looking and self._channel is not None:
            await connection.add_listener(self._channel, self._told)
            connection.add_termination_listener(self._told)
            if self._echo is None:
                self._echo = asyncio.get_running_loop().create_task(self._listen_on(), name="bide echo")
        return connection

    async def _asked(self, connection: Any) -> None:
        await connection.execute("SELECT 1")

    async def _begin(self, connection: Any) -> Any:
        transaction = connection.transaction(isolation="read_committed")
        await transaction.start()
        return transaction

    async def _reset(self, connection: Any) -> None:
        if not self.address.pooled:
            await connection.execute(_RESET)

    def _usable(self, connection: Any) -> bool:
        return not connection.is_closed()

    def drop(self, connection: Any) -> None:
        connection.terminate()

    async def _end(self, connection: Any) -> None:
        await connection.close(timeout=SOON)

    async def close(self, user: object) -> None:
        if self._echo is not None and self._users <= {user}:
            self._echo.cancel()
            self._echo = None
        await super().close(user)

    def _told(self, *_: Any) -> None:
        for heard in tuple(self.heard):
            heard()

    async def _listen_on(self) -> None:
        """Ask for a sign of life now and then: when the connection ends `_told` is called, and it is made anew."""
        while True:
            await asyncio.sleep(ECHO)
            async with self.turn:
                with suppress(*self.away):
                    await self._tried(self._looking, self._asked(self._looking))
