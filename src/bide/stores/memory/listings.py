"""The ordered listings of the memory store: made when somebody first looks, kept up while somebody does.

Seven listings serve every filter: one by name, one by group, and one by time for each state. Most programs never list,
and must not pay for it: a listing costs 1 to 3 microseconds per transition, half as much as the transition itself. So
it is made at the first `find` that needs it (a sort: 0.1 s for 10^5 tasks, 2 s for 10^6, during which the loop stands
still; the only operation of the store that is not flat), then kept up with every transition, and dropped when keeping
it has cost more than making it again would, with nobody having looked meanwhile. A page of 100 takes 25 to 60
microseconds from 10^3 to 10^6 tasks.

How a filter is read from them is what all stores with such indexes share: see `sql.reading`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise, takewhile
from typing import Any, TypeAlias

from bide.core.instants import Millis
from bide.core.records import Record, State, Topic
from bide.stores.memory.lines import TopicTasks
from bide.stores.sorted_chunks import SortedChunks
from bide.stores.sql.reading import Located, Reads

Entry: TypeAlias = tuple[Any, ...]
"""By name: (topic, key). By group: (group, topic, key). By time: (topic, wake_at or finished_at, token, key)."""

NAMES, GROUPS = "name", "group"
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
    time = record.finished_at if record.finished_at is not None else record.wake_at
    return record.topic, time, record.token, record.key


class Listings:
    """The listings that are kept at present. `note` every transition while there are any."""

    def __init__(self, everything: Callable[[], Iterable[Record]], *, patience: int = _PATIENCE) -> None:
        self._everything = everything
        self._patience = patience
        self._kept: dict[str, SortedChunks[Entry]] = {}
        self._unseen: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

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

    def forecast(self, topic: str, edges: Sequence[Millis]) -> list[int]:
        """How many of the topic wait in each interval. O(edges x (log n + n / 1000))."""
        waiting = self.listing(State.WAITING.value)
        ranks = [waiting.rank((topic, edge)) for edge in edges]
        return [max(later - earlier, 0) for earlier, later in pairwise(ranks)]


class MemoryReads(Reads):
    """By listings; nothing here waits. A token tells equal times apart."""

    def __init__(self, listings: Listings, topics: Mapping[Topic, TopicTasks]) -> None:
        self._listings = listings
        self._topics = topics

    @cached_property
    def _names(self) -> list[Topic]:
        return sorted(self._topics)

    async def next_topic(self, after: Topic, group: str | None) -> Topic | None:
        if group is None:
            names = self._names[bisect_right(self._names, after) :][:1]
        else:
            # no name has a NUL in it, so this lies behind every entry of `after`
            entries = self._listings.listing(GROUPS).after((group, f"{after}\0"))
            names = [entry[1] for entry in islice(entries, 1) if entry[0] == group]
        return names[0] if names else None

    async def by_name(self, topic: Topic, after: str, group: str | None, most: int) -> list[Located]:
        kind, prefix = (NAMES, (topic,)) if group is None else (GROUPS, (group, topic))
        entries = self._listings.listing(kind).after((*prefix, after))
        found = takewhile(lambda entry: entry[:-1] == prefix, islice(entries, most))
        return [(0, self._topics[topic].records[key]) for *_, key in found]

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        instant, token = after
        entries = self._listings.listing(state.value).after((topic, instant, token + 1))
        found = takewhile(lambda entry: entry[0] == topic and entry[1] < before, islice(entries, most))
        return [(token, self._topics[topic].records[key]) for _, _, token, key in found]
