"""One connection for one kind of call, on which each call is done once, however often it is sent.

Each kind (writing, leasing, settling and extending, reading) has its own connection, so that settling does not wait
for the commit of a schedule. The connection is opened when it is first used, and reopened after it breaks.

A writing call carries the caller's name and a number that only rises. The transaction that does the work also writes
the number and the answer into the caller's row (`gate` in `queries.sql`). So a call whose answer was lost is sent
again (see `resending`): if it was done before, the gate stops it and the answer is read back; otherwise it is done
now.

An open transaction of the application that has changed a task keeps that row locked until it ends. Batches skip such
rows, and `LockedRows` retries those tasks in the background, so that only their own callers wait.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreError, StoreMismatch, StoreUnavailable
from bide.core.records import Topic
from bide.ports import Pending
from bide.stores.resending import Lost, NotSent, Resending
from bide.stores.server import ServerTime
from bide.stores.sql.dialect import AlreadyApplied, Dialect, KeyTaken, LockTimeout, RowsMissing, TransactionConflict

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
Ask = Callable[[Any, Sequence[Any]], Awaitable[list[Any]]]
"""Makes a call about a part of a batch, on a connection of the store."""


class RowLocked(StoreUnavailable):
    """Not done: another open transaction keeps the task locked."""


class LockedRows:
    """Retries calls about locked tasks until the lock is released or patience is over. Belongs to one event loop."""

    def __init__(self, try_again: Callable[[Sequence[Any], Ask], Awaitable[list[Any]]], where: str) -> None:
        """`try_again`: repeats a call about tasks that were locked; answers RowLocked for each that still is."""
        self.names: Counter[tuple[Topic, str]] = Counter()
        """The tasks being retried, each with the number of its pending calls."""
        self._try_again = try_again
        self._where = where
        self._waiting: set[asyncio.Task[None]] = set()

    def answers(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        """`answers` with a Pending in the place of each RowLocked; `ask` makes the call again."""
        if is_among(RowLocked, answers):
            places = [place for place, answer in enumerate(answers) if type(answer) is RowLocked]
            loop = asyncio.get_running_loop()
            for place in places:
                answers[place], name = Pending(loop=loop), (asked[place].topic, asked[place].key)
                self.names[name] += 1
                answers[place].add_done_callback(partial(self._let_go, name))
            again = self._again([(asked[place], answers[place]) for place in places], ask, patience)
            task = loop.create_task(again, name="bide held")
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        return answers

    def _let_go(self, name: tuple[Topic, str], _: object) -> None:
        self.names[name] -= 1
        if not self.names[name]:
            del self.names[name]

    async def _again(self, left: list[tuple[Any, Pending[Any]]], ask: Ask, patience: float) -> None:
        ends, pause = time.monotonic() + patience, _FIRST_PAUSE
        try:
            while left:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                try:
                    answers = await self._try_again([one for one, _ in left], ask)
                except PartlyFailed as error:
                    answers = list(error.answers)
                except StoreError as error:
                    answers = [error] * len(left)
                if time.monotonic() >= ends:
                    over = StoreUnavailable(
                        f"{self._where}: another open transaction keeps the task locked; nothing was done"
                    )
                    answers = [over if type(answer) is RowLocked else answer for answer in answers]
                for (_, future), answer in zip(left, answers, strict=True):
                    if type(answer) is not RowLocked and not future.done():
                        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
                left = [pair for pair, answer in zip(left, answers, strict=True) if type(answer) is RowLocked]
        finally:
            for _, future in left:
                if not future.done():
                    future.set_exception(StoreUnavailable(f"{self._where}: the store was closed; nothing was done"))

    async def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)


def is_among(kind: type, answers: Sequence[Any]) -> bool:
    """Tell whether any answer is of this kind. Answers have few types, so each type is checked only once."""
    return any(issubclass(one, kind) for one in set(map(type, answers)))


# --- calls

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""The work of a call."""
OnLocked = Literal["wait", "report", "pass", "pass at once"]
"""The treatment of rows that stay locked for longer than our connections wait: send the call again until patience is
over; raise RowLocked; or repeat the work with `call.past` set, which skips them ("pass at once": skip from the
beginning, since some are known to be locked)."""
Repeated = Callable[[Any, Any], Awaitable[T]]
"""Makes the answer of a call that was done before, from the caller's row and further queries."""


