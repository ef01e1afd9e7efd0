"""The ordered listings of the memory store: made when somebody first looks, kept up while somebody does.

Seven listings serve every filter: one by name, one by group, and one by time for each state. Most programs never list,
and must not pay for it: a listing costs 1 to 3 microseconds per transition, half as much as the transition itself. So
it is made at the first `find` that needs it (a sort: 0.1 s for 10^5 tasks, 2 s for 10^6, during which the loop stands
still; the only operation of the store that is not flat), then kept up with every transition, and dropped when keeping
it has cost more than making it again would, with nobody having looked meanwhile. A page of 100 takes 25 to 60
microseconds from 10^3 to 10^6 tasks.

A page goes on after the last entry shown, whether or not that is still there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import RESERVED_TOPICS
from bide.core.records import Filter, Record, State
from bide.stores.cursors import Place
from bide.stores.sorted_chunks import SortedChunks

Entry: TypeAlias = tuple[Any, ...]
"""By name: (topic, key). By group: (group, topic, key). By time: (topic, wake_at or finished_at, key)."""

NAMES, GROUPS, LIVE = "name", "group", "live"
_PATIENCE = 100_000
"""A listing is kept at least for so many transitions that nobody looked at."""


def entry_of(kind: str, record: Record) -> Entry | None:
    """Where `record` stands in the listing of that kind; None: it is not in it."""
    if kind == NAMES:
        return record.topic, record.key
    if kind == GROUPS:
        return None if record.group is None else (record.group, record.topic, record.key)
    if record.state.value != kind:
        return None
    return record.topic, record.finished_at if record.finished_at is not None else record.wake_at, record.key


def kind_of(where: Filter) -> str:
    """Which listing serves a filter, and so gives the order."""
    if where.group is not None:
        return GROUPS
    if where.state is not None:
        return where.state.value
    return NAMES if where.wake_from is None and where.wake_before is None else LIVE


def entry_after(place: Place, where: Filter) -> Entry:
    """Where in the filter's listing a page goes on."""
    kind = kind_of(where)
    if kind == NAMES:
        return place.topic, place.key
    return (where.group, place.topic, place.key) if kind == GROUPS else (place.topic, place.instant, place.key)


class Listings:
    """The listings that are kept at present. `note` every transition while there are any."""

    def __init__(self, everything: Callable[[], Iterable[Record]], *, patience: int = _PATIENCE) -> None:
        self._everything = everything
        self._patience = patience
        self._kept: dict[str, SortedChunks[Entry]] = {}
        self._unseen: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, kind: object) -> bool:
        return kind in self._kept

    def note(self, old: Record | None, new: Record | None) -> None:
        """A record became another. O(log n) for each listing kept."""
        for kind in tuple(self._kept):
            listing = self._kept[kind]
            before = None if old is None else entry_of(kind, old)
            after = None if new is None else entry_of(kind, new)
            if before == after:
                continue
            self._unseen[kind] += 1
            if self._unseen[kind] > self._patience + 2 * len(listing):
                del self._kept[kind], self._unseen[kind]
                continue
            if before is not None:
                listing.discard(before)
            if after is not None:
                listing.add(after)

    def listing(self, kind: str) -> SortedChunks[Entry]:
        """The listing of that kind, made now if need be."""
        self._unseen[kind] = 0
        if kind not in self._kept:
            entries = (entry_of(kind, record) for record in self._everything())
            self._kept[kind] = SortedChunks(entry for entry in entries if entry is not None)
        return self._kept[kind]

    def entries(self, where: Filter, after: Entry | None) -> Iterator[Entry]:
        """The entries of the filter's listing after `after`, in order; a group's still have to be sifted."""
        found = self._entries(where, after)
        if where.topic is not None or where.group is not None:
            return found
        return (entry for entry in found if entry[0] not in RESERVED_TOPICS)

    def _entries(self, where: Filter, after: Entry | None) -> Iterator[Entry]:
        kind = kind_of(where)
        if kind == NAMES:
            return _within(self.listing(NAMES), () if where.topic is None else (where.topic,), after)
        if kind == GROUPS:
            prefix = (where.group,) if where.topic is None else (where.group, where.topic)
            return _within(self.listing(GROUPS), prefix, after)
        states = [State.WAITING, State.LEASED] if where.state is None else [where.state]
        ranged = where.wake_from is not None or where.wake_before is not None
        if where.state is not None and not where.state.live and ranged:
            return iter(())
        return heapq.merge(*(_ranged(self.listing(state.value), where, after) for state in states))

    def forecast(self, topic: str, edges: Sequence[Millis]) -> list[int]:
        """How many of the topic wait in each interval. O(edges x (log n + n / 1000))."""
        waiting = self.listing(State.WAITING.value)
        ranks = [waiting.rank((topic, edge)) for edge in edges]
        return [max(later - earlier, 0) for earlier, later in pairwise(ranks)]


def _within(listing: SortedChunks[Entry], prefix: Entry, after: Entry | None) -> Iterator[Entry]:
    length = len(prefix)
    for entry in listing.after(prefix if after is None else after):
        if entry[:length] != prefix:
            return
        yield entry


def _ranged(listing: SortedChunks[Entry], where: Filter, after: Entry | None) -> Iterator[Entry]:
    """The entries within the wake range, topic by topic: O(log n) for each topic, and one for each entry shown."""
    topic, low, high = where.topic, where.wake_from, where.wake_before
    bound: Entry = after if after is not None else () if topic is None else (topic,)
    skipped = True
    while skipped:
        skipped = False
        for entry in listing.after(bound):
            if topic is not None and entry[0] != topic:
                return
            if low is not None and entry[1] < low:
                bound, skipped = (entry[0], low), True
                break
            if high is not None and entry[1] >= high:
                bound, skipped = (entry[0], LAST_INSTANT + 1), True
                break
            yield entry
