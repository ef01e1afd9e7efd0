"""A binary heap with lazy deletion: the simple timer, and the baseline for the others.

**The idea.** A heap keeps the earliest item on top, and the rest in a partial order that is cheap to maintain. It
cannot find an item in its middle, so a cancelled or moved item is not taken out. A dictionary has the live entry of
each item; all other entries are dead, and are dropped when they reach the top.

    add("a", 70), add("b", 80), move("a", 90)
    heap:   (70, 1, "a")  (80, 2, "b")  (90, 3, "a")          entries: {"b": (80, 2, "b"), "a": (90, 3, "a")}
             dead: not the entry in the dictionary

**The cost.** `add`, `move`: O(log n). `cancel`: O(1). `advance`: O(log n) for each item returned. When three quarters
of the heap are dead, it is rebuilt at once in O(n). Amortised over the preceding cancels that is O(1) each, but it is a
pause of 60 ms at a million items, whereas the wheels sweep in small steps.

**The waste, and why it is fine.** Every entry is a tuple with a serial number, so that two items of the same time are
never compared (they need not have an order): 90 bytes more than in a wheel. For up to some ten thousand items that is
negligible, and the code fits on one page. `heapq` is written in C, so in CPython a heap of a million entries is only a
few times slower than a wheel.

Sources: J. W. J. Williams, "Algorithm 232: Heapsort", 1964; the lazy deletion as in asyncio's event loop and in the
"Priority Queue Implementation Notes" of Python's `heapq`.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from bide.core.instants import Millis

Item = TypeVar("Item", bound=Hashable)

_SLACK = 64
"""The number of dead entries up to which the heap is not rebuilt."""


class HeapTimer(Generic[Item]):
    """A timer that is simple and exact, for up to some ten thousand items.

    >>> timer = HeapTimer[str]()
    >>> timer.add("tea", 180_000)
    >>> timer.add("toast", 90_000)
    >>> timer.next_deadline()
    90000
    >>> timer.cancel("toast")
    True
    >>> timer.advance(180_000)
    ['tea']
    """

    __slots__ = ("_entries", "_heap", "_latest", "_serial")

    def __init__(self, *, start: Millis = 0) -> None:
        self._latest = start
        self._serial = count()
        self._heap: list[tuple[Millis, int, Item]] = []
        # the live entry of each item
        self._entries: dict[Item, tuple[Millis, int, Item]] = {}

    def add(self, item: Item, at: Millis) -> None:
        """Add `item` for `at`; an existing item is moved. O(log n)."""
        entry = (+at, next(self._serial), item)  # refuses what is no number before the heap has it
        self._entries[item] = entry
        heappush(self._heap, entry)
        # only adding grows the heap, so adding pays for the cleaning
        if len(self._heap) > 4 * len(self._entries) + _SLACK:
            self._drop_dead_entries()

    def cancel(self, item: Item) -> bool:
        """Remove `item`; False: it was absent. O(1)."""
        if self._entries.pop(item, None) is None:
            return False
        if not self._entries:
            self._heap.clear()
        return True

    def move(self, item: Item, at: Millis) -> bool:
        """Move `item` to another time; False: it was absent, and is not added. O(log n)."""
        if item not in self._entries:
            return False
        self.add(item, at)
        return True

    def advance(self, now: Millis) -> list[Item]:
        """Remove and return all items with `at <= now`, in order of `at`. O(log n) for each."""
        self._latest = now = max(self._latest, now)
        heap, entries = self._heap, self._entries
        due: list[Item] = []
        while heap and heap[0][0] <= now:
            entry = heappop(heap)
            if entries.get(entry[2]) is entry:
                del entries[entry[2]]
                due.append(entry[2])
        if len(heap) > 4 * len(entries) + _SLACK:
            self._drop_dead_entries()
        return due

    def next_deadline(self) -> Millis | None:
        """The earliest `at`; None when empty. O(1), amortised."""
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def _drop_dead_entries(self) -> None:
        self._heap = list(self._entries.values())
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries
