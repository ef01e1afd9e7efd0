"""A hierarchical timing wheel: near times in fine buckets, far times in coarse ones.

**The idea.** A clock does not have 86,400 marks for the seconds of a day; it has three hands. Write a time in digits of
base 256. An item is filed under the *highest digit in which its time differs from the current time*. A difference in
the last digit only (less than 256 ms away) selects an exact millisecond; a difference in the next digit selects a span
of 256 ms; then 65.5 s, 4.7 h, 50 days, 35 years. When the hand reaches the start of a coarse span, its items are filed
again, now by a lower digit. (In base 10, at time 1234: 1238 is filed on level 0 under digit 8; 1290 on level 1 under
digit 9; 2000 on level 3 under digit 2.)

                 level 2 (65.5 s each)      level 1 (256 ms each)      level 0 (1 ms each)
    elapsed = 0  | 0 | 1 | 2 | ... |        | 0 | 1 | 2 | ... |        | 0 | 1 | 2 | ... |
    add 70,000         ^ filed here (70,000 = 1*65,536 + 17*256 + 112)
    at 65,536          '------------------------> digit 17
    at 69,888                                         '------------------> digit 112
    at 70,000                                                                   due

**The cost.** `add`, `cancel`, `move`: O(1), however many items wait. An item is filed again at most once per level
between it and the current time: five times in 35 years, once or twice within an hour. The buckets in use are the bits
of one integer, ordered so that the *lowest bit is the earliest bucket*. So finding the next one takes two operations on
an integer of at most 1,500 bits, and neither idle time nor a jump over a year visits an empty bucket.

**The waste, and why it is fine.** When the hand reaches a coarse bucket, all its items are filed again at once: with
1,000,000 items spread over an hour that is 18,000 items every 65 s, and takes 20 ms. Linux gave this up in 4.8 and
rounds far timers to their bucket, since kernel timers are nearly always cancelled; bide promises the millisecond.

**Base 256**, where tokio has 64: filing an item again is expensive in Python and a wide bit map is cheap, so fewer and
wider levels are better here. Even wider ones (1024) would file 290,000 items at once in the case above.

Sources: G. Varghese and A. Lauck, "Hashed and Hierarchical Timing Wheels", SOSP 1987, scheme 7; the bit map and the
"highest differing digit" as in tokio's time driver; Kafka's purgatory keeps a heap of buckets for the same purpose.
"""

from __future__ import annotations

from bide.core.instants import Millis
from bide.timers.wheel import SLACK, Item, Wheel

DIGIT_BITS = 8
SLOTS_PER_LEVEL = 1 << DIGIT_BITS

_LAST_DIGIT = SLOTS_PER_LEVEL - 1
_MOST_SCANNED = 64
"""The number of entries up to which a bucket is searched for its exact earliest time, instead of a needless wake-up."""


def level_for(elapsed: Millis, at: Millis) -> int:
    """The highest digit (0: the last) in which the two times differ; 0 when `at` has passed.

    >>> level_for(0, 255), level_for(0, 256), level_for(255, 256), level_for(0, 70_000)
    (0, 1, 1, 2)
    """
    return ((elapsed ^ at).bit_length() - 1) // DIGIT_BITS if at > elapsed else 0


def slot_for(level: int, at: Millis) -> int:
    """The digit of `at` on `level`.

    >>> slot_for(2, 70_000), slot_for(1, 70_000), slot_for(0, 70_000)
    (1, 17, 112)
    """
    return at >> (level * DIGIT_BITS) & _LAST_DIGIT


def bucket_for(elapsed: Millis, at: Millis) -> int:
    """The number of the bucket of `at`; buckets of later times have higher numbers.

    A time in the past belongs to the bucket of the current time, which the next `advance` opens.

    >>> bucket_for(0, 70_000) == 2 * SLOTS_PER_LEVEL + 1
    True
    >>> bucket_for(1000, 3) == bucket_for(1000, 1000) == 1000 % SLOTS_PER_LEVEL
    True
    """
    return level_for(elapsed, at) * SLOTS_PER_LEVEL + slot_for(level_for(elapsed, at), max(elapsed, at))


def span_of(elapsed: Millis, bucket: int) -> range:
    """The times that belong to a bucket, without those that have passed.

    >>> span_of(0, bucket_for(0, 70_000))
    range(65536, 131072)
    """
    level, slot = divmod(bucket, SLOTS_PER_LEVEL)
    width = 1 << (level * DIGIT_BITS)
    start = elapsed // (width * SLOTS_PER_LEVEL) * (width * SLOTS_PER_LEVEL) + slot * width
    return range(start, start + width)


