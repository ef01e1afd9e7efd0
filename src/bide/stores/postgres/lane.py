"""One connection for one kind of call, which sends each call once however often that takes.

Each kind (scheduling, leasing, settling, extending, reading) has a lane of its own, so that settling does not wait for
the commit of a schedule. A lane connects when it is first used, and again when the connection broke.

A writing call carries the lane's name and a number that only rises; the statement writes both, with the answer, into
the caller's row, in the same transaction as the work (`gate` in `queries.sql`). So when an answer was lost the call is
sent again: if it was done, the gate is shut and the answer is read back, else it is done now. What is still not known
when `patience` is over is OutcomeUnknown, for these tasks alone.

While somebody holds an old snapshot no version of that row can be removed, and whoever looks for the row steps over all
of them: ten thousand after half a minute, a third of a millisecond, twice a call. So after some calls a lane goes on
with another row, of another name, and so has few to step over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import asyncpg

from bide.core.errors import OutcomeUnknown, StoreMismatch, StoreUnavailable
from bide.stores.held import Held
from bide.stores.lost_answers import refused_later
from bide.stores.postgres.address import Address
from bide.stores.postgres.connecting import PLANNER, SESSION, connect
from bide.stores.postgres.errors import Again, Locked, Lost, NotSent, meaning
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.postgres")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
CALLS_OF_A_ROW = 256
"""How often a caller's row is updated: another costs a round trip, and each version 0.05 us for each call after it."""
_PATIENCE = {
    # whoever has a row of a batch locked for longer than a verb takes has a transaction open: the batch goes on past it
    "lock_timeout": "30",
}
_SESSION = SESSION | _PATIENCE
_POOLED_SESSION = "".join(f"; SET LOCAL {name} = {value}" for name, value in (PLANNER | _PATIENCE).items())
T = TypeVar("T")
Row = Sequence[Any]


class Call:
    """One call on its way: the connection, and what the gate is told."""

    __slots__ = ("_lane", "_limit", "begun", "connection", "number", "queries", "sent")

    def __init__(self, lane: Lane, connection: Any, number: int, limit: asyncio.Timeout | None = None) -> None:
        """`limit`: when it is taken for lost."""
        self._lane = lane
        self._limit = limit
        self.connection = connection
        self.number = number
        self.queries = lane.queries
        self.sent = False
        """Whether something was sent that may be done although no answer came: within a transaction only its end."""
        self.begun = False

    @property
    def caller(self) -> str:
        return self._lane.name

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        """The rows of a named query."""
        if self._lane.pooled and not self.begun:  # only within a transaction is it one connection all along
            await self.begin()
            rows = await self.fetch(query, *arguments)
            await self.commit()
            return rows
        self.sent = self.sent or not self.begun
        found: list[Any] = await self.connection.fetch(self.queries[query], *arguments)
        return found

    async def timed(self, query: str, *arguments: Any) -> list[Any]:
        """The same, of a query that says in `micros` what time it is there."""
        sent = time.monotonic()
        rows = await self.fetch(query, *arguments)
        if rows and self._lane.time is not None:
            self._lane.time.saw(rows[0]["micros"], sent, time.monotonic())
        return rows

    def allow(self, seconds: float) -> None:
        """It may take so long from now on, if that is longer than what it may take anyway."""
        limit = self._limit
        if limit is not None:
            ends = asyncio.get_running_loop().time() + seconds
            limit.reschedule(max(ends, limit.when() or ends))

    async def begin(self, how: str = "") -> None:
        self.begun = True
        await self.connection.execute(f"BEGIN {how}{_POOLED_SESSION if self._lane.pooled else ''}")

    async def commit(self) -> None:
        self.sent = True
        await self.connection.execute("COMMIT")
        self.begun = False


Work = Callable[[Call], Awaitable[T]]


class Runs(Protocol):
    """What carries out calls: a lane, or the transaction of somebody else's that they take part in."""

    @property
    def passes(self) -> bool:
        """Whether it waits for nobody: what others have locked is passed over from the first."""

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Row, Call], Awaitable[T]],
        *,
        past: Work[T] | None = None,
        adding: bool = False,
    ) -> T: ...

    async def read(self, work: Work[T]) -> T: ...


class Shut(Exception):
    """The gate is shut: this call was done before, or its caller has no row yet."""


