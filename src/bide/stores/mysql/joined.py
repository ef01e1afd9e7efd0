"""The verbs in a transaction that is the caller's, or a handler's: task and data are committed together, or not at all.

One more thing than the missing number is different from our own connections: every value is written so that it means
the same whatever character set, SQL mode and time zone the connection has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.core.records import Settlement
from bide.stores.driver_adapters import ConnectionSource, Driver, MysqlDriver
from bide.stores.mysql import operations
from bide.stores.mysql.connection import Call, Connection, Rows, by_code, connect, meaning, said
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
"""A savepoint in a transaction that was begun for one that the server has undone: there until the caller ends that."""
_AT_ONCE = 500
"""Names in one statement: MariaDB makes a table of a list of 1000, unless the connection has a setting against it."""
ACCEPTED = (
    "an open connection to the store's own server, by asyncmy, aiomysql, PyMySQL, mysqlclient, SQLAlchemy (a "
    "Connection or a Session, synchronous or not, over one of these) or Django"
)


class JoinedCall(RunsInSavepoint, Call):
    """A call within a transaction that is not ours: without a number, and nothing to begin or to commit."""

    __slots__ = ("_driver", "_floor")
    utc = False
    quote = staticmethod(in_hexadecimal)
    there = Code(THERE_ANYWHERE.encode())

    def __init__(self, driver: Driver, queries: Mapping[str, Template], floor: int | None) -> None:
        """`floor`: the first token, where the caller's clock counts."""
        super().__init__(Unjournaled, driver.raw, queries)
        self._driver = driver
        self._floor = floor

    async def run(self, work: Work[T], repeated: object, **_: Any) -> T:
        """Within one savepoint more, for what is tried first."""
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
        """The transaction's own isolation level says what is seen."""

    async def commit(self) -> None:
        """The transaction is the caller's to commit."""

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """Send them in one round trip where the driver can; else one by one."""
        if meanwhile is not None:
            meanwhile()
        begin = self.queries["begin"].write()
        wanted = [statement for statement in statements if statement != begin]
        if not wanted:
            return []
        try:
            if type(self._driver.raw).__module__.partition(".")[0] == "asyncmy":
                return await Connection(self._driver.raw).ask(b"; ".join(wanted))
            answers: list[Rows] = []
            for statement in wanted:
                rows = await self._driver.run(statement.decode("ascii"))
                if isinstance(rows, list):  # what has no rows to give answers with an empty tuple
                    answers.append(rows)
            return answers
        except Exception as error:
            found = by_code(code_of(error) or 0, said(error))
            if isinstance(found, KeyTaken | RowsMissing):
                raise found from error
            raise


def code_of(error: BaseException) -> int | None:
    """The number that the server gave an error, whichever driver reports it."""
    if type(error).__module__.partition(".")[0] in _DRIVERS and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


class MySqlVerbs(JoinedVerbs):
    """The verbs on a connection of any of the drivers."""

    accepted = ACCEPTED
    _place = "server"
    _drivers = (MysqlDriver,)
    _at_once = _AT_ONCE
    _add, _settle = operations.add, operations.settle

    def __init__(self, runtime: Any, source: ConnectionSource, *, own: bool = False) -> None:
        super().__init__(runtime, source, own=own)
        self.settled: list[Settling] = []
        """The tasks that a transaction of ours has settled, once it is committed."""

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        known = self._runtime.leasing.leased.of(outcomes) if self._own else None
        answers = await super().settle(outcomes, now=now)
        if known is not None:
            self.settled.append(known)
        return answers

    def _call(self, driver: Driver, floor: int | None) -> JoinedCall:
        return JoinedCall(driver, self._runtime.joined_queries, floor)

    async def _savepoint_on(self, driver: Driver, state: ConnectionState) -> Savepoint:
        if state.gone:
            await self._check_ended(driver, state)
        return Savepoint(driver, gone=partial(self._was_undone, driver, state))

    async def _was_undone(self, driver: Driver, state: ConnectionState, error: Exception) -> bool:
        """Tell whether the server has undone all of the caller's transaction, as by a deadlock.

        Neither the caller nor the driver knows, so another one is begun: else each statement would commit by itself.
        """
        if code_of(error) != _NO_SAVEPOINT:
            return False
        state.gone = True
        await driver.command("ROLLBACK", "BEGIN", f"SAVEPOINT {_MARK}")
        return True

    async def _check_ended(self, driver: Driver, state: ConnectionState) -> None:
        """Raises SetupError while the caller has not ended a transaction that the server has undone."""
        try:
            await driver.command(f"RELEASE SAVEPOINT {_MARK}", f"SAVEPOINT {_MARK}")
        except Exception as error:
            if code_of(error) != _NO_SAVEPOINT:
                raise
            state.gone = False
        else:
            raise SetupError(
                f"{self._runtime.where}: the server has undone your transaction in an earlier verb (a deadlock): roll "
                "back, and begin anew"
            )

    async def _identity(self, driver: Driver) -> tuple[str, int, str]:
        [row] = await driver.run(self._runtime.joined_queries["identity"].write(in_hexadecimal).decode("ascii"))
        if tuple(row[3:]) != _SAMPLES:
            raise BadInput("connection", self.connection, "a connection whose converters leave binary and bigint alone")
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
"""The bit of the server's status that says so, as of its last answer."""


class Transactions(OwnTransactions):
    """Transactions on asyncmy's connections."""

    async def _connect(self) -> Connection:
        return await connect(self.address, within=self._silence, plain=True)

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
        async def read(call: Call) -> int:
            [rows] = await call.send(call.write("repeated", me=connection.name))
            return int(rows[0][0]) if rows else 0

        return int(await self._keep.repeat(read))

    def _done(self, joined: MySqlVerbs) -> None:
        self._runtime.leasing.leased.settled(joined.settled)
        super()._done(joined)