class Runs(Protocol):
    """Runs calls: a connection of the store, or a caller's transaction that the calls join."""

    @property
    def passes(self) -> bool:
        """True if it waits for no lock: a call that may skip locked rows does so from the beginning."""

    async def run(
        self, work: Work[T], repeated: Repeated[T], *, locked: OnLocked = "wait", adding: bool = False
    ) -> T: ...


class NumberedCall(ABC):
    """One sending of a call: the connection, and its name and number for the gate."""

    __slots__ = ("_limit", "_of", "connection", "may_be_done", "number", "past", "queries", "sent")

    def __init__(self, of: Any, connection: Any, queries: Any, limit: asyncio.Timeout | None = None) -> None:
        """`of`: the JournaledConnection. `limit`: after this the answer counts as lost."""
        self._of = of
        self._limit = limit
        self.connection = connection
        self.number: int = of.number
        self.queries = queries
        self.may_be_done = False
        """True if an earlier sending may have been done, or may still be under way."""
        self.past = False
        """True if it skips rows that other transactions have locked."""
        self.sent = False
        """True once a statement was sent that may take effect without an answer; in a transaction only its commit."""

    @property
    def caller(self) -> str:
        """The name of the row that stores its number."""
        name: str = self._of.name  # None in a transaction that is not ours
        return name

    def allow(self, seconds: float) -> None:
        """Let the call take up to `seconds` from now, if that is later than its present limit."""
        limit = self._limit
        if limit is not None:
            ends = asyncio.get_running_loop().time() + seconds
            limit.reschedule(max(ends, limit.when() or ends))

    @abstractmethod
    async def ask(self, query: str, **values: Any) -> Any:
        """The rows of a named query. The values must be in the order of the query's parameters."""

    @abstractmethod
    async def introduce(self) -> None:
        """Make the caller's row."""


C = TypeVar("C", bound=NumberedCall)