class Lane:
    """The connection, whose turn it is, and the number of the last call. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        address: Address,
        queries: Mapping[str, str],
        *,
        patience: float,
        silence: float,
        time: ServerTime | None = None,
        passes: bool = False,
    ) -> None:
        """`time`: whom to tell what time it is there; None where the caller's clock counts. `passes`: see Runs."""
        self.name = name
        """What its row is called by now."""
        self._first_name = name
        self._renew_at = CALLS_OF_A_ROW
        self.queries = queries
        self.time = time
        self.pooled = address.pooled
        self.passes = passes
        self.resent = 0
        """Calls that had to be sent more than once."""
        self._address = address
        self.patience = patience
        self._silence = silence
        self._turn = asyncio.Lock()
        self._number = 0
        self._introduced = False
        self._connection: Any = None
        self._closed = False

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Row, Call], Awaitable[T]],
        *,
        past: Work[T] | None = None,
        adding: bool = False,
    ) -> T:
        """`work`, once. It raises Shut where the gate did; then `repeated` makes its answer from the caller's row.

        `past` is the same passing over what others have locked, for when something is; it has the same number, since
        of the first form nothing was done. Raises what `errors.meaning` finds; Held, where also `past` (which may be
        `work` itself) came upon something locked; StoreUnavailable: not done; OutcomeUnknown.
        """
        async with self._turn:
            self._number += 1
            return await self._insist(work, repeated, past, adding=adding)

    async def read(self, work: Work[T]) -> T:
        """`work` that only reads, or leaves nothing that anybody sees. Raises StoreUnavailable: no answer."""
        async with self._turn:
            return await self._insist(work, None, writes=False)

    async def repeat(self, work: Work[T], *, past: Work[T] | None = None) -> T:
        """`work` that writes, and may be done twice without harm; else as `run`."""
        async with self._turn:
            return await self._insist(work, None, past)

    async def _insist(
        self,
        work: Work[T],
        repeated: Callable[[Row, Call], Awaitable[T]] | None,
        past: Work[T] | None = None,
        *,
        adding: bool = False,
        writes: bool = True,
    ) -> T:
        passing = past is not None and (past is work or self.passes)
        if past is not None and passing:
            work = past
        ends = time.monotonic() + self.patience
        pause, maybe = _FIRST_PAUSE, False
        while True:
            call: Call | None = None
            try:
                connection = await self._connected()
                async with asyncio.timeout(self._silence) as limit:
                    call = Call(self, connection, self._number, limit)
                    if repeated is not None and self._number > self._renew_at:
                        await self._renew(call)
                    try:
                        return await work(call)
                    except Shut:
                        row = await self._look_back(call)
                    if row is not None and repeated is not None:
                        return await repeated(row, call)
                    if maybe and self._introduced:  # nobody heard of it for ten minutes, and its row was forgotten
                        raise OutcomeUnknown(f"{self._address.shown}: what became of a call is no longer known")
                    maybe = False  # to those without a row the gate is shut
                    await self._introduce(call)
                    continue
            except Exception as error:
                found = meaning(error, self._address.shown, adding=adding)
                if isinstance(found, Locked) and past is not None:
                    await self._undo()
                    if not passing:
                        work, passing = past, True
                        continue
                    if not maybe:
                        raise Held(str(found)) from error
                if isinstance(found, Again):
                    await self._undo()
                elif isinstance(found, Lost | NotSent):
                    # refused: whatever was in front of the refusal is undone
                    maybe = maybe or (isinstance(found, Lost) and call is not None and call.sent)
                    await self._drop()
                else:
                    await self._undo()
                    if maybe and writes:
                        found = refused_later(found)
                    if found is error:
                        raise
                    raise found from error
                why = found
            except BaseException:
                await self._drop()  # the statement may be under way still, and a transaction open
                raise
            left = ends - time.monotonic()
            if left <= 0:
                text = str(why)
                raise OutcomeUnknown(text) if maybe and writes else StoreUnavailable(text)
            self.resent += 1
            _log.debug("%s is sent again: %s", self.name, why)
            await asyncio.sleep(min(left, pause * (0.5 + random.random())))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _renew(self, call: Call) -> None:
        """Go on with another row, before anything of the call is sent."""
        name = f"{self._first_name}.{self._number}"
        try:
            await call.fetch("renew_caller", self.name, name)
        finally:
            call.sent = False
        self.name, self._renew_at = name, self._number + CALLS_OF_A_ROW

    async def _look_back(self, call: Call) -> Row | None:
        """What the gate was shut for: the row of a call that was done before; None where there is no row."""
        await self._undo()
        call.begun = False
        rows = await call.fetch("repeated", self.name)
        if not rows:
            return None
        [row] = rows
        if row["number"] != call.number:
            raise StoreMismatch(f"{self._address.shown}: another process calls itself {self.name}")
        found: Row = row
        return found

    async def _introduce(self, call: Call) -> None:
        """Make the caller's row, which is not there yet."""
        self._introduced = True
        try:
            await call.fetch("new_caller", self.name)
        finally:
            call.sent = False

    async def _connected(self) -> Any:
        if self._closed:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._address, within=self._silence, session=_SESSION)
        return self._connection

    async def _undo(self) -> None:
        """Leave the transaction, if one is open."""
        connection = self._connection
        if connection is not None and not connection.is_closed() and connection.is_in_transaction():
            try:
                async with asyncio.timeout(self._silence):
                    await connection.execute("ROLLBACK")
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.terminate()

    async def close(self) -> None:
        """Whatever is under way is finished first."""
        async with self._turn:
            self._closed = True
            connection, self._connection = self._connection, None
            if connection is not None and not connection.is_closed():
                with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                    await connection.close(timeout=self._silence)
