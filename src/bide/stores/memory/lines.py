"""The tasks of one topic, and the lines in which they stand until they wake.

**The idea.** Tasks come to a line mostly in the order in which they wake: leases all last equally long, and a burst
is due at one instant. So a line is a run, in order, to which what fits is appended; what comes too early for that is a
stray, on a heap. The front of the line is the earlier of the two fronts. Nothing is taken out of the middle: a record
is immutable, and every transition makes another, so an entry counts if it *is* what the topic holds under its key.

    run     (k1, 10)  (k2, 20)  (k4, 90)        strays  (k3, 15)         topic  k1 -> (k1, 10), k2 -> (k2, 50), ...
                      dead: k2 has moved

**The cost.** `push` and taking the front: O(1) for the run, O(log n) for strays, about 0.2 and 0.5 microseconds. Dead
entries are dropped when they come to the front, and all at once when they outnumber what is alive: O(1) each, amortised
over the pushes that led to it.

**What is wasteful, and why that is fine.** A line may hold as many dead records as live ones, and they keep their
payloads alive that long. A timer of `bide.timers` holds keys instead; give one to the store to wait on that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from bide.core.instants import Millis
from bide.core.records import Record, State
from bide.ports import Timer

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
        """The one to wake first; None when nobody stands here."""
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
