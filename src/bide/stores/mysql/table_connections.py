"""The connections to a MySQL or MariaDB with watched tables."""

from __future__ import annotations

from asyncmy.errors import MySQLError

from bide.stores.mysql.connecting import AFRESH, Connection, connect
from bide.stores.mysql.errors import Broken
from bide.stores.sql.errors import NotSent
from bide.stores.sql.table import SILENCE, SOON, TableConnections


class MySqlConnections(TableConnections):
    """Each transaction begins with a savepoint, which is gone if a handler has ended it."""

    away = (MySQLError, Broken, NotSent, OSError, TimeoutError)

    async def _connect(self, *, looking: bool) -> Connection:
        return await connect(self.address, within=SILENCE, plain=True)

    async def _asked(self, connection: Connection) -> None:
        await connection.ask("DO 0")

    async def _begin(self, connection: Connection) -> None:
        await connection.ask(f"{AFRESH}; BEGIN; SAVEPOINT bide_row")

    async def _reset(self, connection: Connection) -> None:
        await connection.reset()

    def _usable(self, connection: Connection) -> bool:
        return connection.usable

    def drop(self, connection: Connection) -> None:
        connection.drop()

    async def _end(self, connection: Connection) -> None:
        await connection.end(within=SOON)
