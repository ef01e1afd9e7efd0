"""Leasing on a SQL server: where in the index each scan for due tasks begins.

A lease, settlement or move leaves a dead entry in the index, at its old time, until vacuum removes it. So a scan from
the start of the index would step over everything done since the last vacuum, and while a transaction somewhere holds an
old snapshot, over everything done since that began. Three kinds of scan keep the cost of a lease flat:

    ordinary    begins where the scan before it left off: nothing new can appear far back, since whatever begins to wait
                wakes no earlier than when it is written
    thorough    once a second, for lost leases too: finds a task whose transaction was open for long, or that was locked
                and let go. It also reads when the next lease of another worker ends; the scan after that is thorough
    full        from the very start. Each thorough scan is one while that is cheap; else full scans run in the
                background, and thorough scans begin at a bound, of which each server has its own kind
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.stores.sql.journaled_connection import JournaledConnection

THOROUGH_EVERY = 0.9
"""Seconds between thorough scans, so that a worker which sleeps at most a second makes one whenever it wakes."""
SLACK: Millis = 1_000
"""How long a transaction may be open, so that its tasks are not yet too far back when they appear."""


class ScanPositions:
    """The beginning of the next ordinary scan of each topic, and the time of the last thorough one."""

    __slots__ = ("_began", "_ends", "_noted", "_plenty", "_positions", "_scanned_at", "_slack", "_used")

    def __init__(self, *, used: bool, slack: Millis = SLACK) -> None:
        """`used` false: every scan is thorough, for a clock that is the caller's and may leap.

        `slack`: how far before now a scan begins at least. Every scan steps over what has died there.
        """
        self._used = used
        self._slack = slack
        self._noted: dict[Topic, Millis] = {}
        """The wakes noted since the last scan began, which may not have seen them."""
        self._positions: dict[Topic, Millis] = {}
        self._began = 0.0
        self._scanned_at: dict[Topic, float] = {}
        self._ends: Millis | None = None
        self._plenty: set[Topic] = set()

    def begin(self, topics: Collection[Topic], about: Millis) -> tuple[list[Millis], bool]:
        """Begin a scan: its positions by topic, and whether it is thorough. `about`: the server's time, roughly."""
        self._began = time.monotonic()
        self._noted.clear()
        ended = self._ends is not None and self._ends <= about
        before = self._began - THOROUGH_EVERY
        if not self._used or ended or any(self._scanned_at.get(topic, -1.0) <= before for topic in topics):
            return [0] * len(topics), True
        return [self.position(topic) for topic in topics], False

    def position(self, topic: Topic) -> Millis:
        """The beginning of an ordinary scan; 0 for a topic that was never emptied."""
        return self._positions.get(topic, 0)

    def scanned(self, topics: Collection[Topic], ends: Millis | None) -> None:
        """Note that a thorough scan has come to its end, and when the next lease ends that it has seen."""
        self._scanned_at.update(dict.fromkeys(topics, self._began))
        self._ends = ends

    def sleep(self, wake: Millis | None, now: Millis, *, thorough: bool) -> Millis | None:
        """The time to scan again, if `wake` is the earliest that waits: not after the next lease ends.

        An ordinary scan has not seen when leases end, so after one no worker sleeps past the next thorough scan.
        """
        wakes = [at for at in (wake, self._ends) if at is not None]
        if not thorough:
            wakes.append(now + int(THOROUGH_EVERY * 1000) + 1)
        return min(wakes, default=None)

    def emptied(self, topics: Collection[Topic], now: Millis) -> None:
        """Note that nothing due was left of these."""
        for topic in topics:
            self._positions[topic] = min(now - self._slack, self._noted.get(topic, now))
            self._plenty.discard(topic)

    def plenty(self, topic: Topic) -> bool:
        """True if more of it was due than the last scan has taken, as far as is known."""
        return topic in self._plenty

    def ran_short(self, topic: Topic) -> None:
        """Note that there was less of it than was wanted, for a reason that was not asked for."""
        self._plenty.discard(topic)

    def reached(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note that more of these may be due; the last that was taken woke then."""
        for topic, wake in wakes.items():
            self._positions[topic] = min(wake, self._noted.get(topic, wake))
        self._plenty.update(wakes)

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note tasks that were committed, and wake then."""
        for topic, wake in wakes.items():
            self._noted[topic] = min(wake, self._noted.get(topic, wake))
            position = self._positions.get(topic)
            if position is not None and wake < position:
                self._positions[topic] = wake


# --- bounds of thorough scans

SHARE = 20
"""An expensive full scan is followed by no other for this many times as long as it took."""
LONGEST = 600.0
"""Seconds that a full scan may take at most."""


class ScanBounds:
    """The bounds at which thorough scans begin while full ones are expensive. Belongs to the connection that leases.

    A crash of the server may undo the newest commits, and put tasks back at their old place; so with a new connection
    nothing is known, and the first scan is full. One that does not end in the time that a call may take may take twice
    as long the next time: a worker that starts under an old snapshot starts late.
    """

    __slots__ = ("_background", "_bounds", "_clock", "_connection", "_full_at", "_used", "patience")

    def __init__(
        self, *, used: bool, background: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used` false: each is a full scan, where the clock may leap, or a crash may be hidden from us.

        `background` begins a full scan, and says whether it could.
        """
        self._used = used
        self._background = background
        self._clock = clock
        self._connection: object = None
        self._full_at: float | None = None
        """From when on the next full scan may be made in the background; None: nothing is known, the next is one."""
        self._bounds: dict[Topic, Millis] = {}
        """Where to begin, for what waits."""
        self.patience = 0.0
        """Seconds that a full scan may take, if that is more than a call may."""

    def on_connection(self, connection: object) -> None:
        """Note which connection scans."""
        if connection is not self._connection:
            self._connection = connection
            self._forget()

    @contextmanager
    def timed(self, *, full: bool) -> Iterator[Callable[[], float]]:
        """Time a scan: how many seconds it has taken so far. If a full one fails, the next may take longer."""
        began = self._clock()
        try:
            yield lambda: self._clock() - began
        except BaseException:
            if full:
                self.patience = min(max(self.patience, 2 * (self._clock() - began)), LONGEST)
            raise

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note tasks that were committed, and wake then."""
        for topic, wake in wakes.items():
            if wake < self._bounds.get(topic, 0):
                self._bounds[topic] = wake

    def _wait(self, took: float) -> None:
        """Note when the next full scan may be made, after one that took so long."""
        self._full_at = self._clock() + took * SHARE

    def _forget(self) -> None:
        self._full_at = None
        self._bounds.clear()


# --- leasing

LATER: Millis = 20
"""When to scan again for what stays locked for longer, as an open transaction of the application's may keep it."""
POLL: Millis = 200
"""How often a worker polls while no notification reaches it of what others schedule."""
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between scans for what others have locked: a verb takes a few round trips."""


class Leasing(ABC):
    """Takes what is due. Belongs to the connection that leases, and its event loop."""

    bounds: Any
    """The server's ScanBounds."""

    def __init__(self, runtime: Any, positions: ScanPositions) -> None:
        self._runtime = runtime
        self._connection: JournaledConnection[Any] = runtime.connections["lease"]
        self.positions = positions
        self._scanning: asyncio.Task[None] | None = None

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note tasks that were committed, and wake then."""
        self.positions.note_wakes(wakes)
        self.bounds.note_wakes(wakes)

    async def lease(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> Leased:
        """Take what is due: O(log n) per task taken, whatever else waits, and a few seeks per topic.

        `about`: the server's time, as far as it is known.

        What others have locked is passed over. If there is nothing else, the scan is repeated a few times: a verb that
        locks a task has decided something about it in a moment.
        """
        if not any(want > 0 for want in wants.values()):
            leased, _ = await self._read_wake(wants, now, about)
            return leased
        for pause in _PAUSES:
            leased, skipped = await self._take(wants, now, about, lasts, holder)
            if leased.tasks or not skipped:
                return leased
            await asyncio.sleep(pause)
        leased, _ = await self._take(wants, now, about, lasts, holder)
        return leased

    def scan_in_background(self, asked: Any) -> bool:
        """Begin a full scan, unless one is under way: then False."""
        if self._scanning is not None and not self._scanning.done():
            return False
        self._scanning = asyncio.get_running_loop().create_task(self._run_scan(asked), name="bide full scan")
        return True

    async def _run_scan(self, asked: Any) -> None:
        try:
            await self._scan_fully(self._runtime.connections["scan"], asked)
        except StoreError as error:
            self._runtime.dialect.log.info("a full scan failed: %s", error)

    async def close(self) -> None:
        """End the scan that is under way."""
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait([self._scanning])

    # --- the server's part

    @abstractmethod
    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        """Take what is due, oldest first, and tell whether something due was locked and passed over."""

    @abstractmethod
    async def _read_wake(self, wants: Mapping[Topic, int], now: Millis | None, about: Millis) -> tuple[Leased, bool]:
        """Read the next wake, and tell whether something is due."""

    @abstractmethod
    async def _scan_fully(self, connection: Any, asked: Any) -> None:
        """Read what comes first from the very start, which may take long, and tell `bounds`."""
