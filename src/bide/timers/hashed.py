"""A hashed timing wheel: one ring of slots, round and round, for times that mostly lie within a few laps.

**The idea.** Take a ring of `slots` slots, each `tick` milliseconds wide, and a hand that goes round it. An item due
at time T rests in slot `(T // tick) mod slots`. The hand comes by once a lap (`tick * slots` ms); at each slot it takes
what is due and leaves what belongs to a later lap.

    tick 1 ms, 8 slots, the hand at 2:      slot   0    1    2    3    4    5    6    7
                                                            ^hand
    add("a", 5)   slot 5, this lap                                         a
    add("b", 13)  slot 5, next lap                                         a,b
    advance(5)    takes a; b stays: 13 > 5                                 b

A task for 3,610 s on the classic ring of 3,600 one-second slots lands 10 slots on, with one lap to go. The classic
ring stores that count of laps and lowers it at every visit; comparing the time itself needs no count that can go
wrong, is exact when `advance` comes late or jumps over laps, and keeps to the millisecond whatever the tick: the slot
of the present is looked at again until it has passed.

**The cost.** `add`, `cancel`, `move`: O(1). `advance`: O(items in the slots passed), due or not, so with n items
evenly spread over many laps it looks at n / slots of them per tick. Of 1,000,000 items over an hour on 16,384 slots of
1 ms these are 61 per tick: some 1 % of a core, for ever. That is what is wasteful here; it is fine when a lap covers
most of the delays (most items are then met once), and it is what the hierarchical wheel avoids. Empty slots cost
nothing: which are in use is one byte each, searched by `bytearray.find` at many bytes a nanosecond, and nothing at all
is visited before the earliest time known.

Source: G. Varghese and A. Lauck, "Hashed and Hierarchical Timing Wheels", SOSP 1987, scheme 6; Netty's
`HashedWheelTimer` is the best known library form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bide.core.instants import Millis
from bide.timers.wheel import SLACK, Item, Wheel

_LOOK = 1024
"""So many entries are looked at for the earliest time before a wake-up for nothing is the cheaper way."""


def slot_for(at: Millis, tick: Millis, slots: int) -> int:
    """Where on the ring a time rests.

    >>> slot_for(3_610_000, tick=1000, slots=3600)
    10
    """
    return at // tick % slots


def laps_for(now: Millis, at: Millis, tick: Millis, slots: int) -> int:
    """How often the hand passes the slot of `at` before it is due.

    >>> laps_for(0, 3_610_000, tick=1000, slots=3600), laps_for(0, 3_599_000, tick=1000, slots=3600)
    (1, 0)
    """
    return (at // tick - now // tick) // slots


def passed(occupied: bytearray, first: int, last: int) -> Iterator[int]:
    """The slots in use that the hand meets from tick number `first` to `last`, in its order, each once.

    >>> list(passed(bytearray([1, 0, 1, 1]), first=7, last=8))
    [3, 0]
    >>> list(passed(bytearray([1, 0, 1, 1]), first=7, last=10**12))
    [3, 0, 2]
    """
    slots = len(occupied)
    start = first % slots
    length = min(last - first + 1, slots)
    for low, high in ((start, min(start + length, slots)), (0, start + length - slots)):
        slot = occupied.find(1, low, high) if high > low else -1
        while slot >= 0:
            yield slot
            slot = occupied.find(1, slot + 1, high)


class HashedWheel(Wheel[Item]):
    """A timer for many items whose delays mostly fit into one lap of `tick * slots` milliseconds.

    >>> wheel = HashedWheel[str](tick=1000, slots=3600)
    >>> wheel.add("order 42", 3_610_000)
    >>> wheel.advance(10_000), wheel.advance(3_609_999), wheel.advance(3_610_000)
    ([], [], ['order 42'])

    `tick` is how wide a slot is, in milliseconds; it changes the cost, not the answers. `start` is the present when
    the wheel is made.

    Raises ValueError for a tick or slots below 1.
    """

    __slots__ = ("_hand", "_occupied", "_searched", "_slots", "_soonest", "_tick")

    def __init__(self, *, tick: Millis = 1, slots: int = 16_384, start: Millis = 0) -> None:
        super().__init__()
        if tick < 1 or slots < 1:
            raise ValueError(f"tick and slots must be 1 or more, not {tick} and {slots}")
        self._tick = tick
        self._slots = slots
        self._hand = start
        # 1 where the slot has a bucket
        self._occupied = bytearray(slots)
        # no item is due before this; whether it is known to be the best bound that can be had cheaply
        self._soonest: float = math.inf
        self._searched = True

    def add(self, item: Item, at: Millis) -> None:
        """Remember `item` for `at`; one that is there already is moved. O(1)."""
        self._at[item] = at
        hand = self._hand
        # what has passed goes to the slot of the present, the first that the next advance looks at
        slot = (at if at > hand else hand) // self._tick % self._slots
        bucket = self._buckets.get(slot)
        if bucket is None:
            self._buckets[slot] = [item]
            self._occupied[slot] = 1
        else:
            bucket.append(item)
        if at < self._soonest:
            self._soonest = at
        self._filed += 1
        if self._filed > self._limit:
            self._sweep()

    def advance(self, now: Millis) -> list[Item]:
        """Take out and return every item with `at <= now`, in order of `at`. O(items in the slots passed)."""
        before = self._hand
        now = max(before, now)
        self._hand = now
        if now < self._soonest:
            return []
        due: list[Item] = []
        get, later = self._at.get, now + 1
        for slot in passed(self._occupied, before // self._tick, now // self._tick):
            bucket = self._buckets[slot]
            due += [item for item in bucket if get(item, later) <= now]
            waiting = [item for item in bucket if get(item, now) > now]
            self._filed -= len(bucket) - len(waiting)
            if waiting:
                self._buckets[slot] = waiting
            else:
                self._drop(slot)
        self._soonest, self._searched = later, False
        if self._filed > 2 * len(self._at) + SLACK:
            self._sweep()
        return self._take(due)

    def next_deadline(self) -> Millis | None:
        """A time not later than the earliest `at`; None when empty.

        The exact one, unless a search of 1,024 entries did not find it: then the slot that the search came to.
        Remembered until the next `advance` that passes it.
        """
        if not self._at:
            return None
        if not self._searched:
            self._soonest, self._searched = self._search(), True
        return int(self._soonest)

    def _search(self) -> Millis:
        hand, tick, slots = self._hand, self._tick, self._slots
        present = hand // tick
        looked = 0
        beyond = math.inf
        for slot in passed(self._occupied, present, present + slots - 1):
            bucket = self._buckets[slot]
            # the end of this slot in the lap that begins now
            number = present + (slot - present) % slots
            if looked and looked + len(bucket) > _LOOK:
                return number * tick
            looked += len(bucket)
            earliest = min(map(self._at.__getitem__, self._sift(slot, bucket)), default=math.inf)
            if earliest < (number + 1) * tick:
                return int(earliest)
            beyond = min(beyond, earliest)
        return int(beyond)

    def _sift(self, index: int, bucket: list[Item]) -> list[Item]:
        at, hand, tick, slots = self._at, self._hand, self._tick, self._slots
        return [item for item in dict.fromkeys(bucket) if item in at and max(at[item], hand) // tick % slots == index]

    def _drop(self, slot: int) -> None:
        del self._buckets[slot]
        self._occupied[slot] = 0

    def _clear(self) -> None:
        for slot in self._buckets:
            self._occupied[slot] = 0
        self._buckets.clear()
        self._round.clear()
        self._filed = 0
        self._soonest, self._searched = math.inf, True
