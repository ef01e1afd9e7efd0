"""The connections to a PostgreSQL with watched tables. The one that looks also listens, and is missed when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bide.core.table_source import TableSource
from bide.stores.postgres.address import Address
from bide.stores.postgres.connecting import PLANNER, POSTGRES, connect
from bide.stores.sql.table_connections import ECHO, SILENCE, TableConnections

_ALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
"""A machine that is gone without a word holds its rows for three quarters of a minute."""


class PostgresTableConnections(TableConnections):
    dialect = POSTGRES

    def __init__(self, address: Address, source: TableSource, most: int) -> None:
        super().__init__(address, source, most)
        self.heard: set[Callable[[], None]] = set()
        """Called when something is notified, and when nothing can be heard any more."""
        self._channel = None if address.pooled else source.channel
        self._listening: asyncio.Task[None] | None = None

    async def _connect(self, *, looking: bool) -> Any:
        connection = await connect(self.address, within=SILENCE, session=PLANNER if looking else _ALIVE)
        if looking and self._channel is not None:
            await connection.add_listener(self._channel, self._told)
            connection.add_termination_listener(self._told)
            if self._listening is None:
                self._listening = asyncio.get_running_loop().create_task(self._listen_on(), name="bide echo")
        return connection

    async def _begin(self, connection: Any) -> Any:
        transaction = connection.transaction(isolation="read_committed")
        await transaction.start()
        return transaction

    async def close(self, user: object) -> None:
        if self._listening is not None and self._users <= {user}:
            self._listening.cancel()
            self._listening = None
        await super().close(user)

    def _told(self, *_: Any) -> None:
        for heard in tuple(self.heard):
            heard()

    async def _listen_on(self) -> None:
        """Ask for a sign of life now and then: when the connection ends `_told` is called, and it is made anew."""
        while True:
            await asyncio.sleep(ECHO)
            async with self.turn:
                await self._echo(self._looking)
