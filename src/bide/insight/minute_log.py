"""The history by the minute, read once and kept: what went through within the last minute, hour and day.

The history (`engine.history`) has a row for each minute. That of the running minute is written again every two seconds;
one that is over hardly changes any more. So a page that asks again and again reads only the last few rows, and all of
them once in a while, for what was written late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.engine.client import Client
from bide.engine.history import MINUTE, OTHERS, DeliveryCounts, MinuteRow, bucket_of, rows_between, together
from bide.insight.cached_query import CachedQuery
from bide.ports import Clock, Store

May = Callable[[Topic], bool]
"""Tells whether a viewer may see a topic."""
MINUTES = 60
"""Minutes of the last hour."""
_AFRESH: Millis = 5 * MINUTE
"""How often the whole hour is read again, for what was written late."""
_NEARLY: Millis = 58_000
"""A row that was read at least so long ago is where the last minute begins."""
QUARTER: Millis = 15 * MINUTE
QUARTERS = 96
"""Quarters of an hour in a day."""
_IN_QUARTER = QUARTER // MINUTE
_LATEST: Millis = 4 * MINUTE
"""Rows so old may still be written."""
_EVERY = 5.0
_SHARE = 0.01
_WAITED = bucket_of(1_000)
"""Deliveries that begin later than a second had to wait for their turn: the first bucket of those."""

# --- the last minute, and the last hour


class Flow(Struct, frozen=True):
    """Deliveries and schedules within a length of time."""

    span: Millis
    deliveries: DeliveryCounts
    scheduled: int | None
    """Answered calls that scheduled a task; None for a viewer who may not see all topics: it is counted over all."""

    def rate(self, number: int) -> float:
        """A number within that time, per second."""
        return number * 1000 / max(self.span, 1)

    @property
    def failed(self) -> int:
        """Deliveries that failed: tried again later, or dead."""
        return self.deliveries.failed


class Recent(Struct, frozen=True):
    """The last minute and hour, of all topics."""

    minute_span: Millis
    minute: MinuteRow
    hour_span: Millis
    hour: MinuteRow
    """The running minute included."""
    rows: Sequence[MinuteRow]
    """Of each minute of the hour, the newest last."""

    def last_minute(self, may: May | None = None) -> Flow:
        """Of the topics that `may` admits; None: of all."""
        return _flow(self.minute_span, self.minute, may)

    def last_hour(self, may: May | None = None) -> Flow:
        """The same of the last hour."""
        return _flow(self.hour_span, self.hour, may)

    def latest(self, may: May | None = None) -> Topic | None:
        """The topic whose 99th percentile of lateness was the highest within the last minute. O(topics)."""
        late = [
            (counts.lateness(0.99) or 0, topic)
            for topic, counts in self.minute.topics.items()
            if topic != OTHERS and (may is None or may(topic))
        ]
        return max(late)[1] if late else None

    def by_minute(self, may: May | None = None) -> list[int]:
        """Deliveries that began, minute by minute, the running one last."""
        return [
            sum(counts.begun for topic, counts in row.topics.items() if may is None or may(topic)) for row in self.rows
        ]


class _Seen(NamedTuple):
    """The row of a minute as it was then."""

    at: Millis
    minute: int
    row: MinuteRow


class Throughput:
    """Reads the last hour again and again. Belongs to one event loop; one `read` is under way at a time.

    The counts of a minute ago are subtracted, so that "the last minute" is not up to two. The first read has none of a
    minute ago: it gives the minute before this one and this one so far, and `Flow.span` is as long as that.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._rows: dict[int, MinuteRow] = {}
        """By minute of the epoch; those in which nothing happened are left out."""
        self._whole_at: Millis = 0
        self._seen: deque[_Seen] = deque()
        self._older = MinuteRow()
        """The sum of the minutes before the last."""

    async def read(self) -> Recent:
        """O(rows of two minutes); the first, and one every five minutes, reads the hour.

        Raises StoreError; SetupError where a service refuses it to a token that may not read every topic.
        """
        now = self._clock.now()
        minute = now // MINUTE
        oldest = max(minute - MINUTES + 1, 0)
        before = self._seen[-1].minute if self._seen else None
        whole = before is None or not 0 <= now - self._whole_at < _AFRESH
        first = oldest if before is None or whole else max(oldest, min(before, minute) - 1)
        found = await rows_between(self._store, self._clock, first, minute)
        self._rows = {one: row for one, row in self._rows.items() if oldest <= one < first} | found
        rows = [self._rows.get(one) or MinuteRow() for one in range(minute - MINUTES + 1, minute + 1)]
        if whole or before != minute:
            self._older = together(rows[:-2])
        if whole:
            self._whole_at = now
        last, this = rows[-2:]
        self._seen.append(_Seen(now, minute, this))
        while self._seen[0].minute < minute - 1 or self._seen[0].at > now:
            self._seen.popleft()
        since, begun_with = max(minute - 1, 0) * MINUTE, MinuteRow()
        for seen in self._seen:
            if seen.minute == minute - 1 and seen.at <= now - _NEARLY:
                since, begun_with = seen.at, seen.row
        return Recent(
            max(now - since, 1),
            _less(together([last, this]), begun_with),
            max(now - max(minute - MINUTES + 1, 0) * MINUTE, 1),
            together([self._older, last, this]),
            rows,
        )


