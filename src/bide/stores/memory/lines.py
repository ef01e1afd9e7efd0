"""The tasks of one topic, the lines in which they stand until they wake, and the ordered listings of all tasks.

**Lines.** Tasks come to a line mostly in the order in which they wake: leases all last equally long, and a burst
is due at one instant. So a line is a run, in order, to which what fits is appended; what comes too early for that is a
stray, on a heap. The front of the line is the earlier of the two fronts. Nothing is taken out of the middle: a record
is immutable, and every transition makes another, so an entry counts if it *is* what the topic holds under its key.

    run     (k1, 10)  (k2, 20)  (k4, 90)        strays  (k3, 15)         topic  k1 -> (k1, 10), k2 -> (k2, 50), ...
                      dead: k2 has moved

`push` and taking the front: O(1) for the run, O(log n) for strays, about 0.2 and 0.5 microseconds. Dead
entries are dropped when they come to the front, and all at once when they outnumber what is alive: O(1) each, amortised
over the pushes that led to it.

What is wasteful, and why that is fine: a line may hold as many dead records as live ones, and they keep their
payloads alive that long. A timer of `bide.timers` holds keys instead; give one to the store to wait on that.

**Listings.** Seven serve every filter: one by name, one by group, and one by time for each state. Most programs never
list, and must not pay for it: a listing costs 1 to 3 microseconds per transition, half as much as the transition
itself. So it is made at the first `find` that needs it (a sort: 0.1 s for 10^5 tasks, 2 s for 10^6, during which the
loop stands still; the only operation of the store that is not flat), then kept up with every transition, and dropped
when keeping it has cost more than making it again would, with no `find` meanwhile. A page of 100 takes 25 to 60
microseconds from 10^3 to 10^6 tasks. How a filter is read from them is shared by all stores with such indexes: see
`sql.reading`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count, islice, pairwise, takewhile
from typing import Any, TypeAlias

from bide.core.instants import Millis
from bide.core.records import Record, State, Topic
from bide.ports import Timer
from bide.stores.sorted_chunks import SortedChunks
from bide.stores.sql.reading import Located, Reads

MakeTimer: TypeAlias = Callable[[Millis], Timer[str]]
"""Makes the timer of one topic; the argument is the present."""

_SLACK = 64
"""So many dead entries are never worth clearing away."""
_WAITING, _LEASED = State.WAITING, State.LEASED


class Line:
    """Records by `wake_at`, those with the same in no promised order."""

    __slots__ = ("_records", "_run", "_serial", "_strays")

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = records
        self._run: deque[Record] = deque()
        self._strays: list[tuple[Millis, int, Record]] = []
        self._serial = count()

    def push(self, record: Record) -> None:
        """Let `record`, which the topic holds, stand in line. No record stands in line twice."""
        run = self._run
        if not run or run[-1].wake_at <= record.wake_at:
            run.append(record)
        else:
            heappush(self._strays, (record.wake_at, next(self._serial), record))

    def front(self) -> Record | None:
        """The one to wake first; None if the line is empty."""
        run, strays, held = self._run, self._strays, self._records.get
        first = None
        while run:
            first = run[0]
            if held(first.key) is first:
                break
            run.popleft()
            first = None
        while strays:
            stray = strays[0][2]
            if held(stray.key) is stray:
                return stray if first is None or stray.wake_at < first.wake_at else first
            heappop(strays)
        return first

    def pop(self, front: Record) -> None:
        """Take out what `front` has just answered."""
        if self._run and self._run[0] is front:
            self._run.popleft()
        else:
            heappop(self._strays)

    def clear_away(self, alive: int) -> None:
        """Drop the dead if there are more of them than of the `alive`. O(1), but for the dropping."""
        if not alive:
            self._run.clear()
            self._strays.clear()
            return
        if len(self._run) + len(self._strays) <= 2 * alive + _SLACK:
            return
        held = self._records.get
        self._run = deque(record for record in self._run if held(record.key) is record)
        self._strays = [entry for entry in self._strays if held(entry[2].key) is entry[2]]
        heapify(self._strays)

    def __len__(self) -> int:
        return len(self._run) + len(self._strays)


class TopicTasks:
    """The tasks of one topic by key, how many are in which state, and who wakes when.

    With a timer, what lies ahead waits on that, and comes into a line when it is due; without one it stands in line
    from the beginning.
    """

    __slots__ = ("cancelled", "dead", "done", "held", "leased", "records", "timer", "waits")

    def __init__(self, timer: Timer[str] | None) -> None:
        self.records: dict[str, Record] = {}
        self.timer = timer
        self.waits = Line(self.records)
        self.held = Line(self.records)
        self.leased = self.done = self.cancelled = self.dead = 0

    @property
    def waiting(self) -> int:
        return len(self.records) - self.leased - self.done - self.cancelled - self.dead

    def count(self, state: State, by: int) -> None:
        """One more or less in that state; how many wait is what remains."""
        if state is _LEASED:
            self.leased += by
        elif state is not _WAITING:
            setattr(self, state.value, getattr(self, state.value) + by)

    def place(self, record: Record, now: Millis) -> None:
        """Let a live record, which is held already, wait for its time."""
        timer = self.timer
        if timer is None or record.wake_at <= now:
            if record.state is _WAITING:
                self.waits.push(record)
            else:
                self.held.push(record)
        else:
            timer.add(record.key, record.wake_at)

    def replace(self, old: Record | None, new: Record, now: Millis) -> None:
        """Hold `new` where `old` was, and let it wait if it lives."""
        if old is not None:
            self.count(old.state, -1)
            if self.timer is not None:
                self.timer.cancel(old.key)
        self.records[new.key] = new
        self.count(new.state, 1)
        if new.state is _WAITING or new.state is _LEASED:
            self.place(new, now)

    def forget(self, old: Record) -> None:
        """Hold it no longer."""
        self.count(old.state, -1)
        if self.timer is not None:
            self.timer.cancel(old.key)
        del self.records[old.key]

    def ripen(self, now: Millis) -> None:
        """Let what the timer gives out by `now` stand in line."""
        if self.timer is not None:
            for key in self.timer.advance(now):
                record = self.records[key]
                (self.waits if record.state is _WAITING else self.held).push(record)

    def clear_away(self) -> None:
        """Drop the dead from the lines if they are many: after whatever has ended or moved something."""
        self.waits.clear_away(self.waiting)
        self.held.clear_away(self.leased)

    def next_wake(self) -> Millis | None:
        """Not later than the next wake: exactly it without a timer, else as exact as the timer is."""
        fronts = [line.wake_at for line in (self.waits.front(), self.held.front()) if line is not None]
        deadline = None if self.timer is None else self.timer.next_deadline()
        if deadline is not None:
            fronts.append(deadline)
        return min(fronts, default=None)


# --- listings

Entry: TypeAlias = tuple[Any, ...]
"""By name: (topic, key). By group: (group, topic, key). By time: (topic, wake_at or finished_at, token, key)."""

NAMES, GROUPS = "name", "group"
_PATIENCE = 100_000
"""A listing is kept at least for so many transitions without a `find`."""


def entry_of(kind: str, record: Record) -> Entry | None:
    """The place of `record` in the listing of that kind; None: it is not in it."""
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
        """The number of the topic's tasks that wait in each interval. O(edges x (log n + n / 1000))."""
        waiting = self.listing(State.WAITING.value)
        ranks = [waiting.rank((topic, edge)) for edge in edges]
        return [max(later - earlier, 0) for earlier, later in pairwise(ranks)]


class MemoryReads(Reads):
    """Reads by listings; nothing here waits. A token tells equal times apart."""

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
