"""One connection for one kind of call, which sends each call once however often that takes.

Each kind (scheduling, leasing, settling, extending, reading) has a lane of its own, so that settling does not wait for
the commit of a schedule. A lane connects when it is first used, and again when the connection broke.

A writing call carries the lane's name and a number that only rises; both are written, with the answer, into the
caller's row, in the same transaction as the work (`gate` in `queries.sql`). So when an answer was lost the call is sent
again: if it was done, the answer is read back, else it is done now. What is still not known when `patience` is over is
OutcomeUnknown, for these tasks alone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncmy.errors import MySQLError

from bide.core.errors import OutcomeUnknown, StoreMismatch, StoreUnavailable
from bide.core.instants import Millis
from bide.stores.lost_answers import refused_later
from bide.stores.mysql.address import Address
from bide.stores.mysql.connecting import Connection, Rows, connect
from bide.stores.mysql.errors import Again, Broken, Fewer, Locked, Lost, NotSent, Shut, Taken, meaning
from bide.stores.mysql.queries import THERE, queries_of
from bide.stores.mysql.statements import Code, Quote, Template, quoted
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.mysql")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_SECOND_BEST = 1.0
"""Seconds that a connection to a replica is read from, before it is looked whether the primary is there again."""
_BETWEEN = b"; "
T = TypeVar("T")


class Repeated(NamedTuple):
    """What the caller's row says of a call that was done before."""

    now: Millis
    micros: int
    answer: bytes | None


class Call:
    """One call on its way: the connection, and what the gate is told."""

    __slots__ = ("_ahead", "_lane", "_limit", "again", "connection", "number", "queries", "sent")
    utc = True
    """Whether the time zone of the connection is UTC."""
    quote: Quote = staticmethod(quoted)
    there = Code(THERE.encode())

    def __init__(self, lane: Lane, connection: Connection, number: int, limit: asyncio.Timeout, *, again: bool) -> None:
        """`limit`: when it is taken for lost."""
        self._ahead: tuple[bytes, ...] = ()
        self._lane = lane
        self._limit = limit
        self.connection = connection
        self.number = number
        self.queries = lane.queries_on(connection)
        self.sent = False
        """Whether something was sent that may be done although no answer came."""
        self.again = again
        """Whether an earlier sending may be done, or under way: then also what changes nothing passes the gate."""

    @property
    def me(self) -> str:
        """The caller, by whose name its writes are known."""
        return self._lane.name

    @property
    def largest(self) -> int:
        """Bytes that may go at once."""
        return self.connection.largest

    def allow(self, seconds: float) -> None:
        """It may take so long from now on, if that is longer than what it may take anyway."""
        ends = asyncio.get_running_loop().time() + seconds
        self._limit.reschedule(max(ends, self._limit.when() or ends))

    def write(self, query: str, **values: Any) -> bytes:
        """A named query with its values."""
        return self.queries[query].write(self.quote, **values)

    def begin(self, now: Millis | None, most: int = 0) -> list[bytes]:
        """The statements that open a transaction and say what time it is, :now or the server's.

        `most`: how many tokens above the clock may be given out.
        """
        if now is None:
            return [self.write("begin"), *self.read_clock(None)]
        return [
            self.write("begin"),
            self.write("raise_floor", now=now, most=most),
            self.write("take_floor", now=now, most=most),
        ]

    def read_clock(self, now: Millis | None) -> list[bytes]:
        """What time it is, for the statements that follow."""
        return [self.write("read_clock", there=self._there(now)), self.write("tell_clock")]

    def look_at_clock(self, now: Millis | None) -> bytes:
        """What time it is, for the caller alone."""
        return self.write("look_at_clock", there=self._there(now))

    def _there(self, now: Millis | None) -> Code | int:
        return self.there if now is None else now * 1000

    def pass_gate(self, micros: int | Code, answer: bytes | None = None) -> list[bytes]:
        """The statements that end a call if it is new, and fail if it is not. `micros`: its highest token."""
        values = {"me": self.me, "number": self.number, "micros": micros, "answer": answer}
        return [self.write("pass_gate", **values), self.write("gate"), self.write("commit")]

    def begin_snapshot(self) -> None:
        """What is sent from now on sees one state of the database. It takes no round trip of its own."""
        self._ahead = self.write("snapshot"), self.write("begin_snapshot")

    def commit(self) -> list[bytes]:
        return [self.write("commit")]

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> list[Rows]:
        """One packet; the rows of each statement that has any. `meanwhile`: what to do until the answer comes."""
        self.sent = self.sent or commits
        if self._ahead:
            statements, self._ahead = (*self._ahead, *statements), ()
        return await self.connection.ask(_BETWEEN.join(statements), meanwhile)

    async def timed(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> list[Rows]:
        """The same, where the first rows are those of the query `clock`."""
        sent = time.monotonic()
        answers = await self.send(*statements, commits=commits, meanwhile=meanwhile)
        if self._lane.time is not None:
            self._lane.time.saw(answers[0][0][1], sent, time.monotonic())
        return answers


Work = Callable[[Call], Awaitable[T]]


class Runs(Protocol):
    """What carries out calls: a lane, or the transaction of somebody else's that they take part in."""

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Repeated, Call], Awaitable[T]],
        *,
        adding: bool = False,
        apart: bool = False,
    ) -> T: ...

    async def read(self, work: Work[T]) -> T: ...


