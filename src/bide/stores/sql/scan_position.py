"""From where on to look: past the remains of what was leased before.

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

import time
from collections.abc import Collection, Mapping, Sequence

from bide.core.instants import Millis
from bide.core.records import Topic

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
