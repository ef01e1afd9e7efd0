"""How far back a thorough look goes, while looking from the very start is dear.

A thorough look (`scan_position`) is a whole one as long as that is cheap: from the very start. While somebody holds
an old snapshot it is not: InnoDB removes nothing that has died since, and each look steps over all of it. So then
whole looks are made beside, on a connection of their own, and for no more than a small part of the time: they only
say where there is something. And a thorough look begins:

- for what waits, five seconds before the last thorough look, or where that has left something that is due. Whatever is
  written wakes no earlier than when it was written: so what is missed, until the next whole look, is what a transaction
  has written, or kept locked, that was open for longer than that.
- for lost leases, a second before the last thorough look: a lease ends later than when it was given or extended, by
  more than the statement that does so may take.

A crash of the server may undo the newest commits, where it does not flush each, and their tasks lie at their old place:
so with another connection nothing is known, and the first look is a whole one. If it is cut short, the next may take
longer: a worker that begins to work under an old snapshot begins late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.sql.scan_position import SLACK

DEAR = 0.005
"""Seconds from which on a whole look is dear."""
SHARE = 20
"""A dear look is followed by no other whole one for this many times as long as it took."""
BACK: Millis = 5_000
"""How long a transaction may be open, so that its tasks are found by the next thorough look."""
LONGEST = 600.0
"""Seconds that a whole look may take at most."""


class Depth(NamedTuple):
    """From where on a look is to look, topic by topic."""

    waiting: dict[Topic, Millis]
    """For what waits."""
    head: dict[Topic, Millis]
    """For the next wake, and what is due and was passed over."""
    lost: dict[Topic, Millis]
    """For lost leases."""
    whole: bool
    thorough: bool


def everything(topics: Sequence[Topic]) -> Depth:
    nothing = dict.fromkeys(topics, 0)
    return Depth(nothing, nothing, nothing, True, True)


class Depths:
    """Belongs to the connection that leases."""

    __slots__ = (
        "_beside", "_clock", "_connection", "_lost", "_there", "_used", "_waiting", "_whole_at", "patience",
    )  # fmt: skip

    def __init__(
        self, *, used: bool, beside: Callable[[Sequence[Topic]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used` false: each thorough look is a whole one, where the clock may leap. `beside` begins a whole look."""
        self._used = used
        self._beside = beside
        self._clock = clock
        self._connection: object = None
        self._whole_at: float | None = None
        """From when on the next whole look may be made beside; None: each thorough look is one."""
        self._there: Millis = 0
        self._waiting: dict[Topic, Millis] = {}
        self._lost: dict[Topic, Millis] = {}
        self.patience = 0.0
        """Seconds that a whole look may take, if that is more than a call may."""

    def on(self, connection: object) -> None:
        """Which connection looks."""
        if connection is not self._connection:
            self._connection = connection
            self._forget()

    def _forget(self) -> None:
        self._whole_at = None
        self._there = 0
        self._waiting.clear()
        self._lost.clear()

    def reach(self, topics: Sequence[Topic], floors: Sequence[Millis], *, thorough: bool) -> Depth:
        """`floors`: where a look begins that is not thorough."""
        floor = dict(zip(topics, floors, strict=True))
        if not thorough:
            return Depth(floor, floor, {}, False, False)
        if self._whole_at is None:
            return everything(topics)
        waiting = {topic: self._waiting.get(topic, 0) for topic in topics}
        head = {topic: max(waiting[topic], floor[topic]) for topic in topics}
        return Depth(waiting, head, {topic: self._lost.get(topic, 0) for topic in topics}, False, True)

    def looked(self, depth: Depth, took: float, there: Millis) -> None:
        """A thorough look was done at `there`, in so many seconds; what it left is told next."""
        if there < self._there:  # the clock was set back
            self._forget()
        elif depth.whole:
            self.patience = 0.0
            if self._used and took > DEAR:
                self._whole_at = self._clock() + took * SHARE
        elif self._whole_at is not None and self._clock() >= self._whole_at:
            self._beside(list(depth.waiting))
        self._there = there

    def failed(self, depth: Depth, took: float) -> None:
        """A look came to nothing after so many seconds."""
        if depth.whole:
            self.patience = min(max(self.patience, 2 * took), LONGEST)

    def found(self, first: Mapping[Topic, tuple[Millis | None, Millis | None]], took: float) -> None:
        """What a whole look beside has found: the first wake of what waits, and the first end of a lease."""
        if self._whole_at is None:
            return
        self._whole_at = self._clock() + took * SHARE if took > DEAR else None
        for topic, heads in first.items():
            for known, at in zip((self._waiting, self._lost), heads, strict=True):
                if at is not None and at < known.get(topic, 0):
                    known[topic] = at

    def left(self, topic: Topic, waiting: Millis | None, lost: Millis | None) -> None:
        """The wake of the first that the thorough look has left, of those that wait and of those whose lease is lost.

        None: nothing of the kind that was due.
        """
        since = self._there - BACK
        self._waiting[topic] = since if waiting is None else min(since, waiting)
        since = self._there - SLACK
        self._lost[topic] = since if lost is None else min(since, lost)

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        for topic, wake in wakes.items():
            if wake < self._waiting.get(topic, 0):
                self._waiting[topic] = wake