class Lane:
    """The connection, whose turn it is, and the number of the last call. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        address: Address,
        *,
        patience: float,
        silence: float,
        time: ServerTime | None = None,
    ) -> None:
        """`time`: whom to tell what time it is there; None where the caller's clock counts."""
        self.name = name
        self.time = time
        self.patience = patience
        self.resent = 0
        """Calls that had to be sent more than once."""
        self.largest = 0
        """Bytes of a packet that the server takes, once it is known."""
        self.mariadb = True
        """And whether it is a MariaDB."""
        self._address = address
        self._silence = silence
        self._turn = asyncio.Lock()
        self._number = 0
        self._introduced = False
        self._connection: Connection | None = None
        self._closed = False

    def queries_on(self, connection: Connection) -> Mapping[str, Template]:
        return queries_of(self._address.schema, self._address.prefix, mariadb=connection.mariadb)

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Repeated, Call], Awaitable[T]],
        *,
        adding: bool = False,
        apart: bool = False,
    ) -> T:
        """`work`, once. If it was done by a sending whose answer was lost, `repeated` makes its answer.

        Raises what `errors.meaning` finds: Taken and Fewer are left to the caller, and Locked if that wants to be told
        (`apart`). StoreUnavailable: not done; OutcomeUnknown.
        """
        async with self._turn:
            self._number += 1
            return await self._insist(work, repeated, adding=adding, apart=apart)

    async def read(self, work: Work[T]) -> T:
        """`work` that only reads, or leaves nothing that anybody sees. Raises StoreUnavailable: no answer.

        Where the primary is away a replica answers, which may be behind.
        """
        async with self._turn:
            return await self._insist(work, None, writes=False)

    async def repeat(self, work: Work[T], *, apart: bool = False) -> T:
        """`work` that writes, or reads what is to be true of the primary, and may be done twice without harm.

        Else as `run`.
        """
        async with self._turn:
            return await self._insist(work, None, apart=apart)

    async def _insist(
        self,
        work: Work[T],
        repeated: Callable[[Repeated, Call], Awaitable[T]] | None,
        *,
        adding: bool = False,
        apart: bool = False,
        writes: bool = True,
    ) -> T:
        ends = time.monotonic() + self.patience
        pause, maybe = _FIRST_PAUSE, False
        while True:
            call: Call | None = None
            try:
                connection = await self._connected()
                if writes:
                    connection.check_writable(self._address.shown)
                async with asyncio.timeout(self._silence) as limit:
                    call = Call(self, connection, self._number, limit, again=maybe)
                    if repeated is not None and maybe and (row := await self._look_back(call)) is not None:
                        return await repeated(row, call)
                    try:
                        return await work(call)
                    except MySQLError as error:
                        found = meaning(error, self._address.shown, adding=adding)
                        if repeated is None or not isinstance(found, Shut | Taken | Fewer):
                            raise
                        if not isinstance(found, Shut) and not maybe:
                            raise
                        call.sent = False  # it failed before its end, and is undone
                        await self._undo()
                        row = await self._look_back(call)
                        if row is not None:
                            return await repeated(row, call)
                        if not isinstance(found, Shut):
                            raise
                    if maybe and self._introduced:  # nobody heard of it for ten minutes, and its row was forgotten
                        raise OutcomeUnknown(f"{self._address.shown}: what became of a call is no longer known")
                    maybe = False  # to those without a row the gate is shut
                    await self._introduce(call)
                    continue
            except (MySQLError, Broken, OSError, EOFError, TimeoutError, NotSent, Again, UnicodeError) as error:
                found = meaning(error, self._address.shown, adding=adding)
                if isinstance(found, StoreMismatch) and call is not None and call.connection.read_only:
                    found = NotSent(str(found))  # a replica that is just being made, in the place of the primary
                if isinstance(found, Again):
                    await self._undo()
                    if apart and not maybe and isinstance(found, Locked):
                        raise found from error
                elif isinstance(found, Lost | NotSent):
                    # refused: whatever was in front of the refusal is undone
                    if isinstance(found, Lost) and call is not None:
                        maybe = maybe or call.sent or repeated is None  # of which nobody says what commits
                    self._drop()
                else:
                    await self._undo()
                    raise (refused_later(found) if maybe and writes else found) from error
                why = found
            except Exception as error:
                await self._undo()
                if maybe and writes and (unknown := refused_later(error)) is not error:
                    raise unknown from error
                raise
            except BaseException:
                self._drop()  # the statement may be under way still, and the answers are out of step
                raise
            left = ends - time.monotonic()
            if left <= 0:
                text = str(why)
                raise OutcomeUnknown(text) if maybe and writes else StoreUnavailable(text)
            self.resent += 1
            _log.debug("%s is sent again: %s", self.name, why)
            await asyncio.sleep(min(left, pause * (0.5 + random.random())))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _look_back(self, call: Call) -> Repeated | None:
        """The caller's row, if this call was done before; a first sending that is under way is waited for."""
        [rows] = await call.send(call.write("repeated", me=self.name))
        if not rows or rows[0][0] < call.number:
            return None
        [(number, now, micros, answer)] = rows
        if number != call.number:
            raise StoreMismatch(f"{self._address.shown}: another process calls itself {self.name}")
        return Repeated(now, micros, answer)

    async def _introduce(self, call: Call) -> None:
        """Make the caller's row, which is not there yet."""
        self._introduced = True
        await call.send(call.write("new_caller", me=self.name, there=call.there))

    async def _connected(self) -> Connection:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        if self._connection is None or not self._connection.usable or self._second_best(self._connection):
            self._drop()
            self._connection = await connect(self._address, within=self._silence)
            self.largest, self.mariadb = self._connection.largest, self._connection.mariadb
        return self._connection

    def _second_best(self, connection: Connection) -> bool:
        """Whether it is to a replica, and it is time to see whether the primary is there again."""
        return (
            connection.read_only
            and len(self._address.hosts) > 1
            and time.monotonic() - connection.made_at >= _SECOND_BEST
        )

    async def _undo(self) -> None:
        """Leave the transaction, if one is open."""
        connection = self._connection
        if connection is not None and connection.usable:
            try:
                async with asyncio.timeout(self._silence):
                    await connection.ask("ROLLBACK")
            except (MySQLError, Broken, OSError, TimeoutError):
                self._drop()
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    async def close(self) -> None:
        """Whatever is under way is finished first."""
        async with self._turn:
            self._closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close(within=self._silence)
