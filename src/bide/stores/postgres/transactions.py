"""PostgreSQL's part of the transactions that a handler's statements take part in: the planner is the handler's."""

from __future__ import annotations

from typing import Any

import asyncpg

from bide.core.errors import SetupError
from bide.stores.postgres.connecting import connect
from bide.stores.postgres.joined import JoinedVerbs
from bide.stores.postgres.journaled_connection import CALLS_OF_A_ROW, Call
from bide.stores.sql.transactions import Lent, Own, OwnTransactions, ended

_SESSION = {
    # a process that is gone without a word keeps its locks for half a minute
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
_CONSTRAINT: type[Exception] = asyncpg.IntegrityConstraintViolationError


class _Lent(Lent):
    def __init__(self, connection: Any, name: str) -> None:
        super().__init__(connection, name)
        self.first_name = name
        self.transaction: Any = None
        """The driver's own, so that a handler may have savepoints in it: `conn.transaction()`."""


class OwnTransaction(Own, JoinedVerbs):
    """The verbs while the transaction is open."""


class Transactions(OwnTransactions):
    """On asyncpg's connections."""

    async def _connect(self, name: str) -> _Lent:
        return _Lent(await connect(self._address, within=self._silence, session=_SESSION), name)

    async def _begin(self, lent: _Lent) -> None:
        if (
            lent.number % CALLS_OF_A_ROW == 0
        ):  # see `journaled_connection`; the row before it is forgotten in ten minutes
            lent.name = f"{lent.first_name}.{lent.number}"
        lent.transaction = lent.connection.transaction(isolation="read_committed")
        await lent.transaction.start()
        await lent.connection.execute(f"SET LOCAL bide.transaction = '{lent.number}'")

    async def _mark(self, lent: _Lent) -> None:
        if not await lent.connection.fetch(self._runtime.joined_queries["keep_transaction"], lent.name, lent.number):
            raise ended(self._address.shown)

    async def _commit(self, lent: _Lent) -> None:
        await lent.transaction.commit()

    async def _marked(self, lent: _Lent) -> int:
        async def look(call: Call) -> int:
            [(number,)] = await call.fetch("was_kept", lent.name)
            return int(number)

        return int(await self._keep.read(look))

    def _refused(self, error: Exception, found: Exception) -> Exception:
        if isinstance(error, _CONSTRAINT):
            return error  # a constraint of the handler's tables that the commit looks at: as any other error of theirs
        if isinstance(error, asyncpg.InFailedSQLTransactionError):
            return SetupError(
                f"{self._address.shown}: a statement inside failed, so the transaction cannot be committed; "
                "let its error out of the block, or put the statement into a savepoint (`conn.transaction()`)"
            )
        return super()._refused(error, found)

    async def _rollback(self, lent: _Lent) -> None:
        if lent.connection.is_in_transaction():
            await lent.transaction.rollback()
        else:  # somebody ended it, and the driver does not know
            lent.connection.terminate()

    def _joined(self, lent: _Lent) -> OwnTransaction:
        return OwnTransaction(self._runtime, lent.connection)
