"""Where thorough looks begin while whole ones are dear: no earlier than anything can still appear.

A thorough look (`scan_position`) is a whole one as long as that is cheap: from the very start. While somebody holds an
old snapshot it is not: each entry of an index that has died since is stepped over, and its row read to see that it is
dead, 0.3 us for each; after a minute of 4,000 tasks a second that is a quarter of a second, in which nothing else is
leased.

So then whole looks are made beside, on a connection of their own, and for no more than a small part of the time: they
only say where there is something. And a thorough look begins at a bound. That this finds everything all the same, needs
no assumption of how long transactions last. Whatever is written wakes, and its lease ends, no earlier than the clock
was when its statement began; and a transaction that has written tasks, or locked them, keeps a lock of that kind on the
table until it is over. So before each look we read what time it is and which transactions have such a lock. One that
has none by then is either over, and the look sees what it did; or its tasks come no earlier than that time. One that
has is remembered with the time of the last reading at which it had none. The earliest of these times is the next look's
bound, for each topic of which nothing due was left.

A whole look that is not over in the time that a call may take may take twice as long the next time: a worker that
begins to work under an hour-old snapshot begins late, and goes on with bounds.

A crash of the server may take the newest leases, and their tasks wait again at their old place; so with another
connection the first look is a whole one. A pooler hides that from us, and behind one each look is whole.

What is not found so until the next whole look: what was written by hand, or after the server's clock was set back by
less than shows between two readings; and what was locked where a whole look found more due than was wanted, so that
there is no bound, and looks begin where ordinary ones do.

When the next lease ends is looked for in the next moments, and then from the first end on that the last look has seen;
the shorter leases of others that were given since come into sight when they are about to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.sql.scan_position import SLACK

DEAR = 0.003
"""Seconds from which on a whole look is dear."""
SHARE = 20
"""A dear look is followed by no other whole one for this many times as long as it took."""
SOON: Millis = 1_500
"""How far ahead the end of a lease is always looked for: until well after the next thorough look."""
LONGEST = 600.0
"""Seconds that a whole look may take at most."""
PREPARED = "-1/"
"""How the name of a prepared transaction begins: it had another name when it wrote."""


class Reach(NamedTuple):
    """From where on a look is to look, topic by topic: for what waits, for what is lost, for the next end."""

    waiting: list[Millis]
    lost: list[Millis]
    ends: list[Millis]
    whole: bool


class Asked(NamedTuple):
    """A whole look that is made beside: at what, and up to when what was written is there for it to see."""

    topics: list[Topic]
    sure: Millis


class Bounds:
    """Belongs to the one connection that leases."""

    __slots__ = (
        "_asked", "_beside", "_bounds", "_clock", "_connection", "_ends", "_last", "_lasts", "_read", "_since", "_sure",
        "_told_all", "_used", "_whole", "_whole_at", "patience", "watching",
    )  # fmt: skip

    def __init__(
        self, *, used: bool, beside: Callable[[Asked], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used` false: each look is a whole one, where the clock may leap, or a crash may be hidden from us.

        `beside` begins a whole look, and says whether it could.
        """
        self._used = used
        self._beside = beside
        self._clock = clock
        self._connection: object = None
        self.watching = False
        """Whether `read` is to be called before a thorough look: whole ones have become dear."""
        self.patience = 0.0
        """Seconds that a whole look may take, if that is more than a call may."""
        self._told_all = False
        """Whether there was a whole look since there is something that a bound can be."""
        self._whole_at: float | None = None
        """From when on the next whole look may be made beside; None: nothing is known, and the next look is one."""
        self._asked: Asked | None = None
        """The whole look that is under way beside."""
        self._bounds: dict[Topic, Millis] = {}
        self._ends: dict[Topic, Millis] = {}
        self._lasts: Millis = 0
        self._last: dict[Topic, Millis] = {}
        self._whole = True
        self._read: Millis | None = None
        self._since: dict[str, Millis] = {}
        self._sure: Millis = 0

    def on(self, connection: object) -> None:
        """Which connection looks. After a crash it is another, and newest leases may be undone: so nothing is known."""
        if connection is not self._connection:
            self._connection = connection
            self._forget()

    def read(self, at: Millis, writers: Sequence[str]) -> None:
        """What time it was there, and which transactions had the table locked for writing then or just after."""
        if self._read is not None and at < self._read:
            self._forget()  # the clock was set back
        before = 0 if self._read is None else self._read
        self._since = {
            name: self._since.get(name, self._sure if name.startswith(PREPARED) else before) for name in writers
        }
        self._read, self._sure = at, min([at, *self._since.values()])

    def _forget(self) -> None:
        self._told_all = False
        self._bounds.clear()
        self._ends.clear()
        self._last.clear()
        self._since.clear()
        self._sure, self._read = 0, None
        self._whole_at = self._asked = None

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
            self._whole_at = self._clock() + took * SHARE
            self.patience = 0.0
            self._told_all = self._sure > 0
            if not self.watching:
                self._forget()
        elif self._whole_at is not None and self._clock() >= self._whole_at and self._told_all and self._asked is None:
            asked = Asked(list(topics), self._sure)
            self._asked = asked if self._beside(asked) else None
        self._last.update(dict.fromkeys(topics, there))

    def failed(self, took: float, reach: Reach) -> None:
        """A look came to nothing after so many seconds; if it was a whole one, the next may take longer."""
        if reach.whole:
            self.patience = min(max(self.patience, 2 * took), LONGEST)

    def found(self, asked: Asked, first: Millis | None, took: float) -> None:
        """What a whole look beside has found: the first task that waits, or whose lease ends."""
        if asked is not self._asked:  # nothing is known any more
            return
        self._asked = None
        self._whole_at = self._clock() + took * SHARE
        if took <= DEAR:
            self.watching = False
            self._forget()
            return
        for topic in asked.topics:
            known = self._bounds.get(topic, asked.sure)
            self._bounds[topic] = known if first is None else min(known, first)

    def lost_sight(self, asked: Asked) -> None:
        """A whole look beside is over."""
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

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        for topic, wake in wakes.items():
            bound = self._bounds.get(topic)
            if bound is not None and wake < bound:
                self._bounds[topic] = wake
