"""The verbs in a caller's or a handler's transaction: task and data are committed together, or not at all.

Besides the missing number, one thing differs from our own connections: every value is written so that it means the same
in every character set, SQL mode and time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.core.records import Settlement
from bide.stores.driver_adapters import ConnectionSource, Driver, MysqlDriver
from bide.stores.mysql.connection import BEGIN, Call, Connection, Rows, by_code, meaning, said
from bide.stores.mysql.lease_batches import Settling
from bide.stores.mysql.queries import THERE_ANYWHERE, Code, Template, in_hexadecimal
from bide.stores.sql.dialect import KeyTaken, RowsMissing
from bide.stores.sql.transactions import (
    ConnectionState,
    JoinedVerbs,
    OwnTransactions,
    RunsInSavepoint,
    Savepoint,
    Unjournaled,
    Work,
    ended,
)

T = TypeVar("T")
_DRIVERS = ("asyncmy", "aiomysql", "pymysql", "MySQLdb")
_SAMPLES = (b"\x00\xff", 1 << 62)
_READ_ONLY = 1792
_NO_SAVEPOINT = 1305
_MARK = "bide_gone"
"""A savepoint that marks a transaction begun in place of one that the server rolled back; the caller has to end it."""


class JoinedCall(RunsInSavepoint, Call):
    """A call within a transaction that is not ours: it has no number, and neither begins nor commits."""

    __slots__ = ("_driver", "_floor")
    utc = False
    quote = staticmethod(in_hexadecimal)
    there = Code(THERE_ANYWHERE.encode())

    def __init__(self, driver: Driver, queries: Mapping[str, Template], floor: int | None) -> None:
        """`floor`: the first token, if the store uses the caller's clock."""
        super().__init__(Unjournaled, driver.raw, queries)
        self._driver = driver
        self._floor = floor

    async def run(self, work: Work[T], repeated: object, **_: Any) -> T:
        """Run `work` in a nested savepoint, so that it can be tried and rolled back alone."""
        await self.send(b"SAVEPOINT bide_call")
        try:
            return await work(self)
        except (KeyTaken, RowsMissing):
            await self.send(b"ROLLBACK TO bide_call")
            raise

    def begin(self, now: Millis | None, most: int = 0) -> list[bytes]:
        if now is None:
            return self.read_clock(None)
        assert self._floor is not None
        return [b"SET @bide_micros = %d, @bide_now = %d, @bide_token = %d" % (self._floor, now, self._floor)]

    def pass_gate(self, micros: int | Code, answer: bytes | None = None) -> list[bytes]:
        return []

    def ending(self) -> list[bytes]:
        return []

    async def begin_snapshot(self) -> None:
        """Do nothing: the isolation level of the caller's transaction applies."""

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """Send the statements in one round trip if the driver can, otherwise one by one."""
        if meanwhile is not None:
            meanwhile()
        wanted = [statement for statement in statements if statement != BEGIN]
        if not wanted:
            return []
        try:
            if type(self._driver.raw).__module__.partition(".")[0] == "asyncmy":
                return await Connection(self._driver.raw).ask(b"; ".join(wanted))
            answers: list[Rows] = []
            for statement in wanted:
                rows = await self._driver.run(statement.decode("ascii"))
                if isinstance(rows, list):  # a statement without a result returns an empty tuple
                    answers.append(rows)
            return answers
        except Exception as error:
            found = by_code(code_of(error) or 0, said(error))
            if isinstance(found, KeyTaken | RowsMissing):
                raise found from error
            raise


def code_of(error: BaseException) -> int | None:
    """The server's number of an error, from any of the drivers."""
    if type(error).__module__.partition(".")[0] in _DRIVERS and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


