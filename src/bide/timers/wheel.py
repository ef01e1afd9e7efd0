"""The common part of both wheels: a dictionary with the times of items, and buckets that are only hints.

A wheel has to answer two questions: "when is this item due?" (to cancel or move it) and "which items are due now?".
A dictionary `item -> at` answers the first; lists of items, one per stretch of time, answer the second. The trick that
keeps both cheap is that **a list is never searched**. Cancelling only removes the item from the dictionary; its entry
in a list stays behind, dead, until that list is visited anyway:

    add("a", 70)      at = {"a": 70}             buckets = {70: ["a"]}
    move("a", 90)     at = {"a": 90}             buckets = {70: ["a"], 90: ["a"]}     the first entry is dead now
    cancel("a")       at = {}                    buckets = {70: ["a"], 90: ["a"]}     both are

An entry is alive when the dictionary still says that its item belongs to that bucket. One that was left twice in the
same bucket (moved away and back) is alive twice, and counts once.

What is wasteful, and why that is fine: dead entries take 8 bytes each and hold on to their item. They are bounded:
when there are more of them than living ones (and `SLACK`), every `add` and every `advance` sweeps a bucket or a few, so
that no single call ever pays for all, and each dead entry is paid for once: amortised O(1). When the last item goes,
everything goes at once.

The road not taken: buckets that are sets or dictionaries, from which a cancelled item is deleted on the spot. That
was measured first. With 1,000 items it is as fast; with 1,000,000 every insert and every cancel then misses the
processor's caches more often (an insert 2x slower, a cancel 2x to 4x), for 80 bytes an item instead of 50.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, TypeVar

from bide.core.instants import Millis

Item = TypeVar("Item", bound=Hashable)

SLACK = 1024
"""Dead entries up to which nothing is swept: 8 KiB."""

SWEEP = 32
"""Least entries that one call sweeps: far more than the one that it may add, so that sweeping always gains."""


class Wheel(ABC, Generic[Item]):
    """The part of a wheel that does not depend on how time is divided into buckets.

    A subclass files items (`add`), collects what is due (`advance`), and knows which entries of a bucket are still
    its own (`_sift`).
    """

    __slots__ = ("_at", "_buckets", "_filed", "_limit", "_round")

    def __init__(self) -> None:
        self._at: dict[Item, Millis] = {}
        self._buckets: dict[int, list[Item]] = {}
        # entries in all buckets, dead and alive; sweeping starts above the limit
        self._filed = 0
        self._limit = SLACK
        # the buckets that the present round of sweeping has still to visit
        self._round: list[int] = []

    @abstractmethod
    def add(self, item: Item, at: Millis) -> None:
        """Add `item` for `at`; an item that is already there is moved. O(1)."""

    @abstractmethod
    def advance(self, now: Millis) -> list[Item]:
        """Take out and return every item with `at <= now`, in order of `at`."""

    @abstractmethod
    def next_deadline(self) -> Millis | None:
        """A time not later than the earliest `at`; None when empty."""

    @abstractmethod
    def _sift(self, index: int, bucket: list[Item]) -> list[Item]:
        """The living entries of a bucket, each once."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop every entry: all of them are dead."""

    def cancel(self, item: Item) -> bool:
        """Forget `item`; False: it was not there. O(1), one dictionary lookup."""
        if self._at.pop(item, None) is None:
            return False
        if not self._at:
            self._clear()
        return True

    def move(self, item: Item, at: Millis) -> bool:
        """Give `item` another time; False: it was not there, and is not added. O(1)."""
        if item not in self:
            return False
        self.add(item, at)
        return True

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, item: object) -> bool:
        return item in self._at

    def _take(self, due: list[Item]) -> list[Item]:
        """Forget these items, which are due, and return them once each, in order of their time."""
        at = self._at
        if len(due) > 1:
            due = list(dict.fromkeys(due))
            # nearly sorted already, for the buckets were visited in order: one pass
            due.sort(key=at.__getitem__)
        for item in due:
            del at[item]
        if not at:
            self._clear()
        return due

    def _sweep(self) -> None:
        """Drop the dead entries of the next few buckets in the round, and say when to sweep again."""
        visited = 0
        while visited < SWEEP:
            if not self._round:
                self._round = list(self._buckets)
                if not self._round:
                    break
            index = self._round.pop()
            bucket = self._buckets.get(index, [])
            visited += len(bucket) + 1
            alive = self._sift(index, bucket)
            self._filed -= len(bucket) - len(alive)
            bucket[:] = alive
        self._limit = 2 * len(self._at) + SLACK
