"""The verbs in a transaction that is the caller's: task and data are committed together, or not at all.

Each verb is the very operation that a lane runs, within a savepoint: done whole or not at all, and the transaction
around it can go on. Two things are different from our own connections. The call has no number, since it needs none:
whether it was done is whether that transaction was committed. And every value is written so that it means the same
whatever character set, SQL mode and time zone the connection has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from bide.core.answers import Answer
from bide.core.errors import BadInput, OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement, Topic
from bide.stores.batches import Conflicts, merge_earliest, slices
from bide.stores.borrowed import Borrowed, Driver
from bide.stores.mysql import adding, operations, reading
from bide.stores.mysql.connecting import Connection, Rows
from bide.stores.mysql.errors import Again, Fewer, Locked, Lost, NotSent, Taken, by_code, meaning, said
from bide.stores.mysql.lane import Call, Repeated, Runs, Work
from bide.stores.mysql.queries import THERE_ANYWHERE
from bide.stores.mysql.statements import Code, Template, in_hexadecimal
from bide.stores.whole import Known, Whole

T = TypeVar("T")
_DRIVERS = ("asyncmy", "aiomysql", "pymysql", "MySQLdb")
_SAMPLES = (b"\x00\xff", 1 << 62)
_READ_ONLY = 1792
_NO_SAVEPOINT = 1305
_MARK = "bide_gone"
"""A savepoint in a transaction that was begun for one that the server has undone: there until the caller ends that."""
_AT_ONCE = 500
"""Names in one statement: MariaDB makes a table of a list of 1000, unless the connection was told not to."""
ACCEPTED = (
    "an open connection to the store's own server, by asyncmy, aiomysql, PyMySQL, mysqlclient, SQLAlchemy (a "
    "Connection or a Session, synchronous or not, over one of these) or Django"
)


class Identity(NamedTuple):
    """Of a server."""

    host: str
    port: int
    data: str


class JoinedCall(Call):
    """A call within a transaction that is not ours: without a number, and nothing to begin or to commit."""

    __slots__ = ("_driver", "_floor")
    utc = False
    quote = staticmethod(in_hexadecimal)
    there = Code(THERE_ANYWHERE.encode())

    def __init__(self, driver: Driver, queries: Mapping[str, Template], floor: int | None) -> None:
        """`floor`: the first token, where the caller's clock counts."""
        self._driver = driver
        self._floor = floor
        self.queries = queries
        self.number = 0
        self.sent = self.again = False

    def begin(self, now: Millis | None, most: int = 0) -> list[bytes]:
        if now is None:
            return self.read_clock(None)
        assert self._floor is not None
        return [b"SET @bide_micros = %d, @bide_now = %d, @bide_token = %d" % (self._floor, now, self._floor)]

    def pass_gate(self, micros: int | Code, answer: bytes | None = None) -> list[bytes]:
        return []

    def begin_snapshot(self) -> None:
        """The transaction's own isolation level says what is seen."""

    def commit(self) -> list[bytes]:
        return []

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> list[Rows]:
        """In one round trip where the driver can; else one by one."""
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
            if isinstance(found, Taken | Fewer):
                raise found from error
            raise

    async def timed(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> list[Rows]:
        return await self.send(*statements, commits=commits, meanwhile=meanwhile)


def code_of(error: BaseException) -> int | None:
    """The number that the server gave an error, whichever driver reports it."""
    if type(error).__module__.partition(".")[0] in _DRIVERS and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


class Joins:
    """What the verbs have of the open store."""

    def __init__(
        self,
        where: str,
        schema: str,
        queries: Mapping[str, Template],
        *,
        now: Callable[[Millis], Millis | None],
        about: Callable[[Millis], Millis],
        reserve: Callable[[Millis, int], Awaitable[int]],
        identity: Callable[[Identity], Awaitable[bool]],
    ) -> None:
        """`reserve`: tokens, where the caller's clock counts. `identity`: whether this is the store's own server."""
        self.where = where
        self.schema = schema
        self.queries = queries
        self.now = now
        self.about = about
        self.reserve = reserve
        self.identity = identity
        self.known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class JoinedVerbs:
    """The verbs on one connection. Each is done whole or not at all, and leaves the transaction around it as it is."""

    def __init__(self, joins: Joins, connection: Any) -> None:
        self._joins = joins
        self._connection = connection
        self.wakes: dict[Topic, Millis] = {}
        """What this transaction makes wake earlier, to be told once it is committed."""

    @property
    def connection(self) -> Any:
        """The connection, for statements of your own."""
        return self._connection

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        conflicts = Conflicts()

        async def operation(
            lane: Runs, part: Sequence[NewTask], there: Millis | None, about: Millis, tell: operations.Tell
        ) -> list[Answer]:
            return await adding.add(lane, part, there, about, tell, conflicts)

        return await self._write(operation, tasks, now, adding=True)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write(operations.change, changes, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write(operations.settle, outcomes, now)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return [found for part in slices(refs, _AT_ONCE) for found in await reading.get(self, part)]

    async def find(self, where: Filter, page: Page) -> Found:
        return await reading.find(self, where, page)

    async def _write(self, operation: Any, asked: Sequence[Any], now: Millis, *, adding: bool = False) -> list[Any]:
        if not asked:
            return []
        joins = self._joins
        wakes: dict[Topic, Millis] = {}
        answers: list[Any] = []
        there = joins.now(now)
        floor = None if there is None else await joins.reserve(there, 2 * len(asked))

        async def work(call: Call) -> None:
            whole = _Whole(call)
            for part in slices(asked, _AT_ONCE):
                answers.extend(await operation(whole, part, there, joins.about(now), partial(merge_earliest, wakes)))

        await self._savepoint(work, floor=floor, adding=adding)
        merge_earliest(self.wakes, wakes)
        return answers

    # --- as a lane

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Repeated, Call], Awaitable[T]],
        *,
        adding: bool = False,
        apart: bool = False,
    ) -> T:
        return await self._savepoint(work, adding=adding)

    async def read(self, work: Work[T]) -> T:
        return await self._savepoint(work)

    async def _savepoint(self, work: Work[T], *, floor: int | None = None, adding: bool = False) -> T:
        """`work`, whole or not at all."""
        whole: Whole | None = None
        try:
            driver = await self._driver()
            known = self._joins.known.setdefault(driver.raw, Known(asynchronous=driver.asynchronous))
            async with known.turn:
                if known.gone:
                    await self._check_ended(driver, known)
                whole = Whole(driver, gone=partial(self._was_undone, driver, known))
                async with whole:
                    if not known.ours:
                        await self._look(driver)
                        known.ours = True
                    return await work(JoinedCall(driver, self._joins.queries, floor))
        except Exception as error:
            found = self._meaning(error, adding=adding, committing=whole is not None and whole.committing)
            if found is error:
                raise
            raise found from error

    async def _driver(self) -> Driver:
        raise NotImplementedError

    async def _was_undone(self, driver: Driver, known: Known, error: Exception) -> bool:
        """Whether the server has undone all of the caller's transaction, as by a deadlock. Nobody has told the caller
        or the driver, so another one is begun: what comes is not committed statement by statement."""
        if code_of(error) != _NO_SAVEPOINT:
            return False
        known.gone = True
        await driver.command("ROLLBACK", "BEGIN", f"SAVEPOINT {_MARK}")
        return True

    async def _check_ended(self, driver: Driver, known: Known) -> None:
        """Raises SetupError while the caller has not ended a transaction that the server has undone."""
        try:
            await driver.command(f"RELEASE SAVEPOINT {_MARK}", f"SAVEPOINT {_MARK}")
        except Exception as error:
            if code_of(error) != _NO_SAVEPOINT:
                raise
            known.gone = False
        else:
            raise SetupError(
                f"{self._joins.where}: the server has undone your transaction in an earlier verb (a deadlock): roll "
                "back, and begin anew"
            )

    async def _look(self, driver: Driver) -> None:
        """Whether it is a connection to the store's own server, and gives what our statements take. BadInput."""
        [row] = await driver.run(self._joins.queries["identity"].write(in_hexadecimal).decode("ascii"))
        if tuple(row[3:]) != _SAMPLES:
            raise BadInput(
                "connection", self._connection, "a connection whose converters leave binary and bigint alone"
            )
        if not await self._joins.identity(identity_of(row)):
            raise BadInput(
                "connection", self._connection, f"{ACCEPTED}: this one is to another server than {self._joins.where}"
            )

    def _meaning(self, error: Exception, *, adding: bool, committing: bool) -> Exception:
        where = self._joins.where
        code, package = code_of(error), type(error).__module__.partition(".")[0]
        found: Exception
        if code == _READ_ONLY:
            return SetupError(f"{where}: the connection cannot be used now: its transaction is read-only")
        if code:
            found = by_code(code, f"{where}: {said(error)}", adding=adding)
        elif package in _DRIVERS:
            found = SetupError(f"{where}: the connection cannot be used: {said(error)}")
        else:
            found = meaning(error, where, adding=adding)
        if isinstance(found, Lost):
            text = f"{found}; its transaction is gone with it"
            return OutcomeUnknown(str(found)) if committing else StoreUnavailable(text)
        if isinstance(found, Locked):
            return StoreUnavailable(f"{found}: another transaction holds the task; nothing was done")
        if isinstance(found, Again | NotSent):
            return StoreUnavailable(f"{found}; nothing was done: begin the transaction anew")
        return found


