"""The tasks of one topic, the lines in which they wait until they wake, and the ordered listings of all tasks.

**Lines.** Tasks mostly enter a line in the order in which they wake: all leases have the same length, and a burst is
due at one instant. So a line is a run in order, to which most records are appended; a record that wakes before the end
of the run is a stray, and goes to a heap. The front of the line is the earlier of the two fronts. Nothing is removed
from the middle: records are immutable and every transition makes a new one, so an entry is alive only if it *is* the
record that the topic holds under its key.

    run     (k1, 10)  (k2, 20)  (k4, 90)        strays  (k3, 15)         topic  k1 -> (k1, 10), k2 -> (k2, 50), ...
                      dead: k2 has moved

`push` and `pop`: O(1) for the run, O(log n) for strays, about 0.2 and 0.5 microseconds. A dead entry is dropped when it
reaches the front; when dead entries outnumber live ones, all are dropped at once: O(1) each, amortised over the pushes.

The waste, and why it is acceptable: a line may hold as many dead records as live ones, with their payloads. A timer of
`bide.timers` holds keys instead; pass one to the store to wait on that.

**Listings.** Six listings of each topic, one by name and one by time for each state, and two by group of all topics
serve every filter. Most programs never list tasks, and must not pay for it, nor for the `find` of bide's own hidden
topics: a listing costs 1 to 3 microseconds per transition, half as much as the transition itself. So the first `find`
that needs a listing makes it. That is a sort, which blocks the loop for 0.1 s with 10^5 tasks and 2 s with 10^6; the
cost of every other operation is flat. From then on every transition updates the listing. It is dropped once the updates
since the last `find` have cost more than making it again would.
A page of 100 takes 25 to 60 microseconds from 10^3 to 10^6 tasks. All stores with such indexes share the code that
reads a filter from them: see `sql.reading`.
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
from bide.core.records import Filter, Record, State, Topic
from bide.ports import Timer
from bide.stores.sorted_chunks import SortedChunks
from bide.stores.sql.reading import Located, Reads

MakeTimer: TypeAlias = Callable[[Millis], Timer[str]]
"""Makes the timer of one topic from the current time."""

_SLACK = 64
"""The number of dead entries that are not worth clearing."""
_WAITING, _LEASED = State.WAITING, State.LEASED


class Line:
    """Records by `wake_at`; the order of equal times is unspecified."""

    __slots__ = ("_records", "_run", "_serial", "_strays")

    def __init__(self, records: Mapping[str, Record]) -> None:
        self._records = records
        self._run: deque[Record] = deque()
        self._strays: list[tuple[Millis, int, Record]] = []
        self._serial = count()

    def push(self, record: Record) -> None:
        """Add `record`, which the topic must hold. No record may be added twice."""
        run = self._run
        if not run or run[-1].wake_at <= record.wake_at:
            run.append(record)
        else:
            heappush(self._strays, (record.wake_at, next(self._serial), record))

    def front(self) -> Record | None:
        """The record that wakes first; None if the line is empty."""
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
        """Remove the record that `front` has just returned."""
        if self._run and self._run[0] is front:
            self._run.popleft()
        else:
            heappop(self._strays)

    def clear_away(self, alive: int) -> None:
        """Drop the dead entries if they outnumber the `alive`. O(1) if nothing is dropped."""
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
    """The tasks of one topic by key, their number in each state, and the order in which they wake.

    With a timer, future tasks wait on it and enter a line when they are due; without one they do so at once.
    """

    __slots__ = ("cancelled", "dead", "done", "groups", "held", "leased", "listings", "records", "timer", "waits")

    def __init__(self, timer: Timer[str] | None, groups: Listings) -> None:
        """`groups`: the listings by group, of all topics."""
        self.records: dict[str, Record] = {}
        self.timer = timer
        self.groups = groups
        self.listings = Listings(self.records.values)
        self.waits = Line(self.records)
        self.held = Line(self.records)
        self.leased = self.done = self.cancelled = self.dead = 0

    @property
    def waiting(self) -> int:
        return len(self.records) - self.leased - self.done - self.cancelled - self.dead

    def count(self, state: State, by: int) -> None:
        """Add `by` to the count of a state. Waiting tasks are not counted: their number is the rest."""
        if state is _LEASED:
            self.leased += by
        elif state is not _WAITING:
            setattr(self, state.value, getattr(self, state.value) + by)

    def place(self, record: Record, now: Millis) -> None:
        """Queue a live record, which must be held already, until its wake time."""
        timer = self.timer
        if timer is None or record.wake_at <= now:
            if record.state is _WAITING:
                self.waits.push(record)
            else:
                self.held.push(record)
        else:
            timer.add(record.key, record.wake_at)

    def replace(self, old: Record, new: Record, now: Millis) -> None:
        """Hold `new` in place of `old`, and queue it if it is live."""
        self.count(old.state, -1)
        if self.timer is not None:
            self.timer.cancel(old.key)
        self.records[new.key] = new
        self.count(new.state, 1)
        if new.state is _WAITING or new.state is _LEASED:
            self.place(new, now)
        self.note(old, new)

    def note(self, old: Record | None, new: Record | None) -> None:
        """Note in the listings that `new` has replaced `old`."""
        for listings in (self.listings, self.groups):
            if listings.kept:
                listings.note(old, new)

    def forget(self, old: Record) -> None:
        self.count(old.state, -1)
        if self.timer is not None:
            self.timer.cancel(old.key)
        del self.records[old.key]
        self.note(old, None)

    def ripen(self, now: Millis) -> None:
        """Move the tasks that are due by `now` from the timer to the lines."""
        if self.timer is not None:
            for key in self.timer.advance(now):
                record = self.records[key]
                (self.waits if record.state is _WAITING else self.held).push(record)

    def clear_away(self) -> None:
        """Drop the dead entries of the lines if there are many. Call this after a task has ended or moved."""
        self.waits.clear_away(self.waiting)
        self.held.clear_away(self.leased)

    def next_wake(self) -> Millis | None:
        """A time not later than the next wake: exact without a timer, else as exact as the timer."""
        fronts = [line.wake_at for line in (self.waits.front(), self.held.front()) if line is not None]
        deadline = None if self.timer is None else self.timer.next_deadline()
        if deadline is not None:
            fronts.append(deadline)
        return min(fronts, default=None)


# --- listings

Entry: TypeAlias = tuple[Any, ...]
"""By name: (topic, key). By group: (group, topic, key). By time: (topic, wake_at or finished_at, token, key)."""

NAMES, GROUPS, LIVE_GROUPS = "name", "group", "live_group"
_PATIENCE = 100_000
"""The number of transitions without a `find` for which a listing is kept at least."""


def entry_of(kind: str, record: Record) -> Entry | None:
    """The entry of `record` in the listing of that kind; None if the listing does not contain it."""
    if kind == NAMES:
        return record.topic, record.key
    if kind == GROUPS or (kind == LIVE_GROUPS and record.state.live):
        return None if record.group is None else (record.group, record.topic, record.key)
    if record.state.value != kind:
        return None
    time = record.finished_at if record.finished_at is not None else record.wake_at
    return record.topic, time, record.token, record.key


class Listings:
    """The listings that are currently kept. `note` every transition while there are any."""

    def __init__(self, everything: Callable[[], Iterable[Record]], *, patience: int = _PATIENCE) -> None:
        self._everything = everything
        self._patience = patience
        self.kept: dict[str, SortedChunks[Entry]] = {}
        self._unseen: dict[str, int] = {}

    def note(self, old: Record | None, new: Record | None) -> None:
        """Note that `new` has replaced `old`. O(log n) for each listing kept."""
        for kind in tuple(self.kept):
            listing = self.kept[kind]
            before = None if old is None else entry_of(kind, old)
            after = None if new is None else entry_of(kind, new)
            if before == after:
                continue
            self._unseen[kind] += 1
            if self._unseen[kind] > self._patience + 2 * len(listing):
                del self.kept[kind], self._unseen[kind]
                continue
            if before is not None:
                listing.discard(before)
            if after is not None:
                listing.add(after)

    def listing(self, kind: str) -> SortedChunks[Entry]:
        """The listing of that kind, made now if necessary."""
        self._unseen[kind] = 0
        if kind not in self.kept:
            entries = (entry_of(kind, record) for record in self._everything())
            self.kept[kind] = SortedChunks(entry for entry in entries if entry is not None)
        return self.kept[kind]

    def forecast(self, topic: Topic, edges: Sequence[Millis]) -> list[int]:
        """The number of the topic's tasks that wake in each interval. O(edges x (log n + n / 1000))."""
        waiting = self.listing(State.WAITING.value)
        ranks = [waiting.rank((topic, edge)) for edge in edges]
        return [max(later - earlier, 0) for earlier, later in pairwise(ranks)]