class HierarchicalWheel(Wheel[Item]):
    """A timer for any mix of near and far times, exact to the millisecond; the default choice.

    >>> wheel = HierarchicalWheel[str](start=1_700_000_000_000)
    >>> wheel.add("tea", 1_700_000_180_000)
    >>> wheel.add("toast", 1_700_000_090_000)
    >>> wheel.advance(1_700_000_089_999)
    []
    >>> wheel.advance(1_700_000_200_000)
    ['toast', 'tea']

    `start` is the time when the wheel is made. Without it, all items added before the first `advance` are in one far
    bucket, which that `advance` files again: correct, but not free.

    Raises ValueError for a negative `start`.
    """

    __slots__ = ("_elapsed", "_occupied")

    def __init__(self, *, start: Millis = 0) -> None:
        super().__init__()
        if start < 0:
            raise ValueError(f"start must be 0 or later, not {start}")
        self._elapsed = start
        # bit n is set if bucket n exists
        self._occupied = 0

    def add(self, item: Item, at: Millis) -> None:
        """Add `item` for `at`; an existing item is moved. O(1)."""
        elapsed = self._elapsed
        # bucket_for, inlined: three calls would double the cost of an add. 255 is the last digit, and `<< 5` makes 256
        # slots of the 8 bits of a level; a named constant would cost a lookup
        if at > elapsed:
            shift = ((elapsed ^ at).bit_length() - 1) & -DIGIT_BITS
            index = (shift << 5) + (at >> shift & 255)
        else:
            index = elapsed & 255
        self._at[item] = at
        bucket = self._buckets.get(index)
        if bucket is None:
            self._buckets[index] = [item]
            self._occupied |= 1 << index
        else:
            bucket.append(item)
        self._filed += 1
        if self._filed > self._limit:
            self._sweep()

    def advance(self, now: Millis) -> list[Item]:
        """Remove and return all items with `at <= now`, in order of `at`. O(items returned or filed again)."""
        before = self._elapsed
        now = max(before, now)
        # all buckets below the one for `now` have passed; that one has begun
        last = bucket_for(before, now)
        ripe = self._occupied & ((2 << last) - 1)
        self._elapsed = now
        if not ripe:
            return []
        self._occupied ^= ripe
        due: list[Item] = []
        get, later = self._at.get, now + 1
        bucket: list[Item] = []
        index = 0
        while ripe:
            lowest = ripe & -ripe
            ripe ^= lowest
            index = lowest.bit_length() - 1
            bucket = self._buckets.pop(index)
            self._filed -= len(bucket)
            due += [item for item in bucket if get(item, later) <= now]
        if index == last:
            self._file_again(bucket, span_of(before, last).stop)
        if self._filed > 2 * len(self._at) + SLACK:
            self._sweep()
        return self._take(due)

    def _file_again(self, bucket: list[Item], stop: Millis) -> None:
        """Spread the items of a begun bucket that are not due yet over finer buckets."""
        get, elapsed = self._at.get, self._elapsed
        for item in dict.fromkeys(bucket):
            at = get(item)
            # the time is later than the bucket's: the item was moved, and its live entry is elsewhere
            if at is not None and elapsed < at < stop:
                self.add(item, at)

    def next_deadline(self) -> Millis | None:
        """A time not later than the earliest `at`; None when empty.

        It is exact unless the earliest bucket is a coarse one with many entries; then it is the start of that bucket,
        which must be filed again then anyway. O(1): reads at most 64 entries, or those that have already passed.
        """
        while self._at:
            index = (self._occupied & -self._occupied).bit_length() - 1
            span = span_of(self._elapsed, index)
            bucket = self._buckets[index]
            if len(bucket) > _MOST_SCANNED and span.start > self._elapsed:
                return span.start
            alive = self._sift(index, bucket)
            if alive:
                return min(map(self._at.__getitem__, alive))
            del self._buckets[index]
            self._occupied ^= 1 << index
            self._filed -= len(bucket)
        return None

    def _sift(self, index: int, bucket: list[Item]) -> list[Item]:
        span = span_of(self._elapsed, index)
        # the bucket of the current time also holds items whose time had passed when they were added
        start = span.start if span.start > self._elapsed else -1
        get, stop = self._at.get, span.stop
        if start >= 0:
            return [item for item in dict.fromkeys(bucket) if start <= get(item, -1) < stop]
        return [item for item in dict.fromkeys(bucket) if get(item, stop) < stop]

    def _clear(self) -> None:
        self._buckets.clear()
        self._round.clear()
        self._occupied = self._filed = 0
