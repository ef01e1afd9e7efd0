"""How far back a thorough look goes, while looking from the very start is expensive; see `sql.scan_position`.

It begins:

- for what waits, five seconds before the last thorough look, or where that has left something that is due. Whatever is
  written wakes no earlier than when it was written: so what is missed, until the next whole look, is what a transaction
  has written, or kept locked, that was open for longer than that.
- for lost leases, a second before the last thorough look: a lease ends later than when it was given or extended, by
  more than the statement that does so may take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.sql.scan_position import SLACK, WholeLooks

DEAR = 0.005
"""Seconds from which on a whole look is expensive."""
BACK: Millis = 5_000
"""How long a transaction may be open, so that its tasks are found by the next thorough look."""


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


class Depths(WholeLooks):
    __slots__ = ("_lost", "_there")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._there: Millis = 0
        self._lost: dict[Topic, Millis] = {}

    def _forget(self) -> None:
        super()._forget()
        self._there = 0
        self._lost.clear()

    def reach(self, topics: Sequence[Topic], floors: Sequence[Millis], *, thorough: bool) -> Depth:
        """`floors`: where a look begins that is not thorough."""
        floor = dict(zip(topics, floors, strict=True))
        if not thorough:
            return Depth(floor, floor, {}, False, False)
        if self._whole_at is None:
            return everything(topics)
        waiting = {topic: self._bounds.get(topic, 0) for topic in topics}
        head = {topic: max(waiting[topic], floor[topic]) for topic in topics}
        return Depth(waiting, head, {topic: self._lost.get(topic, 0) for topic in topics}, False, True)

    def looked(self, depth: Depth, took: float, there: Millis) -> None:
        """A thorough look was done at `there`, in so many seconds; what it left is told next."""
        if there < self._there:  # the clock was set back
            self._forget()
        elif depth.whole:
            self.patience = 0.0
            if self._used and took > DEAR:
                self._wait(took)
        elif self._whole_at is not None and self._clock() >= self._whole_at:
            self._background(list(depth.waiting))
        self._there = there

    def found(self, first: Mapping[Topic, tuple[Millis | None, Millis | None]], took: float) -> None:
        """Take the result of a whole scan in the background: the first wake that waits, and the first lease to end."""
        if self._whole_at is None:
            return
        self._whole_at = None
        if took > DEAR:
            self._wait(took)
        for topic, heads in first.items():
            for known, at in zip((self._bounds, self._lost), heads, strict=True):
                if at is not None and at < known.get(topic, 0):
                    known[topic] = at

    def left(self, topic: Topic, waiting: Millis | None, lost: Millis | None) -> None:
        """The wake of the first that the thorough look has left, of those that wait and of those whose lease is lost.

        None: nothing of the kind that was due.
        """
        since = self._there - BACK
        self._bounds[topic] = since if waiting is None else min(since, waiting)
        since = self._there - SLACK
        self._lost[topic] = since if lost is None else min(since, lost)
