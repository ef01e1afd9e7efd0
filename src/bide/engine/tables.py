"""The loop over one watched table: sleeps until its earliest row is due, takes what is due, and hands it on.

As with tasks, an alarm is only a reason to look. There is no window: whatever is due by now is taken, however long ago
it was due; the next time is read off the index, and every sleep is capped, since nobody tells of what others write.

A row that fails rests for as long as the retry policy says, and is left out of what is asked for meanwhile, so that it
holds up nobody. How often it failed is known to this process alone: the table has no column for it, and a row that is
due after a crash is simply due. Where a page of rows fails, its rows are taken one by one until the one to blame is
known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from msgspec import Struct

from bide.core.errors import SetupError, StoreError
from bide.core.instants import Millis, duration_text
from bide.engine.joining import joining
from bide.engine.waker import Waker
from bide.engine.watch import LAST_PAUSE, Row, Watch
from bide.ports import Clock, Head, RowRefused, Store, Table, Taken

_log = logging.getLogger("bide.table")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_HELD_PAUSE: Millis = 25
"""How soon a row is looked at again that somebody else has locked; doubled each time."""
_APART = 0.01
"""Seconds between two looks that others' commits cause."""
_STOPPED = "the worker has stopped, and what is due stays due"
MOST_RESTING = 1_000
"""Rows that may rest at once; beyond that nothing is right with any of them."""


class TableStats(Struct):
    """What a loop has done so far."""

    fired: int = 0
    failed: int = 0
    looks: int = 0


class _Rest(Struct):
    failures: int
    until: Millis
    pause: Millis


