"""The verbs in a caller's or a handler's transaction: task and data are committed together, or not at all.

Besides the missing number, two things differ from our own connections. The lock on the counter of tokens is released
at once. And the planner keeps its default settings, since ours would also affect the caller's statements. Without
them, plans are still good even for a table that was never analyzed, provided that they are made for its present size:
so each statement is planned again, and no plan from the time when the table was empty is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import asyncpg

from bide.core.errors import BadInput, SetupError
from bide.core.payloads import AT_ONCE
from bide.stores.driver_adapters import AsyncpgDriver, Driver, PsycopgDriver
from bide.stores.postgres.connection import CALLS_OF_A_ROW, Call, by_code, meaning, said
from bide.stores.resending import Lost
from bide.stores.sql.transactions import (
    ConnectionState,
    JoinedVerbs,
    OwnTransactions,
    RunsInSavepoint,
    Savepoint,
    Unjournaled,
    ended,
)

SAMPLES: Sequence[Any] = (
    ["a\u00e9", None], [1 << 62, None], [True, False], [b"\x00\xff", None], "a\u00e9", b"\x00\xff", -1,
)  # fmt: skip
_UNUSABLE = {
    "25P02": "an earlier statement of its transaction failed: roll that back",
    "25006": "its transaction is read-only",
}


class JoinedCall(RunsInSavepoint, Call):
    """A call within a transaction that is not ours: it has no number, and neither begins nor commits."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver, queries: Mapping[str, str], _: object) -> None:
        super().__init__(Unjournaled, driver.raw, queries)
        self._driver = driver

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        return await self._driver.run(self.queries[query], arguments)  # type: ignore[return-value]

    async def begin(self, how: str = "") -> None:
        """Do nothing: the transaction has begun already."""


class PostgresVerbs(JoinedVerbs):
    """The verbs on a connection of asyncpg or psycopg."""

    accepted = (
        "an open connection to the store's own database, by asyncpg, psycopg (3), SQLAlchemy (a Connection or a "
        "Session, synchronous or not, over one of these two) or Django (over psycopg 3)"
    )
    _place = "database"
    _drivers = AsyncpgDriver, PsycopgDriver
    _at_once = AT_ONCE
    _calls = JoinedCall

    async def _savepoint_on(self, driver: Driver, state: ConnectionState) -> Savepoint:
        queries = self._runtime.joined_queries
        return Savepoint(driver, first=(queries["begin_verb"],), last=(queries["end_verb"],))

    async def _identity(self, driver: Driver) -> object | None:
        """The OID of the database, and the start time of its server, to the microsecond."""
        [row] = await driver.run(self._runtime.joined_queries["identity"], SAMPLES)
        database, started, has_tables, *came = row
        if list(came) != list(SAMPLES):
            raise BadInput(
                "connection",
                self.connection,
                "a connection whose codecs leave text, bytea, bigint, boolean and arrays of them unchanged",
            )
        return (database, started) if has_tables else None

    def _meaning(self, error: Exception, *, adding: bool) -> Exception:
        where = self._runtime.where
        code = getattr(error, "sqlstate", None)
        kind = type(error).__name__
        if isinstance(code, str) and code in _UNUSABLE:
            return SetupError(f"{where}: the connection cannot be used now: {_UNUSABLE[code]}")
        if type(error).__module__.partition(".")[0] == "psycopg":
            if isinstance(code, str):
                return by_code(code, f"{where}: {error}", adding=adding)
            if kind == "DataError":
                return BadInput("task", str(error), "text without NUL or lone surrogates, and integers of 64 bits")
            if kind == "OperationalError":
                return Lost(f"{where}: {said(error)}")
        elif kind != "InterfaceError":
            return meaning(error, where, adding=adding)
        return SetupError(f"{where}: the connection cannot be used: {said(error)}")


_SESSION = {
    # the locks of a vanished process are released after half a minute
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
_CONSTRAINT: type[Exception] = asyncpg.IntegrityConstraintViolationError


class Transactions(OwnTransactions):
    """Our transactions, on asyncpg connections."""

    _options: ClassVar[Mapping[str, Any]] = {"session": _SESSION}

    async def _begin(self, connection: Any) -> None:
        number = connection.number
        if number % CALLS_OF_A_ROW == 0:  # see `connection`; the old row is deleted after ten minutes
            connection.name = f"{connection.name.partition('.')[0]}.{number}"
        await connection.begin()
        await connection.execute(f"SET LOCAL bide.transaction = '{number}'")

    async def _mark(self, connection: Any) -> None:
        keep = self._runtime.joined_queries["keep_transaction"]
        if not await connection.fetch(keep, connection.name, connection.number):
            raise ended(self.address.shown)

    async def _commit(self, connection: Any) -> None:
        await connection.begun.commit()

    async def _marked(self, connection: Any) -> int:
        [(number,)] = await self._settling.read(lambda call: call.fetch("was_kept", connection.name))
        return int(number)

    def _refused(self, error: Exception, found: Exception) -> Exception:
        if isinstance(error, _CONSTRAINT):
            return error  # a deferred constraint of the handler's tables: raised like any other error of its statements
        if isinstance(error, asyncpg.InFailedSQLTransactionError):
            return SetupError(
                f"{self.address.shown}: a statement inside failed, so the transaction cannot be committed; "
                "let its error leave the block, or put the statement into a savepoint (`conn.transaction()`)"
            )
        return super()._refused(error, found)