def _flow(span: Millis, row: MinuteRow, may: May | None) -> Flow:
    total = DeliveryCounts()
    for topic, counts in row.topics.items():
        if may is None or may(topic):
            total.add(counts)
    return Flow(span, total, row.scheduled if may is None else None)


def _less(row: MinuteRow, before: MinuteRow) -> MinuteRow:
    """The part that came after `before`; a topic of which nothing came is left out."""
    found = MinuteRow(max(row.scheduled - before.scheduled, 0))
    for topic, counts in row.topics.items():
        was = before.topics.get(topic)
        if was is not None:
            counts = DeliveryCounts(
                max(counts.begun - was.begun, 0), max(counts.done - was.done, 0), max(counts.retried - was.retried, 0),
                max(counts.deferred - was.deferred, 0), max(counts.dead - was.dead, 0),
                dict(Counter(counts.late) - Counter(was.late)), dict(Counter(counts.planned) - Counter(was.planned)),
            )  # fmt: skip
        if counts.begun or counts.ended:
            found.topics[topic] = counts
    return found


# --- the last day


class Fastest(NamedTuple):
    """A minute amid a backlog, in which more deliveries ended than in any other such."""

    rate: float
    """Tasks a second."""
    at: Millis


class PastInterval(NamedTuple):
    """Deliveries of one interval."""

    planned: int
    """Deliveries that began, by the time that they were planned for."""
    done: int
    """Deliveries that were done, by the time of that."""


class Quarter(NamedTuple):
    """Deliveries of one topic in a quarter of an hour."""

    since: Millis
    deliveries: DeliveryCounts


class _Minute(Struct, gc=False):
    """Deliveries of one topic in one minute, in a tenth of the memory of its row."""

    begun: int
    done: int
    ended: int
    waited: int
    """Deliveries that had to wait for their turn."""
    planned_from: int
    """The earliest minute that one of them was planned for."""


def _minute_of(minute: int, counts: DeliveryCounts) -> _Minute:
    waited = sum(number for bucket, number in counts.late.items() if bucket >= _WAITED)
    return _Minute(counts.begun, counts.done, counts.ended, waited, min(counts.planned, default=minute))


