"""Leasing on a SQL server: where in the index each scan for due tasks begins.

A lease, settlement or move leaves a dead entry in the index, at its old time, until vacuum removes it. So a scan from
the start of the index would visit everything done since the last vacuum; while an old transaction blocks vacuum, it
would visit everything done since that transaction began. Three kinds of scan keep the cost of a lease flat:

    ordinary    begins where the previous scan stopped. Nothing new can appear far behind that, since no task wakes
                before the time at which it is written
    thorough    once a second; also searches for expired leases. Finds a task whose transaction was open for long, and
                one that was locked and then released. It also reads when the next lease of another worker expires; the
                first scan after that time is thorough
    full        begins at the very start of the index. While full scans are cheap, every thorough scan is full.
                Otherwise full scans run in the background, and thorough scans begin at a bound that each kind of
                server computes in its own way
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import NEVER, Millis
from bide.core.records import Leased, Topic
from bide.stores.batches import merge_earliest
from bide.stores.sql.journaled_connection import JournaledConnection

THOROUGH_EVERY = 0.9
"""Seconds between thorough scans: a worker that sleeps for at most a second makes one at each wake-up."""
SLACK: Millis = 1_000
"""How long a transaction may stay open so that an ordinary scan still finds its tasks."""


class ScanPositions:
    """The start of each topic's next ordinary scan, and the time of its last thorough one."""

    def __init__(self, *, used: bool, slack: Millis = SLACK) -> None:
        """`used` false: every scan is thorough, because the caller's clock may jump.

        `slack`: the minimum distance of a scan's start before now. Every scan visits the dead entries in it.
        """
        self._used = used
        self._slack = slack
        self._noted: dict[Topic, Millis] = {}
        """The wakes noted since the last scan began; that scan may have missed them."""
        self._positions: dict[Topic, Millis] = {}
        self._began = 0.0
        self._scanned_at: dict[Topic, float] = {}
        self._ends: dict[Topic, Millis] = {}
        """By topic, when the next lease of another worker expires, as the last thorough scan saw it."""
        self.plenty: set[Topic] = set()
        """The topics with more due tasks than the last scan took, as far as is known."""

    def begin(self, wants: Mapping[Topic, int], about: Millis) -> tuple[list[Millis], bool]:
        """Begin a scan: return where an ordinary one starts in each topic, and whether this one is thorough.

        `about`: the approximate time. A scan that wants no tasks is thorough, so its heads need no other scan soon.
        """
        self._began = time.monotonic()
        self._noted.clear()
        ends, before = self._ends, self._began - THOROUGH_EVERY
        thorough = (
            not self._used
            or not any(wants.values())
            or any(
                self._scanned_at.get(topic, -1.0) <= before or (topic in ends and ends[topic] <= about)
                for topic in wants
            )
        )
        return [self._positions.get(topic, 0) for topic in wants], thorough

    def scanned(self, topics: Collection[Topic], ends: Mapping[Topic, Millis]) -> None:
        """Note that a thorough scan was completed, and when the next lease that it saw in each topic expires."""
        for topic in topics:
            self._scanned_at[topic] = self._began
            if topic in ends:
                self._ends[topic] = ends[topic]
            else:
                self._ends.pop(topic, None)

    def heads(
        self, wants: Mapping[Topic, int], wakes: Mapping[Topic, Millis], now: Millis, *, thorough: bool
    ) -> dict[Topic, Millis]:
        """When to scan each topic again: at its wake time, or at the next expiry of a lease if that is earlier.

        An ordinary scan does not see when leases expire, so after one no worker that wants tasks sleeps past the next
        thorough scan.
        """
        again = now + int(THOROUGH_EVERY * 1000) + 1
        found = {} if thorough else {topic: again for topic, want in wants.items() if want > 0}
        for heads in (wakes, self._ends):
            for topic in heads.keys() & wants.keys():
                found[topic] = min(heads[topic], found.get(topic, NEVER))
        return found

    def emptied(self, topics: Collection[Topic], now: Millis) -> None:
        """Note that the scan left nothing due in these topics."""
        for topic in topics:
            self._positions[topic] = min(now - self._slack, self._noted.get(topic, now))
            self.plenty.discard(topic)

    def reached(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note that more tasks of these topics may be due, and the wake time of the last task taken."""
        for topic, wake in wakes.items():
            self._positions[topic] = min(wake, self._noted.get(topic, wake))
        self.plenty.update(wakes)

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note the wake times of newly committed tasks."""
        merge_earliest(self._noted, wakes)
        for topic, wake in wakes.items():
            if wake < self._positions.get(topic, 0):
                self._positions[topic] = wake


# --- bounds of thorough scans

SHARE = 20
"""After an expensive full scan, the next one waits for this multiple of its duration."""
LONGEST = 600.0
"""The maximum duration of a full scan, in seconds."""


class ScanBounds:
    """The bounds at which thorough scans begin while full scans are expensive. Belongs to the leasing connection.

    A crash of the server may lose the newest commits, which puts tasks back at their old positions. So a new connection
    starts without bounds, and its first scan is full. A full scan that exceeds the time limit of a call may take twice
    as long the next time. So a worker that starts while an old transaction blocks vacuum starts late.
    """

    def __init__(
        self, *, used: bool, background: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used` false: every thorough scan is full, because the clock may jump or a crash may go unnoticed.

        `background` begins a full scan, and returns false if it could not.
        """
        self._used = used
        self._background = background
        self._clock = clock
        self._connection: object = None
        self.patience = 0.0
        """Seconds that a full scan may take, if that is more than a call may."""
        self._forget()

    def _forget(self) -> None:
        self._full_at: float | None = None
        """The earliest time of the next background full scan; None: nothing is known, so the next scan is full."""
        self._bounds: dict[Topic, Millis] = {}
        """The start of a scan for waiting tasks."""

    def on_connection(self, connection: object) -> None:
        """Note the connection that scans; forget the bounds if it is a new one."""
        if connection is not self._connection:
            self._connection = connection
            self._forget()

    @contextmanager
    def timed(self, *, full: bool) -> Iterator[Callable[[], float]]:
        """Time a scan; yield a function that returns the seconds so far. After a failed full one, allow more time."""
        began = self._clock()
        try:
            yield lambda: self._clock() - began
        except BaseException:
            if full:
                self.patience = min(max(self.patience, 2 * (self._clock() - began)), LONGEST)
            raise

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note the wake times of newly committed tasks."""
        for topic, wake in wakes.items():
            if wake < self._bounds.get(topic, 0):
                self._bounds[topic] = wake

    def _wait(self, took: float) -> None:
        """Set the earliest time of the next full scan, after one that took `took` seconds."""
        self._full_at = self._clock() + took * SHARE


# --- leasing

LATER: Millis = 20
"""The delay before the next scan for tasks that stay locked, such as by an open transaction of the application."""
POLL: Millis = 200
"""The polling interval of a worker that gets no notifications of tasks that other processes schedule."""
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between scans for tasks that others have locked: a verb takes a few round trips."""


class Leasing(ABC):
    """Leases due tasks. Belongs to the leasing connection and its event loop."""

    bounds: Any
    """The server's ScanBounds."""

    def __init__(self, runtime: Any, positions: ScanPositions) -> None:
        self._runtime = runtime
        self._connection: JournaledConnection[Any] = runtime.connections["lease"]
        self.positions = positions
        self._scanning: asyncio.Task[None] | None = None

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        """Note the wake times of newly committed tasks."""
        self.positions.note_wakes(wakes)
        self.bounds.note_wakes(wakes)

    async def lease(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> Leased:
        """Lease due tasks: O(log n) per task, however many wait, and a few seeks per topic.

        `about`: the server's time, as far as it is known.

        Tasks that others have locked are skipped. If nothing else is due, the scan is repeated a few times, since a
        verb locks a task only for a moment.
        """
        wants = dict(sorted(wants.items()))  # all calls lock in the same order
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
        """Begin a full scan; return False if one is under way."""
        if self._scanning is not None and not self._scanning.done():
            return False
        self._scanning = asyncio.get_running_loop().create_task(self._run_scan(asked), name="bide full scan")
        return True

    async def _run_scan(self, asked: Any) -> None:
        async def work(call: Any) -> None:
            call.allow(LONGEST)
            await self._scan_fully(call, asked)

        try:
            await self._runtime.connections["scan"].read(work)
        except StoreError as error:
            self._runtime.dialect.log.info("a full scan failed: %s", error)

    async def close(self) -> None:
        """Cancel the full scan that is under way."""
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait([self._scanning])

    # --- the server's part; `wants` is sorted

    @abstractmethod
    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        """Lease due tasks, oldest first; also return whether a due task was locked and skipped."""

    @abstractmethod
    async def _read_wake(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis
    ) -> tuple[Leased, Collection[Topic]]:
        """Read the heads, and determine in which of the wanted topics something is due, if that is of use."""

    @abstractmethod
    async def _scan_fully(self, call: Any, asked: Any) -> None:
        """Scan from the very start of the index, which may take long, and pass the result to `bounds`."""
