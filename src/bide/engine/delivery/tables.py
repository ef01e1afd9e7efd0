"""The loop over one watched table: sleeps until its earliest row is due, then takes the due rows and fires them.

The loop is that of workers (`lease_loop.WakeLoop`). There is no time window: it takes every due row, however late. It
reads the next due time from the index, and caps every sleep, since the database does not notify of all writes.

**One rule for all errors.** A connection error, or a transient error of the server, concerns the query, which is
repeated. Any other error concerns the rows of the query. They are taken one by one until the faulty row is found. That
row rests (see `watch.RestingRows`), and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from bide.core.errors import SetupError, StoreError, StoreUnavailable
from bide.core.instants import Due, In, Millis, resolved
from bide.core.names import text_of
from bide.core.outcomes import Dead, Defer, Retry
from bide.engine.background import LEAST_PATIENCE, Background
from bide.engine.delivery.lease_loop import WakeLoop
from bide.engine.delivery.watch import DeadRow, RestingRows, Row, Watch, said
from bide.engine.session import joining
from bide.ports import Clock, DueRow, Head, Raced, RowRefused, Store, Table, TableStats

_log = logging.getLogger("bide.table")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_LOCKED_PAUSE: Millis = 25
"""The delay before a locked row is tried again; doubled each time."""
_APART = 0.01
"""The least seconds between two queries that other processes' commits cause."""
_RACES = 20
"""The number of successive transactions that the server may roll back for conflicts before the loop pauses."""
_ENDING = 10.0
"""Seconds that a cancelled coroutine has to end, including the rollback of its row."""


class _StillDead(Exception):
    """The row was given up and its due time is unchanged, so its handler is not called again."""


