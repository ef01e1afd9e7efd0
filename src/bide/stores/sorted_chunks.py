"""A large sorted list: insert, remove and read a page from anywhere without moving a million pointers.

**The idea.** A plain sorted list finds a place in O(log n), but an insertion moves everything behind it: at 10^6
entries that is 8 MB, about 0.1 ms. So keep a list of short sorted lists, and a list with the last entry of each:

    chunks   [[a, b, d], [e, g], [k, m, n]]          lasts   [d, g, n]

Bisecting `lasts` finds an entry's chunk, and bisecting the chunk finds its place. A chunk that grows too long is split
in two; an empty chunk is dropped.

**The cost.** `add`, `discard`: O(log n + chunk + n / chunk); with chunks of at most 1,024 that is a few microseconds,
flat from 10^3 to 10^6. A page of m entries from any place: O(log n + m). `rank`: O(n / chunk + log n).

**The waste, and why it is acceptable.** Chunks are half empty after a split (8 bytes a slot), and each split moves
`lasts`, which has about 1,500 elements at 10^6 entries. A balanced tree would waste a node per entry and, in Python,
take several times as long.

Source: the two-level list of Grant Jenks, "sortedcontainers", with the same load factor, reduced to what a listing
needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[Any, ...])

_LONGEST = 1_024


class SortedChunks(Generic[Entry]):
    """Distinct tuples in ascending order. A shorter tuple serves as a bound: `("a",)` sorts before every `("a", ...)`.

    >>> chunks = SortedChunks([("b", 2), ("a", 7), ("b", 1)])
    >>> chunks.add(("b", 3))
    >>> list(chunks.after(("b", 1)))
    [('b', 2), ('b', 3)]
    >>> chunks.rank(("b",)), len(chunks)
    (1, 4)
    """

    __slots__ = ("_chunks", "_lasts", "_length", "_longest")

    def __init__(self, entries: Iterable[Entry] = (), *, longest: int = _LONGEST) -> None:
        """O(n log n), in C."""
        everything = sorted(entries)
        half = longest // 2
        self._longest = longest
        self._chunks = [everything[start : start + half] for start in range(0, len(everything), half)]
        self._lasts = [chunk[-1] for chunk in self._chunks]
        self._length = len(everything)

    def __len__(self) -> int:
        return self._length

    def add(self, entry: Entry) -> None:
        """Insert `entry`, which must not be in the list yet."""
        self._length += 1
        if not self._chunks:
            self._chunks.append([entry])
            self._lasts.append(entry)
            return
        number = bisect_left(self._lasts, entry)
        if number == len(self._chunks):
            number -= 1
            chunk = self._chunks[number]
            chunk.append(entry)
            self._lasts[number] = entry
        else:
            chunk = self._chunks[number]
            insort(chunk, entry)
        if len(chunk) > self._longest:
            half = len(chunk) // 2
            self._chunks.insert(number + 1, chunk[half:])
            self._lasts.insert(number, chunk[half - 1])
            del chunk[half:]

    def discard(self, entry: Entry) -> bool:
        """Remove `entry`; return false if it was not in the list."""
        number = bisect_left(self._lasts, entry)
        if number == len(self._chunks):
            return False
        chunk = self._chunks[number]
        place = bisect_left(chunk, entry)
        if chunk[place] != entry:
            return False
        del chunk[place]
        self._length -= 1
        if not chunk:
            del self._chunks[number], self._lasts[number]
        elif place == len(chunk):
            self._lasts[number] = chunk[-1]
        return True

    def after(self, bound: tuple[Any, ...]) -> Iterator[Entry]:
        """Every entry greater than `bound`, in order. The list must not change during the iteration."""
        number = bisect_right(self._lasts, bound)
        if number == len(self._chunks):
            return
        chunk = self._chunks[number]
        yield from chunk[bisect_right(chunk, bound) :]
        for following in self._chunks[number + 1 :]:
            yield from following

    def rank(self, bound: tuple[Any, ...]) -> int:
        """The number of entries less than `bound`."""
        number = bisect_left(self._lasts, bound)
        if number == len(self._chunks):
            return self._length
        return sum(map(len, self._chunks[:number])) + bisect_left(self._chunks[number], bound)
