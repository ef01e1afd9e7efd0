"""Leasing on a SQL server: when a lease looks again at what others have locked, and whole looks in the background.

From where on to look: past the remains of what was leased before.

What was leased, settled or moved leaves an entry in the index until vacuum comes, at its old time. So what lies before
now is a graveyard: a lease that began at its start would step over all that was done since the last vacuum, and with an
old snapshot held somewhere over all that was done since then. But nothing new can appear far back, since whatever
begins to wait wakes at the earliest when it is written. So a lease begins where the one before left off.

What could be missed all the same, a task whose transaction was open for long, or that somebody had locked and let go,
is found by looking thoroughly once a second, from the start and for lost leases too; the former is also told of when it
is committed. So it costs a second at most. A thorough look also says when the next lease ends that others hold, and the
look after that is thorough too: a lost lease is noticed when it ends.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.stores.sql.journaled_connection import JournaledConnection

THOROUGH = 0.9
"""Seconds between thorough looks, so that a worker which sleeps at most a second is thorough whenever it wakes."""
SLACK: Millis = 1_000
"""How long a transaction may be open, so that its tasks are not yet too far back when they appear."""


class ScanFloors:
    """Of each topic: from where on to look, and when it was last looked at thoroughly."""

    __slots__ = ("_ends", "_floors", "_heard", "_looked", "_plenty", "_slack", "_used")

    def __init__(self, *, used: bool, slack: Millis = SLACK) -> None:
        """`used` false: every look is thorough, for a clock that is the caller's and may leap.

        `slack`: how far before now a look begins at least. What has died there is stepped over by each.
        """
        self._used = used
        self._slack = slack
        self._heard: dict[Topic, Millis] = {}
        """The wakes told of since the last look began, which may not have seen them."""
        self._floors: dict[Topic, Millis] = {}
        self._looked: dict[Topic, float] = {}
        self._ends: Millis | None = None
        self._plenty: set[Topic] = set()

    def ask(self, topics: Collection[Topic], about: Millis) -> tuple[list[Millis], bool]:
        """From where on to look, topic by topic, and whether thoroughly. `about`: what time it is there."""
        now = time.monotonic()
        self._heard.clear()
        ended = self._ends is not None and self._ends <= about
        if not self._used or ended or any(self._looked.get(topic, -1.0) < now - THOROUGH for topic in topics):
            self._ends = None
            for topic in topics:
                self._looked[topic] = now
            return [0] * len(topics), True
        return [self._floors.get(topic, 0) for topic in topics], False

    def floor(self, topic: Topic) -> Millis:
        """From where on a look that is not thorough would look; 0 for a topic that was never emptied."""
        return self._floors.get(topic, 0)

    def ends(self, at: Millis | None) -> None:
        """When the next lease ends that a thorough look has seen."""
        self._ends = at

    def sleep(self, wake: Millis | None, now: Millis, *, thorough: bool) -> Millis | None:
        """When to look again, if `wake` is the earliest of what waits: not after the next lease ends.

        A look that was not thorough has not seen when leases end: nobody is to sleep past the next that is.
        """
        wakes = [at for at in (wake, self._ends) if at is not None]
        if not thorough:
            wakes.append(now + int(THOROUGH * 1000) + 1)
        return min(wakes, default=None)

    def emptied(self, topics: Collection[Topic], now: Millis) -> None:
        """Nothing due was left of these."""
        for topic in topics:
            self._floors[topic] = min(now - self._slack, self._heard.get(topic, now))
            self._plenty.discard(topic)

    def plenty(self, topic: Topic) -> bool:
        """True if more of it was due than the last look has taken, as far as is known."""
        return topic in self._plenty

    def ran_short(self, topic: Topic) -> None:
        """There was less of it than was wanted, and why was not looked at."""
        self._plenty.discard(topic)

    def reached(self, wakes: Mapping[Topic, Millis]) -> None:
        """More may be due of these; the last that was taken woke then."""
        for topic, wake in wakes.items():
            self._floors[topic] = min(wake, self._heard.get(topic, wake))
        self._plenty.update(wakes)

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        for topic, wake in wakes.items():
            self._heard[topic] = min(wake, self._heard.get(topic, wake))
            floor = self._floors.get(topic)
            if floor is not None and wake < floor:
                self._floors[topic] = wake

    def failed(self, topics: Sequence[Topic]) -> None:
        """A look did not come to its end."""
        for topic in topics:
            self._looked.pop(topic, None)


# --- thorough looks while a transaction holds an old snapshot

SHARE = 20
"""An expensive look is followed by no other whole one for this many times as long as it took."""
LONGEST = 600.0
"""Seconds that a whole look may take at most."""


class WholeLooks:
    """Where thorough looks begin. Belongs to the one connection that leases.

    A thorough look is a whole one, from the very start, as long as that is cheap. While another holds an old snapshot
    it is not: nothing that has died since is removed, and each look steps over all of it. So then whole looks are made
    in the background, on a connection of their own, and for no more than a small part of the time: they only say where
    there is something. And a thorough look begins at a bound, of which each server has its own.

    A crash of the server may undo the newest commits, and tasks lie at their old place; so with another connection
    nothing is known, and the first look is a whole one. One that is not over in the time that a call may take may take
    twice as long the next time: a worker that begins to work under an old snapshot begins late.
    """

    __slots__ = ("_background", "_bounds", "_clock", "_connection", "_used", "_whole_at", "patience")

    def __init__(
        self, *, used: bool, background: Callable[[Any], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used` false: each is a whole one, where the clock may leap, or a crash may be hidden from us.

        `background` begins a whole look, and says whether it could.
        """
        self._used = used
        self._background = background
        self._clock = clock
        self._connection: object = None
        self._whole_at: float | None = None
        """From when on the next whole look may be made in the background; None: nothing is known, the next is one."""
        self._bounds: dict[Topic, Millis] = {}
        """From where on to look for what waits."""
        self.patience = 0.0
        """Seconds that a whole look may take, if that is more than a call may."""

    def on(self, connection: object) -> None:
        """Note which connection looks."""
        if connection is not self._connection:
            self._connection = connection
            self._forget()

    def failed(self, took: float, *, whole: bool) -> None:
        """A look came to nothing after so many seconds; if it was a whole one, the next may take longer."""
        if whole:
            self.patience = min(max(self.patience, 2 * took), LONGEST)

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        for topic, wake in wakes.items():
            if wake < self._bounds.get(topic, 0):
                self._bounds[topic] = wake

    def _wait(self, took: float) -> None:
        """A whole look took so long: note when the next may be made."""
        self._whole_at = self._clock() + took * SHARE

    def _forget(self) -> None:
        self._whole_at = None
        self._bounds.clear()