class _Whole:
    """A lane for an operation that is within a savepoint already: one more, for what is tried first."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Repeated, Call], Awaitable[T]],
        *,
        adding: bool = False,
        apart: bool = False,
    ) -> T:
        call = self._call
        await call.send(b"SAVEPOINT bide_call")
        try:
            return await work(call)
        except (Taken, Fewer):
            await call.send(b"ROLLBACK TO bide_call")
            raise

    async def read(self, work: Work[T]) -> T:
        return await work(self._call)


def identity_of(row: Sequence[Any]) -> Identity:
    host, port, data = (one.decode() if isinstance(one, bytes) else one for one in row[:3])
    return Identity(str(host), int(port), str(data))


class CallersConnection(JoinedVerbs):
    """The verbs on a connection that the caller opened, in whatever transaction it is in.

    If it is in none, and none begins by itself with a statement, the verb is one of its own.
    """

    def __init__(self, joins: Joins, lent: Borrowed) -> None:
        super().__init__(joins, lent.given)
        self._lent = lent

    async def _driver(self) -> Driver:
        driver = await self._lent.driver()
        if type(driver).__name__ != "MysqlDriver":
            raise BadInput("connection", self._connection, ACCEPTED)
        if driver.closed:
            raise SetupError(f"{self._joins.where}: the connection is closed")
        return driver