class MySqlVerbs(JoinedVerbs):
    """The verbs on a connection of any supported driver."""

    accepted = (
        "an open connection to the store's own server, by asyncmy, aiomysql, PyMySQL, mysqlclient, SQLAlchemy (a "
        "Connection or a Session, synchronous or not, over one of these) or Django"
    )
    _place = "server"
    _drivers = (MysqlDriver,)
    _at_once = 500  # MariaDB converts a list of 1000 names to a table, unless a session setting prevents that
    _calls = JoinedCall

    def __init__(self, runtime: Any, source: ConnectionSource, *, own: bool = False) -> None:
        super().__init__(runtime, source, own=own)
        self.settled: list[Settling] = []
        """The leases that our transaction settles, to be noted after its commit."""

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        known = self._runtime.leasing.leased.of(outcomes) if self._own else None
        answers = await super().settle(outcomes, now=now)
        if known is not None:
            self.settled.append(known)
        return answers

    async def _savepoint_on(self, driver: Driver, state: ConnectionState) -> Savepoint:
        if state.gone:
            await self._check_ended(driver, state)
        return Savepoint(driver, gone=partial(self._was_undone, driver, state))

    async def _was_undone(self, driver: Driver, state: ConnectionState, error: Exception) -> bool:
        """Tell whether the server has rolled back the caller's whole transaction, such as after a deadlock.

        Neither the caller nor the driver notices that. So this begins another transaction: otherwise each of the
        caller's further statements would commit on its own.
        """
        if code_of(error) != _NO_SAVEPOINT:
            return False
        state.gone = True
        await driver.command("ROLLBACK", "BEGIN", f"SAVEPOINT {_MARK}")
        return True

    async def _check_ended(self, driver: Driver, state: ConnectionState) -> None:
        """Raise SetupError until the caller has ended the transaction that the server rolled back."""
        try:
            await driver.command(f"RELEASE SAVEPOINT {_MARK}", f"SAVEPOINT {_MARK}")
        except Exception as error:
            if code_of(error) != _NO_SAVEPOINT:
                raise
            state.gone = False
        else:
            raise SetupError(
                f"{self._runtime.where}: the server has undone your transaction in an earlier verb (a deadlock); roll "
                "back, and begin again"
            )

    async def _identity(self, driver: Driver) -> tuple[str, int, str]:
        [row] = await driver.run(self._runtime.joined_queries["identity"].write(in_hexadecimal).decode("ascii"))
        if tuple(row[3:5]) != _SAMPLES:
            raise BadInput("connection", self.connection, "a connection whose converters do not change binary, bigint")
        if row[5]:
            raise SetupError(f"{self._runtime.where}: sql_select_limit cuts off what verbs read; set it to DEFAULT")
        return identity_of(row)

    def _meaning(self, error: Exception, *, adding: bool) -> Exception:
        where = self._runtime.where
        code, package = code_of(error), type(error).__module__.partition(".")[0]
        if code == _READ_ONLY:
            return SetupError(f"{where}: the connection cannot be used now: its transaction is read-only")
        if code:
            return by_code(code, f"{where}: {said(error)}", adding=adding)
        if package in _DRIVERS:
            return SetupError(f"{where}: the connection cannot be used: {said(error)}")
        return meaning(error, where, adding=adding)


def identity_of(row: Sequence[Any]) -> tuple[str, int, str]:
    """The host, the port and the data directory of a server."""
    host, port, data = (one.decode() if isinstance(one, bytes) else one for one in row[:3])
    return str(host), int(port), str(data)


_IN_TRANSACTION = 1
"""The bit in the server status of the last answer that says that a transaction is open."""


class Transactions(OwnTransactions):
    """Our transactions, on asyncmy connections."""

    _options: ClassVar[Mapping[str, Any]] = {"plain": True}

    async def _begin(self, connection: Connection) -> None:
        connection.check_writable(self.address.shown)
        await connection.begin()

    async def _mark(self, connection: Connection) -> None:
        if connection.usable and not connection.driver.server_status & _IN_TRANSACTION:
            raise ended(self.address.shown)
        kept = self._runtime.joined_queries["keep_transaction"].write(
            in_hexadecimal, me=connection.name, number=connection.number, there=Code(THERE_ANYWHERE.encode())
        )
        await connection.ask(kept)

    async def _marked(self, connection: Connection) -> int:
        rows = await self._settling.repeat(lambda call: call.ask("repeated", me=connection.name))
        return int(rows[0][0]) if rows else 0

    def _done(self, joined: MySqlVerbs) -> None:
        self._runtime.leasing.leased.settled(joined.settled)
        super()._done(joined)
