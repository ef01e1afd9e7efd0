"""Where thorough looks begin while whole ones are expensive: no earlier than anything can still appear.

See `sql.scan_position`; each entry of an index that has died since an old snapshot is stepped over, and its row read to
see that it is dead, 0.3 us for each; after a minute of 4,000 tasks a second that is a quarter of a second, in which
nothing else is leased.

A look from a bound finds everything all the same, however long transactions last. Whatever is written wakes, and its
lease ends, no earlier than the clock was when its statement began; and a transaction that has written tasks, or locked
them, keeps a lock of that kind on the table until it is over. So before each look we read what time it is and which
transactions have such a lock. One that has none by then is either over, and the look sees what it did; or its tasks
come no earlier than that time. One that has is remembered with the time of the last reading at which it had none. The
earliest of these times is the next look's bound, for each topic of which nothing due was left.

A pooler hides from us that the connection is another one, as after a crash, and behind one each look is whole.

What is not found so until the next whole look: what was written by hand, or after the server's clock was set back by
less than shows between two readings; and what was locked where a whole look found more due than was wanted, so that
there is no bound, and looks begin where ordinary ones do.

When the next lease ends is looked for in the next moments, and then from the first end on that the last look has seen;
the shorter leases of others that were given since come into sight when they are about to end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.sql.scan_position import SLACK, WholeLooks

DEAR = 0.003
"""Seconds from which on a whole look is expensive."""
SOON: Millis = 1_500
"""How far ahead the end of a lease is always looked for: until well after the next thorough look."""
PREPARED = "-1/"
"""How the name of a prepared transaction begins: it had another name when it wrote."""


class Reach(NamedTuple):
    """From where on a look is to look, topic by topic: for what waits, for what is lost, for the next end."""

    waiting: list[Millis]
    lost: list[Millis]
    ends: list[Millis]
    whole: bool


class Asked(NamedTuple):
    """A whole look that is made in the background: at what, and up to when what was written is there for it to see."""

    topics: list[Topic]
    sure: Millis


class Bounds(WholeLooks):
    __slots__ = (
        "_asked", "_ends", "_last", "_lasts", "_read", "_since", "_sure", "_told_all", "_whole", "watching",
    )  # fmt: skip

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watching = False
        """True if `read` is to be called before a thorough look: whole ones have become expensive."""
        self._told_all = False
        """True if there was a whole look since there is something that a bound can be."""
        self._asked: Asked | None = None
        """The whole look that is under way in the background."""
        self._ends: dict[Topic, Millis] = {}
        self._lasts: Millis = 0
        self._last: dict[Topic, Millis] = {}
        self._whole = True
        self._read: Millis | None = None
        self._since: dict[str, Millis] = {}
        self._sure: Millis = 0

    def read(self, at: Millis, writers: Sequence[str]) -> None:
        """Take the server's time, and the transactions that had the table locked for writing then or just after."""
        if self._read is not None and at < self._read:
            self._forget()  # the clock was set back
        before = 0 if self._read is None else self._read
        self._since = {
            name: self._since.get(name, self._sure if name.startswith(PREPARED) else before) for name in writers
        }
        self._read, self._sure = at, min([at, *self._since.values()])

    def _forget(self) -> None:
        super()._forget()
        self._told_all = False
        self._ends.clear()
        self._last.clear()
        self._since.clear()
        self._sure, self._read, self._asked = 0, None, None

    def reach(self, topics: Sequence[Topic], floors: Sequence[Millis]) -> Reach:
        """For a thorough look; `floors`: where an ordinary one would begin.

        Where there is no bound, since something due was left, or a transaction is older than the first reading, the
        look begins where an ordinary one would, and for lost leases where the last thorough look left off.
        """
        first = not self._told_all and self._sure > 0
        if not (self._used and self.watching) or first or self._whole_at is None:
            nothing = [0] * len(topics)
            return Reach(nothing, nothing, nothing, True)
        return Reach(
            [min(floor, self._bounds.get(topic, floor)) for topic, floor in zip(topics, floors, strict=True)],
            [self._bounds.get(topic, max(0, self._last.get(topic, 0) - SLACK)) for topic in topics],
            [self._ends.get(topic, 0) for topic in topics],
            False,
        )

    def looked(
        self, topics: Collection[Topic], took: float, there: Millis, reach: Reach, lasts: Millis | None = None
    ) -> None:
        """A thorough look was done at `there`, in so many seconds; a lease that it gave out lasts so long."""
        self._whole = reach.whole
        if lasts is not None:
            self._lasts = lasts
        if reach.whole:
            self.watching = self._used and took > DEAR
            self._wait(took)
            self.patience = 0.0
            self._told_all = self._sure > 0
            if not self.watching:
                self._forget()
        elif self._whole_at is not None and self._clock() >= self._whole_at and self._told_all and self._asked is None:
            asked = Asked(list(topics), self._sure)
            self._asked = asked if self._background(asked) else None
        self._last.update(dict.fromkeys(topics, there))

    def found(self, asked: Asked, first: Millis | None, took: float) -> None:
        """Take the result of a whole scan in the background: the first task that waits, or whose lease ends."""
        if asked is not self._asked:  # nothing is known any more
            return
        self._asked = None
        self._wait(took)
        if took <= DEAR:
            self.watching = False
            self._forget()
            return
        for topic in asked.topics:
            known = self._bounds.get(topic, asked.sure)
            self._bounds[topic] = known if first is None else min(known, first)

    def lost_sight(self, asked: Asked) -> None:
        """A whole look in the background is over."""
        if asked is self._asked:
            self._asked = None

    def emptied(self, topics: Collection[Topic], first: Millis | None = None) -> None:
        """The thorough look left nothing of these that is due; or nothing that is before `first`."""
        if self._told_all:
            bound = self._sure if first is None else min(first, self._sure)
            for topic in topics:
                if self._whole or topic in self._bounds:
                    self._bounds[topic] = bound

    def ended(self, topics: Collection[Topic], first: Millis | None, there: Millis) -> None:
        """When the first lease of these ends that the thorough look at `there` has seen."""
        if self._told_all:
            latest = there + self._lasts
            self._ends.update(dict.fromkeys(topics, latest if first is None else min(first, latest)))
