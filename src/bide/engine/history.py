"""The notes of a process about its work: activity minute by minute, and the event log. Neither delays a delivery.

**Activity** is how much was planned, begun and ended, and how late it was. Each process counts its own work. Every two
seconds, if there is something new, it adds its counts to a row of the current minute in the store. So a reader sees all
processes, including those that have ended, and an idle process writes nothing. A minute has at most eight rows, which
any number of processes share, and a row is kept for a day. A lost row leaves a gap in a chart and never costs a task:
while the store is unavailable or full, the counts wait for a later write. A lost answer may add counts twice.

Lateness is counted in buckets that grow with it, each an eighth of its octave wide (as in HdrHistogram). They separate
16 ms from 18 ms, but not 16 s from 16.5 s; the error of a quantile is at most 12.5 %.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from bide.core.errors import StoreCorrupt, StoreError
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.core.records import OutcomeKind, Topic
from bide.engine.background import begin, run_to_end
from bide.engine.settings_store import SettingsStore
from bide.ports import Clock, KeepsEvents, Store
from bide.ports.remote import UNREADABLE

_log = logging.getLogger("bide.history")
_recorder_log = logging.getLogger("bide.recorder")
MINUTE: Millis = 60_000
KEPT: Millis = 25 * 60 * MINUTE
"""How long a row is kept after its minute: a day, and an hour more so that a reader gets the whole last day."""
_EVERY = 2.0
_ROWS = 8
"""The most rows of a minute: few to read, and enough that two processes rarely write the same one at once."""
_MOST_TOPICS = 200
OTHERS: Topic = ""
"""The name that stands for all topics beyond the first two hundred of a row."""
_MOST_UNWRITTEN = 60
"""The most minutes that wait while the store is unavailable."""
_PREFIX = "minute:"
_GATHER = 0.05
"""Seconds for which events gather."""
_MOST_EVENTS = 10_000
"""The most events that wait to be written; beyond that, the oldest are dropped."""
_OUTCOMES = (OutcomeKind.DONE, OutcomeKind.RETRY, OutcomeKind.DEFER, OutcomeKind.DEAD)


class DeliveryCounts(Struct, array_like=True, gc=False):
    """Deliveries of one topic in one minute."""

    begun: int = 0
    done: int = 0
    retried: int = 0
    deferred: int = 0
    dead: int = 0
    late: dict[int, int] = field(default_factory=dict)
    """The number of deliveries that began, by bucket of lateness."""
    planned: dict[int, int] = field(default_factory=dict)
    """The number of deliveries that began, by the minute (since the epoch) for which they were planned."""

    def add(self, other: DeliveryCounts) -> None:
        """Count `other` too."""
        self.begun += other.begun
        self.done += other.done
        self.retried += other.retried
        self.deferred += other.deferred
        self.dead += other.dead
        for into, of in ((self.late, other.late), (self.planned, other.planned)):
            for each, number in of.items():
                into[each] = into.get(each, 0) + number

    @property
    def ended(self) -> int:
        """Outcomes of any kind."""
        return self.done + self.retried + self.deferred + self.dead

    @property
    def failed(self) -> int:
        """Deliveries that failed: the task is retried later, or dead."""
        return self.retried + self.dead

    def lateness(self, share: float) -> Millis | None:
        """The lateness that this share of the deliveries did not exceed (0.99: the 99th percentile)."""
        left = share * sum(self.late.values())
        highest: Millis | None = None
        for bucket, number in sorted(self.late.items()):
            highest = highest_of(bucket)
            left -= number
            if left <= 0:
                break
        return highest


class MinuteRow(Struct, array_like=True, gc=False):
    """Schedules and deliveries of some processes in one minute."""

    scheduled: int = 0
    """Answered calls that scheduled a task, over all topics."""
    topics: dict[Topic, DeliveryCounts] = field(default_factory=dict)

    def add(self, other: MinuteRow, most: int = sys.maxsize) -> None:
        """Count `other` too; what is beyond `most` topics under OTHERS."""
        self.scheduled += other.scheduled
        for topic, counts in other.topics.items():
            name = topic if topic in self.topics or len(self.topics) < most else OTHERS
            self.topics.setdefault(name, DeliveryCounts()).add(counts)


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(MinuteRow).decode
_decode_minutes = msgspec.msgpack.Decoder(dict[int, MinuteRow]).decode


def bucket_of(late: Millis) -> int:
    """The bucket of a lateness: one per millisecond up to 15 ms, then eight per octave."""
    if late < 16:
        return max(0, late)
    shift = late.bit_length() - 4
    return 8 * shift + (late >> shift)


def highest_of(bucket: int) -> Millis:
    """The greatest lateness of a bucket."""
    if bucket < 16:
        return bucket
    shift = (bucket - 8) // 8
    return ((bucket - 8 * shift + 1) << shift) - 1


class _Unwritten(Struct):
    """Deliveries of one topic since the last write."""

    late: Counter[Millis] = field(default_factory=Counter)
    planned: Counter[int] = field(default_factory=Counter)
    ended: Counter[OutcomeKind] = field(default_factory=Counter)


class Coalescer(Struct, eq=False):
    """Runs `work` in the background `pause` seconds after the first `trigger`, once for all triggers until then."""

    _work: Callable[[], Coroutine[Any, Any, None]]
    _pause: float
    _name: str
    _due: asyncio.TimerHandle | None = None
    _task: asyncio.Task[None] | None = None
    _closed: bool = False

    def trigger(self) -> None:
        if self._due is None and not self._closed:
            self._due = asyncio.get_running_loop().call_later(self._pause, self._run)

    def _run(self) -> None:
        self._due = None
        self._task = begin(self._work(), self._name)

    async def close(self) -> None:
        """Start no more runs, and wait for the one in progress."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])