class MemoryReads(Reads):
    """Reads from the listings, without waiting. The token tells equal times apart."""

    def __init__(self, groups: Listings, topics: Mapping[Topic, TopicTasks]) -> None:
        self._groups = groups
        self._topics = topics

    @cached_property
    def _names(self) -> list[Topic]:
        return sorted(self._topics)

    async def next_topic(self, after: Topic, where: Filter) -> Topic | None:
        if where.group is None:
            names = self._names[bisect_right(self._names, after) :][:1]
        else:
            # names contain no NUL, so this bound sorts after every entry of `after`
            entries = self._groups.listing(LIVE_GROUPS if where.live else GROUPS).after((where.group, f"{after}\0"))
            names = [entry[1] for entry in islice(entries, 1) if entry[0] == where.group]
        return names[0] if names else None

    async def by_name(self, topic: Topic, after: str, where: Filter, most: int) -> list[Located]:
        if (tasks := self._topics.get(topic)) is None:
            return []
        prefix: Entry = (topic,) if where.group is None else (where.group, topic)
        if where.group is None:
            listing = tasks.listings.listing(NAMES)
        else:
            listing = self._groups.listing(LIVE_GROUPS if where.live else GROUPS)
        found = takewhile(lambda entry: entry[:-1] == prefix, islice(listing.after((*prefix, after)), most))
        return [(0, tasks.records[key]) for *_, key in found]

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        if (tasks := self._topics.get(topic)) is None:
            return []
        instant, token = after
        entries = tasks.listings.listing(state.value).after((topic, instant, token + 1))
        found = takewhile(lambda entry: entry[1] < before, islice(entries, most))
        return [(token, tasks.records[key]) for _, _, token, key in found]
