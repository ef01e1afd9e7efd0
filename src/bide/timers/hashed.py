"""A hashed timing wheel: one ring of slots, for times that mostly lie within one lap.

**The idea.** Take a ring of `slots` slots, each `tick` milliseconds wide, and a hand that goes round it. An item due
at time T rests in slot `(T // tick) mod slots`. The hand passes each slot once a lap (`tick * slots` ms); it takes the
items of this lap and leaves the rest.

    tick 10 ms, 8 slots, the hand in slot 2 (20..29 ms):     slot   0    1    2    3    4    5    6    7
                                                                          ^hand
    add("a", 53)   slot 5, this lap                                                      a
    add("b", 131)  slot 5, next lap                                                      a,b
    advance(50)    the hand enters slot 5: "a" goes to the heap of the near              b
    advance(53)    the heap gives "a"

A task for 3,610 s on the classic ring of 3,600 one-second slots lands 10 slots on, with one lap to go. The classic
ring stores the number of laps and lowers it at every visit. This wheel compares the time itself: it needs no count that
can go wrong, and is exact if `advance` comes late or skips laps. The classic ring also rounds to its tick; here the
items of the current slot wait in a small heap for their exact millisecond. So tick and slots change only the cost,
never the answers.

**The cost.** `add`, `cancel`, `move`: O(1), or O(log of the items in the heap) for a time less than a tick ahead.
`advance`: O(items in the slots entered), due or not, so that each of n items is visited once a lap. With 1,000,000
items over an hour on the default ring of 65 s, that is 15,000 visits a second: constantly some 1 % of a core. This is
the waste of the design. It is fine if a lap covers most of the delays (most items are then visited once), and the
hierarchical wheel avoids it. Empty slots cost nothing: one byte marks each slot in use, and `bytearray.find` searches
many bytes a nanosecond. No slot is visited before the earliest known time.

**Why 512 slots of 128 ms**, and not 65,536 of 1 ms, which have the same lap and as many visits: a million items would
be spread over 65,536 lists, and nearly every `add` would miss the processor's caches (770 ns instead of 290). Even
fewer slots are hardly faster, and make the work at each entered slot (2,000 items of a million, 1 ms) longer.

Source: G. Varghese and A. Lauck, "Hashed and Hierarchical Timing Wheels", SOSP 1987, scheme 6; Netty's
`HashedWheelTimer` is the best known library form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bide.core.instants import Millis
from bide.timers.heap import HeapTimer
from bide.timers.wheel import SLACK, Item, Wheel

_MOST_SCANNED = 1024
"""The most entries that are scanned for the earliest time; beyond that, a needless wake-up is cheaper."""


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
    >>> wheel.add("order 42", 3_610_500)
    >>> wheel.advance(10_000), wheel.advance(3_610_499), wheel.advance(3_610_500)
    ([], [], ['order 42'])

    `tick` is the width of a slot in milliseconds; it changes the cost, not the answers. `start` is the time when the
    wheel is made.

    Raises ValueError for a tick or slots below 1.
    """

    __slots__ = ("_hand", "_latest", "_near", "_occupied", "_searched", "_slots", "_soonest", "_tick")

    def __init__(self, *, tick: Millis = 128, slots: int = 512, start: Millis = 0) -> None:
        super().__init__()
        if tick < 1 or slots < 1:
            raise ValueError(f"tick and slots must be 1 or more, not {tick} and {slots}")
        self._tick = tick
        self._slots = slots
        self._latest = start
        # the end of the last slot that the hand has entered: items due before it are in the heap, all others on the
        # ring
        self._hand = (start // tick + 1) * tick
        self._near = HeapTimer[Item]()
        # 1 for each slot that has a bucket
        self._occupied = bytearray(slots)
        # no item on the ring is due before this; and True if no better bound can be found cheaply
        self._soonest: float = math.inf
        self._searched = True

    def add(self, item: Item, at: Millis) -> None:
        """Add `item` for `at`; an existing item is moved. O(1)."""
        if at < self._hand:
            super().cancel(item)
            self._near.add(item, at)
            return
        if item in self._near:
            self._near.cancel(item)
        self._at[item] = at
        slot = at // self._tick % self._slots
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

    def cancel(self, item: Item) -> bool:
        """Remove `item`; False: it was absent. O(1)."""
        if self._at.pop(item, None) is None:
            return self._near.cancel(item)
        if not self._at:
            self._clear()
        return True

    def advance(self, now: Millis) -> list[Item]:
        """Remove and return all items with `at <= now`, in order of `at`. O(items in the slots entered)."""
        self._latest = now = max(self._latest, now)
        due = self._near.advance(now)
        # the hand may lag while no item on the ring is due, and catches up when one is
        if now < self._soonest:
            return due
        first, last = self._hand // self._tick, now // self._tick
        self._hand = end = (last + 1) * self._tick
        met: list[Item] = []
        get = self._at.get
        for slot in passed(self._occupied, first, last):
            bucket = self._buckets[slot]
            met += [item for item in bucket if get(item, end) < end]
            waiting = [item for item in bucket if get(item, now) >= end]
            self._filed -= len(bucket) - len(waiting)
            if waiting:
                self._buckets[slot] = waiting
            else:
                del self._buckets[slot]
                self._occupied[slot] = 0
        self._soonest, self._searched = end, False
        if self._filed > 2 * len(self._at) + SLACK:
            self._sweep()
        near = [(item, self._at[item]) for item in dict.fromkeys(met) if self._at[item] > now]
        for item, at in near:
            del self._at[item]
            self._near.add(item, at)
        return due + self._take([item for item in met if item in self._at])

    def next_deadline(self) -> Millis | None:
        """A time not later than the earliest `at`; None when empty.

        It is exact unless a search of 1,024 entries did not find it; then it is the slot that the search reached. It is
        cached until the next `advance` that passes it.
        """
        nearest = self._near.next_deadline()
        if nearest is not None or not self._at:
            return nearest
        if not self._searched:
            self._soonest, self._searched = self._search(), True
        return int(self._soonest)

    def _search(self) -> Millis:
        tick, slots = self._tick, self._slots
        first = self._hand // tick
        scanned = 0
        beyond = math.inf
        for slot in passed(self._occupied, first, first + slots - 1):
            bucket = self._buckets[slot]
            # the slot as the hand will next enter it
            number = first + (slot - first) % slots
            if scanned and scanned + len(bucket) > _MOST_SCANNED:
                return number * tick
            scanned += len(bucket)
            earliest = min(map(self._at.__getitem__, self._sift(slot, bucket)), default=math.inf)
            if earliest < (number + 1) * tick:
                return int(earliest)
            beyond = min(beyond, earliest)
        return int(beyond)

    def _sift(self, index: int, bucket: list[Item]) -> list[Item]:
        at, tick, slots = self._at, self._tick, self._slots
        return [item for item in dict.fromkeys(bucket) if item in at and at[item] // tick % slots == index]

    def _clear(self) -> None:
        for slot in self._buckets:
            self._occupied[slot] = 0
        self._buckets.clear()
        self._round.clear()
        self._filed = 0
        self._soonest, self._searched = math.inf, True

    def __len__(self) -> int:
        return len(self._at) + len(self._near)

    def __contains__(self, item: object) -> bool:
        return item in self._at or item in self._near