class History:
    """Counts activity and writes the counts. Belongs to the event loop it was made in.

    Counting costs a quarter of a microsecond per delivery; everything else is done once per write.
    """

    def __init__(self, store: Store, clock: Clock, *, write: bool = True) -> None:
        self._kept = SettingsStore(store, clock, SHOWN_TOPIC)
        self._clock = clock
        self._writes = write and store.features.remote is None
        self._row = random.randrange(_ROWS)
        self._fresh: dict[Topic, _Unwritten] = {}
        self._scheduled = 0
        self._unwritten: dict[int, MinuteRow] = {}
        """The counts of each minute that are to be added to its row."""
        self._writer = Coalescer(self.flush, _EVERY, "history")
        self._swept = -1
        self._failing = False

    # --- count

    def scheduled(self, number: int) -> None:
        """Count the answered calls that scheduled a task."""
        self._scheduled += number
        self._write_soon()

    def began(self, topic: Topic, planned: Sequence[Millis], now: Millis) -> None:
        """Count deliveries of `topic` that were planned for these instants and begin at `now`."""
        fresh = self._of(topic)
        fresh.late.update([now - one for one in planned])
        minute = now // MINUTE
        if min(planned) >= minute * MINUTE:
            fresh.planned[minute] += len(planned)
        else:
            fresh.planned.update([one // MINUTE for one in planned])
        self._write_soon()

    def ended(self, topic: Topic, outcome: OutcomeKind) -> None:
        """Count an outcome that the store has accepted."""
        self._of(topic).ended[outcome] += 1
        self._write_soon()

    def _of(self, topic: Topic) -> _Unwritten:
        fresh = self._fresh.get(topic)
        if fresh is None:
            if len(self._fresh) >= _MOST_TOPICS and topic != OTHERS:
                return self._of(OTHERS)
            fresh = self._fresh[topic] = _Unwritten()
        return fresh

    # --- write

    def _write_soon(self) -> None:
        if self._writes:
            self._writer.trigger()

    async def flush(self) -> None:
        """Write the counts. Counts that cannot be written now go out with a later write."""
        if not self._writes:
            return
        self._gather(self._clock.now() // MINUTE)
        try:
            while self._unwritten:
                minute = min(self._unwritten)
                await self._write(minute, self._unwritten.pop(minute))
                if minute > self._swept:
                    self._swept = minute
                    await self._kept.forget_past()
            self._failing = False
        except StoreError as error:
            if not self._failing:
                _log.warning("the history cannot be written now, and is kept for later: %s", error)
            self._failing = True
            for minute in sorted(self._unwritten)[:-_MOST_UNWRITTEN]:
                del self._unwritten[minute]
            self._write_soon()

    async def _write(self, minute: int, counts: MinuteRow) -> None:
        """Add these counts to a row of the minute, or keep them for a later write."""
        name = f"{_PREFIX}{minute}:{self._row}"

        def added(old: bytes | None) -> bytes:
            row = MinuteRow() if old is None else _readable(name, old) or MinuteRow()
            row.add(counts, _MOST_TOPICS)
            return _encode(row)

        try:
            await self._kept.update(name, added, until=(minute + 1) * MINUTE + KEPT)
        except BaseException:
            self._unwritten.setdefault(minute, MinuteRow()).add(counts)
            raise

    def _gather(self, minute: int) -> None:
        """Add the new counts to those of the minute."""
        if not self._fresh and not self._scheduled:
            return
        new = MinuteRow(self._scheduled)
        fresh, self._fresh, self._scheduled = self._fresh, {}, 0
        for topic, one in fresh.items():
            done, retried, deferred, dead = (one.ended[outcome] for outcome in _OUTCOMES)
            counts = DeliveryCounts(one.late.total(), done, retried, deferred, dead, planned=dict(one.planned))
            for late, number in one.late.items():
                bucket = bucket_of(late)
                counts.late[bucket] = counts.late.get(bucket, 0) + number
            new.topics[topic] = counts
        self._unwritten.setdefault(minute, MinuteRow()).add(new)

    async def close(self) -> None:
        """Write the remaining counts, unless they are of schedules alone: that would cost a short program a call."""
        await self._writer.close()
        if self._fresh or self._unwritten:
            await self.flush()


class Recorder:
    """Gathers events briefly and writes them together. Counts the events lost to a full or unreachable store."""

    def __init__(self, store: Store) -> None:
        self._log = store.features.events
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._writer = Coalescer(self.flush, _GATHER, "recorder")
        self._writing = asyncio.Lock()
        self.dropped = 0

    def note(self, event: Event) -> None:
        """Take `event`; it is written within some 50 ms."""
        if self._log is None:
            return
        if len(self._events) == _MOST_EVENTS:
            self.dropped += 1
        self._events.append(event)
        self._writer.trigger()

    async def flush(self) -> None:
        """Return once every event noted so far is in the store or was dropped."""
        if self._log is not None and (self._events or self._writing.locked()):
            await run_to_end(self._flush(self._log))

    async def _flush(self, log: KeepsEvents) -> None:
        async with self._writing:
            if not self._events:
                return
            batch = list(self._events)
            self._events.clear()
            try:
                await log.record(batch)
            except StoreError as error:
                self.dropped += len(batch)
                _recorder_log.warning("%d events were not recorded: %s", len(batch), error)

    async def close(self) -> None:
        await self._writer.close()
        await self.flush()


async def rows_between(store: Store, clock: Clock, first: int, last: int) -> dict[int, MinuteRow]:
    """The rows of the minutes from `first` to `last`, summed over all processes; minutes without rows are left out.

    O(minutes). Raises StoreError, and SetupError if a service refuses the request.
    """
    if (remote := store.features.remote) is not None:
        minutes = await remote.minutes(first, last)
        try:
            return _decode_minutes(minutes)
        except UNREADABLE as error:
            raise StoreCorrupt(f"the service's history cannot be read ({error})") from error
    found: dict[int, MinuteRow] = {}
    kept = SettingsStore(store, clock, SHOWN_TOPIC)
    ends = [(minute + 1) * MINUTE + KEPT for minute in (first, last)]
    for name, value in (await kept.ending(ends[0], ends[1] + 1)).items():
        if not name.startswith(_PREFIX):
            continue
        row, minute = _readable(name, value), name.split(":")[1]
        if row is not None and minute.isdigit():
            found.setdefault(int(minute), MinuteRow()).add(row)
    return found


def _readable(name: str, value: bytes) -> MinuteRow | None:
    try:
        return _decode(value)
    except (msgspec.MsgspecError, ValueError):
        _log.error("a row of the history, %s, cannot be read and is skipped", name)
        return None


def together(rows: Iterable[MinuteRow]) -> MinuteRow:
    found = MinuteRow()
    for row in rows:
        found.add(row)
    return found