class TableLoop:
    """Watches one table for one worker. `start` and `stop`; or `run_once`, for tests that move the clock."""

    def __init__(self, watch: Watch, table: Table, *, clock: Clock, store: Store) -> None:
        self.watch = watch
        self.stats = TableStats()
        self._table = table
        self._store = store
        self._own_clock = clock
        self._clock = clock
        self._cap = watch.source.look_every_ms
        self._resting: dict[Any, _Rest] = {}
        self._running: dict[asyncio.Task[None], Any] = {}
        self._one_by_one = 0
        """So many rows are still to be taken singly, after a page that failed."""
        self._held = _HELD_PAUSE
        self._waker: Waker | None = None
        self._work: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unlisten: Callable[[], None] | None = None
        self._looking_soon = False
        self._stopping = False
        self._emptied: list[asyncio.Future[None]] = []

    # --- start and stop

    async def open(self) -> None:
        """Connect, and look at the table. Raises SetupError, StoreUnavailable."""
        for finding in await self._table.open():
            if not finding.ok:
                _log.warning("%s; %s", finding.what, finding.advice)
        self._clock = self._table.clock() or self._own_clock
        if self.watch.topic is not None and not self._table.joins:
            await self._table.close()
            raise SetupError(
                f"{self.watch}: tasks of {self.watch.topic!r} could not be scheduled in one transaction with its rows: "
                f"{type(self._store).__name__} is not in the same database, or cannot join; use a handler instead"
            )

    async def start(self) -> None:
        """Open, and begin to watch."""
        await self.open()
        self._loop = asyncio.get_running_loop()
        self._waker = Waker(self._clock, self._cap)
        self._unlisten = self._table.listen(self._others_wrote)
        self.watch.heard.add(self._look_now)
        self._work = self._loop.create_task(self._watch_for_ever(), name=f"bide {self.watch.source.table}")

    async def stop(self, grace: float) -> None:
        """Take no more; let handlers end, at most `grace` seconds, and then roll back what they were at."""
        self._stopping = True
        self.watch.heard.discard(self._look_now)
        if self._unlisten is not None:
            self._unlisten()
        if self._work is not None:
            assert self._waker is not None
            self._waker.kick()
            await asyncio.wait([self._work])
            self._waker.close()
        if self._running:
            await asyncio.wait(list(self._running), timeout=grace)
        for running in list(self._running):
            running.cancel()
        if self._running:
            await asyncio.wait(list(self._running))
        for emptied in self._emptied:
            if not emptied.done():
                emptied.set_exception(RuntimeError(_STOPPED))
        await self._table.close()

    async def until_empty(self) -> None:
        """Wait until no row fulfils the condition with a time that will come, and none is being handled here."""
        if self._stopping:
            raise RuntimeError(_STOPPED)
        emptied = asyncio.get_running_loop().create_future()
        self._emptied.append(emptied)
        self._kick()
        try:
            await emptied
        finally:
            self._emptied.remove(emptied)

    async def run_once(self) -> tuple[int, Millis | None]:
        """Take all that is due, and let it end; how many rows that was, and when the next is due."""
        before = self.stats.fired + self.stats.failed
        wake = await self._round()
        while self._running:
            await asyncio.wait(list(self._running))
            wake = await self._round()
        return self.stats.fired + self.stats.failed - before, wake

    def _look_now(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._kick)
            except RuntimeError:  # its loop has been closed without stopping it
                self.watch.heard.discard(self._look_now)

    def _kick(self) -> None:
        if self._waker is not None:
            self._waker.kick()

    def _others_wrote(self) -> None:
        """At most every 10 ms: a file that others write to all the time would be looked at all the time."""
        if not self._looking_soon and not self._stopping and self._loop is not None:
            self._looking_soon = True
            self._loop.call_later(_APART, self._look_soon)

    def _look_soon(self) -> None:
        self._looking_soon = False
        self._kick()

    # --- look and take

    async def _watch_for_ever(self) -> None:
        assert self._waker is not None
        pause = _FIRST_PAUSE
        while not self._stopping:
            self._waker.forget()
            try:
                wake = await self._round()
            except StoreError as error:
                _log.warning("%s: looking failed, trying again in %.2f s: %s", self.watch, pause, error)
            except Exception:  # noqa: BLE001 - a worker outlives its defects, loudly
                _log.exception("%s: a defect stopped a look; trying again in %.2f s", self.watch, pause)
            else:
                pause = _FIRST_PAUSE
                await self._waker.sleep(wake)
                continue
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _round(self) -> Millis | None:
        """Take what is due, as much as there is room for; when to look again."""
        asking = list(self._emptied)
        while not self._stopping and self._free > 0:
            now = self._clock.now()
            resting, first = self._at_rest(now)
            if len(resting) >= MOST_RESTING:
                return first
            skip = (*resting, *self._running.values())
            head = await self._look(now, skip)
            if head.due is None or head.due > head.now:
                # what has rested and is not due any more was moved, called off, or fired elsewhere
                self._resting = {one: rest for one, rest in self._resting.items() if rest.until > now}
                if head.due is None and not skip:
                    _resolve(asking)
                return _earlier(head.due, first)
            if await self._take(now, skip):
                self._held = _HELD_PAUSE
                continue
            beyond = await self._look(now, skip, beyond=True)
            # what is due is in somebody else's hands: another worker's, or somebody's who is editing it
            again = self._clock.now() + self._clock.span(self._held)
            self._held = min(self._held * 2, self._cap)
            return _earlier(_earlier(beyond.due, first), again)
        return None

    async def _look(self, now: Millis, skip: tuple[Any, ...], *, beyond: bool = False) -> Head:
        self.stats.looks += 1
        return await self._table.head(now=now, skip=skip, beyond=beyond)

    @property
    def _free(self) -> int:
        return self.watch.concurrency - len(self._running)

    async def _take(self, now: Millis, skip: tuple[Any, ...]) -> bool:
        """Take a row or a page; whether there was anything. A handler goes on by itself."""
        if not self.watch.handled:
            return await self._fire_page(now, skip)
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[list[Any]] = loop.create_future()
        running = loop.create_task(self._handle_one(now, skip, taken), name=f"bide {self.watch.source.table}")
        self._running[running] = None
        running.add_done_callback(self._ended)
        identities = await taken
        if running in self._running and identities:
            self._running[running] = identities[0]
        return bool(identities)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._running.pop(running, None)
        self._kick()

    async def _fire_page(self, now: Millis, skip: tuple[Any, ...]) -> bool:
        """One transaction without a handler."""
        limit = 1 if self._one_by_one else self.watch.source.page
        self._one_by_one = max(0, self._one_by_one - 1)
        new_task = None if self.watch.topic is None else self.watch.new_task
        try:
            identities = await self._table.fire(now=now, limit=limit, skip=skip, new_task=new_task)
        except RowRefused as error:
            self._failed(list(error.ids), error)
            return True
        self._fired(identities)
        return bool(identities)

    async def _handle_one(self, now: Millis, skip: tuple[Any, ...], told: asyncio.Future[list[Any]]) -> None:
        """One transaction with a handler; `told` which row it has, before that is called."""
        identities: list[Any] = []
        try:
            async with self._table.take(now=now, limit=1, skip=skip) as taken:
                identities = [row.id for row in taken.rows]
                told.set_result(identities)
                if identities:
                    await self._call(taken)
        except asyncio.CancelledError:
            if not told.done():
                told.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - of the database, of the table's rules, or of the handler
            if isinstance(error, RowRefused):
                identities = list(error.ids)
            if identities:
                self._failed(identities, error)
            if not told.done():
                told.set_exception(error) if not identities else told.set_result(identities)
            elif not identities:
                _log.warning("%s: %s", self.watch, error)
        else:
            self._fired(identities)

    async def _call(self, taken: Taken) -> None:
        row = Row(taken.rows[0], taken.connection, self._clock.now)
        if taken.joined is None:
            await self.watch.call(row)
        else:
            with joining(self._store, taken.joined):
                await self.watch.call(row)

    # --- rows that fail

    def _fired(self, identities: list[Any]) -> None:
        self.stats.fired += len(identities)
        for identity in identities:
            self._resting.pop(identity, None)

    def _at_rest(self, now: Millis) -> tuple[list[Any], Millis | None]:
        """The rows that are left alone for now, and when the first of them is tried again."""
        resting = [(rest.until, identity) for identity, rest in self._resting.items() if rest.until > now]
        return [identity for _, identity in resting], min((until for until, _ in resting), default=None)

    def _failed(self, identities: list[Any], error: Exception) -> None:
        if len(identities) > 1:
            self._one_by_one = len(identities)
            _log.info("%s: a page of %d failed, taking them one by one: %s", self.watch, len(identities), error)
            return
        self.stats.failed += 1
        [identity] = identities
        before = self._resting.get(identity)
        failures = 1 if before is None else before.failures + 1
        pause = self.watch.retry.delay(failures)
        if pause is None:  # a row has no state in which nobody looks at it again
            pause = max(LAST_PAUSE, before.pause if before is not None else 0)
        self._resting[identity] = _Rest(failures, self._clock.now() + self._clock.span(pause), pause)
        _log.warning(
            "%s: row %r failed for the %d. time and is as it was; again in %s: %s",
            self.watch, identity, failures, duration_text(pause), error,
            exc_info=error if failures == 1 and not isinstance(error, RowRefused) else None,
        )  # fmt: skip
        if len(self._resting) == MOST_RESTING:
            _log.error("%s: %d rows have failed; nothing more is taken until the first is tried again",
                       self.watch, MOST_RESTING)  # fmt: skip