LATER: Millis = 20
"""When to look again at what somebody keeps locked for longer, as an open transaction of the application's may."""
POLL: Millis = 200
"""How often a worker looks while nothing tells it of what others schedule."""
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between looks at what others have locked: a verb takes a few round trips."""


class Leasing(ABC):
    """Takes what is due, and knows from where on to look. Belongs to the connection that leases, and its event loop."""

    bounds: Any
    """Where thorough looks begin while whole ones are expensive."""

    def __init__(self, runtime: Any, floors: ScanFloors) -> None:
        self._runtime = runtime
        self._connection: JournaledConnection[Any] = runtime.connections["lease"]
        self.floors = floors
        self._whole: asyncio.Task[None] | None = None

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        self.floors.told(wakes)
        self.bounds.told(wakes)

    async def lease(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> Leased:
        """Take what is due: O(log n) per task taken, whatever else waits, and a few seeks per topic.

        `about`: what time it is there, as far as is known.

        What others have locked is passed over. If there is nothing else, it is looked for again a few times: whoever
        locks a task has decided something about it in a moment.
        """
        if not any(want > 0 for want in wants.values()):
            leased, _ = await self._look(wants, now, about)
            return leased
        for pause in _PAUSES:
            leased, skipped = await self._take(wants, now, about, lasts, holder)
            if leased.tasks or not skipped:
                return leased
            await asyncio.sleep(pause)
        leased, _ = await self._take(wants, now, about, lasts, holder)
        return leased

    def look_in_background(self, asked: Any) -> bool:
        """Begin a whole look, unless one is under way: then False. If the store is away that is logged, and no more."""
        if self._whole is not None and not self._whole.done():
            return False
        self._whole = asyncio.get_running_loop().create_task(self._look_aside(asked), name="bide whole look")
        return True

    async def _look_aside(self, asked: Any) -> None:
        try:
            await self._look_whole(self._runtime.connections["whole"], asked)
        except StoreError as error:
            self._runtime.dialect.log.info("a look from the very start came to nothing: %s", error)

    async def close(self) -> None:
        """End the look that is under way."""
        if self._whole is not None:
            self._whole.cancel()
            await asyncio.wait([self._whole])

    # --- the server's part

    @abstractmethod
    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        """Take what is due, oldest first, and tell whether something due was locked and passed over."""

    @abstractmethod
    async def _look(self, wants: Mapping[Topic, int], now: Millis | None, about: Millis) -> tuple[Leased, bool]:
        """Read the next wake, and tell whether something is due."""

    @abstractmethod
    async def _look_whole(self, connection: Any, asked: Any) -> None:
        """Read what comes first from the very start, which may take long, and tell `bounds`."""