class TableLoop(WakeLoop):
    """Watches one table for one worker. `start` and `stop` it, or `run_once` in tests that move the clock."""

    def __init__(self, watch: Watch, table: Table, *, clock: Clock, store: Store) -> None:
        self._cap = watch.source.look_every_ms
        super().__init__(table.clock() or clock, self._cap)
        self.watch = watch
        self.stats = TableStats()
        self._table = table
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._resting = RestingRows(watch, self.clock)
        self._running: dict[asyncio.Task[None], Any] = {}
        """The running handlers, each with the id of its row."""
        self._one_by_one = 0
        """The number of rows still to be taken singly after a page failed."""
        self._locked_pause = _LOCKED_PAUSE
        self._hooks = Background()
        self._work: asyncio.Task[None] | None = None
        self._unlisten: Callable[[], None] | None = None
        self._kicks_soon = False
        self._opened = False
        self._stopped = asyncio.Event()
        self._pause, self._races, self._complaint = _FIRST_PAUSE, 0, ""
        """For successive errors: the pause after the next one, the number of races, and the last logged text."""

    # --- start and stop

    async def open(self) -> None:
        """Connect, and check the table. Raises SetupError, StoreUnavailable."""
        for finding in await self._table.open():
            if not finding.ok:
                _log.warning("%s; %s", finding.what, finding.advice)
        if self.watch.topic is not None and not self._table.joins:
            await self._table.close()
            raise SetupError(
                f"{self.watch}: tasks of {self.watch.topic!r} could not be scheduled in one transaction with its rows: "
                "the store is not in the same database, or cannot join; use a handler instead"
            )
        self._opened = True

    async def start(self) -> None:
        """Open, and begin to watch. An unavailable database is retried in the background. Raises SetupError."""
        try:
            await self.open()
        except StoreError as error:
            self._complain(error, self._pause)
        self._unlisten = self._table.listen(self._others_wrote)
        self.watch.listeners.add(self._kick_from_any_thread)
        self._work = self._loop.create_task(self._run(), name=f"bide {self.watch.source.table}")

    async def stop(self, grace: float) -> None:
        """Take no more rows, wait at most `grace` seconds for handlers and hooks, then roll back unfinished rows."""
        ends = self._loop.time() + grace
        self._stopping = True
        self._stopped.set()
        self.watch.listeners.discard(self._kick_from_any_thread)
        if self._unlisten is not None:
            self._unlisten()
        self._waker.kick()
        for wait in (grace, None if self.watch.in_threads else _ENDING):
            under_way = [one for one in (self._work, *self._running) if one is not None and not one.done()]
            if under_way:
                await asyncio.wait(under_way, timeout=wait)
            for one in under_way:
                one.cancel()
        self._waker.close()
        self._end_waits(self._emptied)
        left = max(ends - self._loop.time(), LEAST_PATIENCE)
        await asyncio.gather(self._hooks.ended(left), self._table.close())

    async def until_empty(self) -> None:
        """Wait until no row that meets the condition has a due time, and none is being handled here."""
        await self._until_nothing_left()

    async def run_once(self) -> tuple[int, Millis | None]:
        """Take all due rows and wait for their handlers. Returns the number of rows, and when the next is due."""
        before = self.stats.fired + self.stats.failed
        wake = await self._take_due()
        while self._running:
            await asyncio.wait(list(self._running))
            wake = await self._take_due()
        await self._hooks.ended()
        return self.stats.fired + self.stats.failed - before, wake

    def _kick_from_any_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._waker.kick)
        except RuntimeError:  # the loop was closed without stopping this watch
            self.watch.listeners.discard(self._kick_from_any_thread)

    def _others_wrote(self) -> None:
        """Kick the loop at most every 10 ms, so that a constantly written file is not queried constantly."""
        if not self._kicks_soon and not self._stopping:
            self._kicks_soon = True
            self._loop.call_later(_APART, self._kick_after_writes)

    def _kick_after_writes(self) -> None:
        self._kicks_soon = False
        self._waker.kick()

    # --- the loop

    async def _turn(self) -> Millis | None:
        if not self._opened:
            await self.open()
        wake = await self._take_due()
        self._pause, self._races, self._complaint = _FIRST_PAUSE, 0, ""
        return wake

    async def _turn_failed(self, error: Exception) -> None:
        if isinstance(error, Raced) and self._races < _RACES:
            self._races += 1
            await asyncio.sleep(0)
            return
        self._complain(error, self._pause)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._stopped.wait()
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _complain(self, error: Exception, pause: float) -> None:
        """Log the error, once while it stays the same."""
        expected = isinstance(error, StoreError | SetupError | Raced)
        if said(error) != self._complaint:
            self._complaint = said(error)
            _log.log(
                logging.WARNING if expected else logging.ERROR,
                "%s: looking failed, trying again in %.2f s, and so on: %s", self.watch, pause, self._complaint,
                exc_info=None if expected else error,
            )  # fmt: skip

    async def _take_due(self) -> Millis | None:
        """Take due rows as far as there is room. Returns when to take again."""
        asking = list(self._emptied)
        while not self._stopping and self._free > 0:
            now = self.clock.now()
            resting, first = self._resting.at(now)
            skip = (*resting, *self._running.values())
            try:
                head = await self._head(now, skip)
            except RowRefused as error:
                await self._failed(error.rows, error)
                continue
            if head.due is None or head.due > head.now:
                self._resting.forget(now, self._running.values())
                if head.due is None and all(map(self.watch.is_dead, skip)):
                    self._end_waits(asking)
                return _earlier(head.due, first)
            if await self._take(now, skip, head):
                self._locked_pause = _LOCKED_PAUSE
                continue
            beyond = await self._head(now, skip, beyond=True)
            # the due rows are locked by another worker, or by a person editing them
            again = self.clock.now() + self.clock.span(self._locked_pause)
            self._locked_pause = min(self._locked_pause * 2, self._cap)
            return _earlier(_earlier(beyond.due, first), again)
        return None

    async def _head(self, now: Millis, skip: tuple[Any, ...], *, beyond: bool = False) -> Head:
        self.stats.looks += 1
        return await self._table.head(now=now, skip=skip, beyond=beyond)

    @property
    def _free(self) -> int:
        return self.watch.concurrency - len(self._running)

    async def _take(self, now: Millis, skip: tuple[Any, ...], head: Head) -> bool:
        """Take a row or a page; False: there was none. A handler continues in the background."""
        limit = 1 if self.watch.handled or self._one_by_one else self.watch.source.page
        self._one_by_one = max(0, self._one_by_one - 1)
        try:
            if self.watch.handled:
                return await self._begin(now, skip)
            new_task = None if self.watch.topic is None else self.watch.new_task
            identities = await self._table.fire(now=now, limit=limit, skip=skip, new_task=new_task)
        except (StoreError, SetupError, Raced):
            raise
        except RowRefused as error:
            self._resting.check(error.rows[0])
            await self._failed(error.rows, error)
            return True
        except Exception as error:  # noqa: BLE001 - unreadable rows: blame the first one, whose id is known
            self._one_by_one = max(self._one_by_one, limit - 1)
            if limit == 1:
                await self._failed([DueRow(head.id, head.due or 0, {})], error)
            return True
        self._fired(identities)
        return bool(identities)

    async def _begin(self, now: Millis, skip: tuple[Any, ...]) -> bool:
        """Start the handler of one row; False: there was none."""
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[list[Any]] = loop.create_future()
        running = loop.create_task(self._handle_one(now, skip, taken), name=f"bide {self.watch.source.table}")
        self._running[running] = None
        running.add_done_callback(self._ended)
        identities = list[Any]()
        try:
            identities = await taken
        finally:
            if not identities:  # without a row to skip, the next query must wait for it to end
                await asyncio.wait([running])
        if running in self._running:
            self._running[running] = identities[0]
        return bool(identities)

    def _ended(self, running: asyncio.Task[None]) -> None:
        if self._running.pop(running) is not None:
            self._waker.kick()

    async def _handle_one(self, now: Millis, skip: tuple[Any, ...], identity: asyncio.Future[list[Any]]) -> None:
        """Run one transaction with a handler. Sets `identity` to the row's id, or to none, before calling it."""
        row: DueRow | None = None
        handled = False
        try:
            async with self._table.take(now=now, limit=1, skip=skip) as taken:
                row = next(iter(taken.rows), None)
                if self._stopping:  # the worker began to stop while this waited for its turn
                    row = None
                    raise Raced("the worker has stopped")
                if row is not None:
                    self._resting.check(row)
                if not identity.done():
                    identity.set_result([] if row is None else [row.id])
                if row is not None:
                    if self.watch.is_dead(row.id, row.due):
                        raise _StillDead
                    seen = Row(row, self.watch.source.table, taken.connection, self.clock.now)
                    with nullcontext() if taken.joined is None else joining(self._store, taken.joined):
                        outcome = await self.watch.call(seen)
                    if outcome is not None:
                        raise outcome
                    handled = True
        except BaseException as error:  # from the database, the table's constraints, or the handler
            ours = asyncio.current_task()
            if isinstance(error, KeyboardInterrupt) or (
                isinstance(error, asyncio.CancelledError | GeneratorExit)
                and (ours is None or ours not in self._running or ours.cancelling())
            ):
                identity.cancel()
                raise
            if row is not None:
                await self._not_fired(row, error, handled=handled)
            elif not identity.done():
                identity.set_exception(error)
        else:
            self._fired([] if row is None else [row.id])

    # --- rows that do not fire

    def _fired(self, identities: list[Any]) -> None:
        self.stats.fired += len(identities)
        self._resting.fired(identities)

    async def _not_fired(self, row: DueRow, error: BaseException, *, handled: bool) -> None:
        """Handle the end of a handler whose row is unchanged, although the handler may have succeeded."""
        now = self.clock.now()
        if isinstance(error, _StillDead):
            self._resting.bury(row)
        elif isinstance(error, Defer):
            self._resting.put(row, self._resolved(error.due))
        elif isinstance(error, Dead):
            await self._give_up(row, self._resting.dead(row, error.why))
        elif handled and isinstance(error, StoreUnavailable):  # the connection broke, which is not the row's fault
            self._resting.put(row, now + self.clock.span(self._cap))
            _log.warning("%s: row %s was not committed, and is tried again: %s", self.watch, text_of(row.id), error)
        elif not (handled and isinstance(error, Raced)):
            until = self._resolved(error.due) if isinstance(error, Retry) and error.due is not None else None
            await self._failed([row], error, until)

    def _resolved(self, due: Due | str) -> Millis:
        now = self.clock.now()
        return now + self.clock.span(due.millis) if isinstance(due, In) else resolved(due, now).resolve(now)

    async def _failed(self, rows: Sequence[DueRow], error: BaseException, until: Millis | None = None) -> None:
        """Let the faulty one of `rows` rest; take several rows one by one to find it."""
        if len({row.id for row in rows}) > 1:
            self._one_by_one = len(rows)
            _log.info("%s: a page of %d failed, taking them one by one: %s", self.watch, len(rows), said(error))
            return
        row = rows[0]
        self.stats.failed += 1
        if self.watch.is_dead(row.id, row.due):
            self._resting.bury(row)
            return
        dead = self._resting.failed(row, error, until)
        if dead is not None:
            await self._give_up(row, dead)

    async def _give_up(self, row: DueRow, dead: DeadRow) -> None:
        """Give up the row permanently, by the source's `dead` changes to the table if it has any."""
        left = True
        if self.watch.source.dead is not None:
            try:
                if not await self._table.bury(row.id, now=self.clock.now()):
                    return  # another transaction has locked it, or it is no longer due
                left = False
                self._resting.fired([row.id])
            except (StoreUnavailable, Raced):
                self._resting.put(row, self.clock.now() + self.clock.span(self._cap))
                return
            except Exception as error:  # noqa: BLE001 - the row stays as it is
                _log.error("%s: the changes of `dead` failed: %s", self.watch, said(error))
        self.stats.dead += 1
        if left:
            self.watch.given_up[row.id] = dead
            self._resting.bury(row)
        _log.error("%s: row %s is given up: %s", self.watch, text_of(row.id), dead.why)
        self._hooks.call(self.watch.dead_hooks, dead)


def _earlier(one: Millis | None, other: Millis | None) -> Millis | None:
    return min((at for at in (one, other) if at is not None), default=None)