class TableLoops(Sequence[TableLoop]):
    """All tables of one worker."""

    def __init__(self, loops: Iterable[TableLoop]) -> None:
        self._loops = list(loops)
        self._started: list[TableLoop] = []

    def __len__(self) -> int:
        return len(self._loops)

    @overload
    def __getitem__(self, place: int) -> TableLoop: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[TableLoop]: ...
    def __getitem__(self, place: int | slice) -> TableLoop | Sequence[TableLoop]:
        return self._loops[place]

    async def start(self) -> None:
        """Start them; none, if one cannot be. Raises SetupError, StoreUnavailable."""
        try:
            for loop in self._loops:
                await loop.start()
                self._started.append(loop)
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace: float) -> None:
        started, self._started = self._started, []
        await asyncio.gather(*(loop.stop(grace) for loop in started))

    async def until_empty(self) -> None:
        await asyncio.gather(*(loop.until_empty() for loop in self._started))

    @property
    def fired(self) -> int:
        """Rows that were fired so far."""
        return sum(loop.stats.fired for loop in self._loops)


def _earlier(one: Millis | None, other: Millis | None) -> Millis | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _resolve(asking: list[asyncio.Future[None]]) -> None:
    for emptied in asking:
        if not emptied.done():
            emptied.set_result(None)