class LastDay:
    """The last day as it happened: what was planned, what was done, and how fast it can go.

    Of an open client's store; belongs to its event loop. Nothing is known before the first `refresh` has ended. Rows
    are kept as their sums by the quarter of an hour, and of each minute a few numbers, which takes less than half of
    what the rows would: of a day of ten busy topics some megabytes.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._query: CachedQuery[None] = CachedQuery(self.read, every=_EVERY, share=_SHARE)
        self._quarters: dict[int, MinuteRow] = {}
        """By quarter of an hour of the epoch."""
        self._minutes: dict[int, dict[Topic, _Minute]] = {}
        self._planned: dict[int, dict[Topic, int]] = {}
        """Deliveries by the minute that they were planned for, whenever they began."""
        self._fastest: dict[Hashable, Fastest | None] = {}
        self._read_at: Millis | None = None
        self._whole_at: Millis = 0

    @property
    def whole(self) -> bool:
        """True once the day is known; before that, nothing of it is."""
        return self._read_at is not None

    async def refresh(self) -> None:
        """Read what is new, unless it is too soon. O(what happened since; at first in a day). Raises StoreError."""
        await self._query.get()

    async def read(self) -> None:
        """Read the quarter that runs, and the one before it while that may still change; all at first and every quarter
        of an hour, for what was written late."""
        now, before = self._client.clock.now(), self._read_at
        oldest, last = max(now // QUARTER - QUARTERS, 0), now // QUARTER
        whole = before is None or not 0 <= now - self._whole_at < QUARTER
        first = oldest if before is None or whole else max(oldest, (min(before, now) - _LATEST) // QUARTER)
        for quarter in range(first, last + 1):
            minutes = range(quarter * _IN_QUARTER, (quarter + 1) * _IN_QUARTER)
            rows = await rows_between(self._client.store, self._client.clock, minutes[0], minutes[-1])
            self._quarters[quarter] = together(rows.values())
            for minute, row in rows.items():
                self._minutes[minute] = {topic: _minute_of(minute, counts) for topic, counts in row.topics.items()}
        self._quarters = {one: row for one, row in self._quarters.items() if oldest <= one <= last}
        self._minutes = {one: its for one, its in self._minutes.items() if oldest <= one // _IN_QUARTER <= last}
        self._planned = {}
        for row in self._quarters.values():
            for topic, counts in row.topics.items():
                for minute, number in counts.planned.items():
                    its = self._planned.setdefault(minute, {})
                    its[topic] = its.get(topic, 0) + number
        self._fastest.clear()
        self._read_at = now
        if whole:
            self._whole_at = now

    async def close(self) -> None:
        """End the query that runs."""
        await self._query.close()

    def between(self, edges: Sequence[Millis], admits: May) -> list[PastInterval]:
        """The deliveries of each interval, of the topics that `admits` admits. Edges should be of whole minutes."""
        planned, done = [0] * (len(edges) - 1), [0] * (len(edges) - 1)
        for minute in range(edges[0] // MINUTE, -(-edges[-1] // MINUTE)):
            place = bisect_right(edges, minute * MINUTE) - 1
            if not 0 <= place < len(planned):
                continue
            planned[place] += sum(number for topic, number in self._planned.get(minute, {}).items() if admits(topic))
            done[place] += sum(one.done for one in self._of(minute, admits))
        return [PastInterval(*both) for both in zip(planned, done, strict=True)]

    def quarters(self, topic: Topic) -> Sequence[Quarter]:
        """A day of one topic by quarters of an hour, the oldest first, the running one last."""
        if self._read_at is None:
            return ()
        last = self._read_at // QUARTER
        rows = [(one, self._quarters.get(one) or MinuteRow()) for one in range(last - QUARTERS + 1, last + 1)]
        return [Quarter(one * QUARTER, row.topics.get(topic) or DeliveryCounts()) for one, row in rows]

    def topics(self) -> set[Topic]:
        """The topics of which something happened."""
        return {topic for row in self._quarters.values() for topic in row.topics}

    def fastest(self, whose: Hashable, admits: May) -> Fastest | None:
        """The fastest minute throughout which tasks had to wait; None where there was no such minute.

        A burst that is worked off within seconds shows nothing of what a minute could do. So a minute counts only if a
        backlog was carried into and out of it, and nine of ten of its deliveries waited for longer than a second.
        `whose` stands for what `admits` admits: the answer is computed once for each.
        """
        if whose not in self._fastest:
            best: Fastest | None = None
            for minute in self._minutes:
                mine, after = self._of(minute, admits), self._of(minute + 1, admits)
                rate = sum(one.ended for one in mine) / 60
                if (
                    rate > (0 if best is None else best.rate)
                    and 10 * sum(one.waited for one in mine) >= 9 * sum(one.begun for one in mine)
                    and any(one.planned_from < minute for one in mine)
                    and any(one.planned_from <= minute for one in after)
                ):
                    best = Fastest(rate, minute * MINUTE)
            self._fastest[whose] = best
        return self._fastest[whose]

    def _of(self, minute: int, admits: May) -> list[_Minute]:
        return [one for topic, one in self._minutes.get(minute, {}).items() if admits(topic)]