class JournaledConnection(ABC, Generic[C]):
    """A connection, the lock that serializes its calls, and the last call's number. Belongs to one event loop."""

    _dialect: ClassVar[Dialect]

    def __init__(
        self,
        name: str,
        address: Any,
        *,
        patience: float,
        silence: float,
        time: ServerTime | None = None,
        passes: bool = False,
    ) -> None:
        """`time`: learns the server's time from answers; None: the caller's clock is used. `passes`: see Runs."""
        self.name = name
        """The current name of its row."""
        self.number = 0
        """The number of the last call."""
        self.time = time
        self.passes = passes
        self.patience = patience
        self.resent = 0
        """How often a call was sent again."""
        self._address = address
        self._silence = silence
        self._turn = asyncio.Lock()
        self._introduced = False
        self._connection: Any = None
        self._closed = False

    async def read(self, work: Work[T]) -> T:
        """Run `work` that only reads, or has no lasting effect. Raises StoreUnavailable: no answer."""
        return await self.run(work, None, writes=False)

    async def repeat(self, work: Work[T], *, locked: OnLocked = "wait") -> T:
        """Run `work` that may be done twice without harm, and writes or has to read from the primary.

        Otherwise like `run`.
        """
        return await self.run(work, None, locked=locked)

    async def run(
        self,
        work: Work[T],
        repeated: Repeated[T] | None,
        *,
        locked: OnLocked = "wait",
        adding: bool = False,
        writes: bool = True,
    ) -> T:
        """Send `work` until its outcome is known, or patience is over.

        It is done once: if an earlier sending did it and its answer was lost, `repeated` makes the answer. `repeated`
        None: the work may be done twice.

        Raises the dialect's meaning of an error (the caller handles KeyTaken and RowsMissing); RowLocked, see OnLocked;
        StoreUnavailable: not done; OutcomeUnknown.
        """
        async with self._turn:
            self.number += repeated is not None
            past = locked == "pass at once" or (locked == "pass" and self.passes)
            began, resending = time.monotonic(), None
            while True:
                call: C | None = None
                try:
                    connection = await self._connected(writes=writes)
                    async with asyncio.timeout(self._silence) as limit:
                        call = self._call(connection, limit)
                        call.may_be_done, call.past = resending is not None and resending.may_be_done, past
                        if repeated is not None:
                            return await self._once(call, work, repeated, adding=adding)
                        call.sent = True  # any of its statements may commit
                        return await work(call)
                except Exception as error:
                    resending = resending or Resending(self.patience, since=began)
                    why = self._meaning(error, call, adding=adding)
                    if call is not None and writes:
                        resending.may_be_done = call.may_be_done or (isinstance(why, Lost) and call.sent)
                    if isinstance(why, Lost | NotSent):
                        self._drop()
                    else:  # refused: roll back the statements before it
                        await self._undo()
                        if isinstance(why, LockTimeout) and locked == "pass" and not past:
                            past = True  # keep the number, since nothing was done
                            continue
                        if isinstance(why, LockTimeout) and locked != "wait" and not resending.may_be_done:
                            raise RowLocked(str(why)) from error
                        if not isinstance(why, TransactionConflict):
                            why = resending.refused(why)
                            if why is error:
                                raise
                            raise why from error
                except BaseException:
                    self._drop()  # a statement may still be running, and a transaction open
                    raise
                await resending.pause(str(why))
                self.resent += 1
                self._dialect.log.debug("%s is sent again: %s", self.name, why)

    async def _once(self, call: C, work: Work[T], repeated: Repeated[T], *, adding: bool) -> T:
        """Do `work`, unless an earlier sending has done it: then `repeated` makes its answer."""
        while True:
            if (row := await self._prepare(call)) is not None:
                return await repeated(row, call)
            try:
                return await work(call)
            except Exception as error:
                found = self._meaning(error, call, adding=adding)
                signs = (AlreadyApplied, KeyTaken, RowsMissing) if call.may_be_done else AlreadyApplied
                if not isinstance(found, signs):
                    raise
                await self._undo()
                call.sent = False
                if (row := await self._find_repeated(call)) is not None:
                    return await repeated(row, call)
                if not isinstance(found, AlreadyApplied):
                    raise
            if call.may_be_done and self._introduced:  # idle for ten minutes, so the caller's row was deleted
                raise OutcomeUnknown(f"{self._address.shown}: what became of a call is no longer known")
            call.may_be_done = False  # the gate stops every call of a caller without a row
            self._introduced = True
            try:
                await call.introduce()
            finally:
                call.sent = False

    async def _find_repeated(self, call: C) -> Any:
        """The caller's row, if this call was done before. Waits for an earlier sending that is still under way."""
        rows = await call.ask("repeated", me=self.name)
        if not rows or rows[0][0] < call.number:
            return None
        if rows[0][0] != call.number:
            raise StoreMismatch(f"{self._address.shown}: another process calls itself {self.name}")
        return self._kept(rows[0])

    async def _connected(self, *, writes: bool) -> Any:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        if self._connection is None or not self._fit(self._connection):
            self._drop()
            self._connection = await self._connect()
        return self._connection

    async def _undo(self) -> None:
        """Roll back the transaction, if one is open."""
        connection = self._connection
        if connection is not None and connection.usable:
            try:
                async with asyncio.timeout(self._silence):
                    await connection.rollback()
            except self._dialect.away:
                self._drop()
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    async def close(self) -> None:
        """Close the connection, once the call that is under way has ended."""
        async with self._turn:
            self._closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.end(within=self._silence)

    # --- the server's part

    def _meaning(self, error: Exception, call: C | None, *, adding: bool) -> Exception:
        return self._dialect.meaning(error, self._address.shown, adding=adding)

    def _fit(self, connection: Any) -> bool:
        """Tell whether the connection can be used for another call."""
        return bool(connection.usable)

    @abstractmethod
    async def _connect(self) -> Any: ...
    @abstractmethod
    def _call(self, connection: Any, limit: asyncio.Timeout) -> C: ...
    @abstractmethod
    async def _prepare(self, call: C) -> Any:
        """Prepare a numbered call; return the caller's row if the call turns out to be done already."""

    def _kept(self, row: Any) -> Any:
        """Decode the caller's row of a call that was done before; its first column is the call's number."""
        return row
