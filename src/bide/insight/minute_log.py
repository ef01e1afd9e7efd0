"""A cache of the history by minute: the throughput of the last minute, hour and day.

The history (`engine.history`) has a row for each minute. The row of the current minute is rewritten every two seconds;
older rows hardly change. So a page that polls reads only the last few rows, and from time to time all of them, to catch
late writes.
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
"""Returns True if a viewer may see a topic."""
MINUTES = 60
_AFRESH: Millis = 5 * MINUTE
"""The interval at which the whole hour is read again, to catch late writes."""
_NEARLY: Millis = 58_000
"""The last minute begins at a row that was read at least this long ago."""
QUARTER: Millis = 15 * MINUTE
QUARTERS = 96
_IN_QUARTER = QUARTER // MINUTE
_LATEST: Millis = 4 * MINUTE
"""The age up to which a row may still be written."""
_EVERY = 5.0
_SHARE = 0.01
_WAITED = bucket_of(1_000)
"""The first bucket of deliveries that began more than a second late, which means that they had to queue."""

# --- the last minute, and the last hour


class Flow(Struct, frozen=True):
    """Deliveries and schedules within a period."""

    span: Millis
    deliveries: DeliveryCounts
    scheduled: int | None
    """Answered calls that scheduled a task, counted over all topics; None for a viewer who may not see them all."""

    def rate(self, number: int) -> float:
        """`number` of this period, per second."""
        return number * 1000 / max(self.span, 1)

    @property
    def failed(self) -> int:
        """Deliveries that failed: the task is retried later, or dead."""
        return self.deliveries.failed


class Recent(Struct, frozen=True):
    """The last minute and hour, of all topics."""

    minute_span: Millis
    minute: MinuteRow
    hour_span: Millis
    hour: MinuteRow
    """Includes the current minute."""
    rows: Sequence[MinuteRow]
    """The minutes of the hour, newest last."""

    def last_minute(self, may: May | None = None) -> Flow:
        """The last minute of the topics that `may` admits; None: of all."""
        return _flow(self.minute_span, self.minute, may)

    def last_hour(self, may: May | None = None) -> Flow:
        """The last hour of the topics that `may` admits; None: of all."""
        return _flow(self.hour_span, self.hour, may)

    def latest(self, may: May | None = None) -> Topic | None:
        """The topic with the highest 99th percentile of lateness within the last minute. O(topics)."""
        late = [
            (counts.lateness(0.99) or 0, topic)
            for topic, counts in self.minute.topics.items()
            if topic != OTHERS and (may is None or may(topic))
        ]
        return max(late)[1] if late else None

    def by_minute(self, may: May | None = None) -> list[int]:
        """Deliveries that began, by minute, the current one last."""
        return [
            sum(counts.begun for topic, counts in row.topics.items() if may is None or may(topic)) for row in self.rows
        ]


class _Seen(NamedTuple):
    """The row of a minute as it was at some time."""

    at: Millis
    minute: int
    row: MinuteRow


class Throughput:
    """Reads the last hour repeatedly. Belongs to one event loop; one `read` runs at a time.

    It subtracts the counts of a minute ago, so that "the last minute" does not cover up to two. The first read has no
    such counts: it returns the previous minute and the current one so far, and `Flow.span` is the length of both.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._rows: dict[int, MinuteRow] = {}
        """The rows by minute of the epoch, without those in which nothing happened."""
        self._whole_at: Millis = 0
        self._seen: deque[_Seen] = deque()
        self._older = MinuteRow()
        """The sum of the minutes before the last one."""

    async def read(self) -> Recent:
        """Read the new rows. O(rows of two minutes); the first read, and one every five minutes, reads the hour.

        Raises StoreError; SetupError if a service refuses it, because the token may not read every topic.
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
    """The part of `row` that came after `before`, without topics to which nothing was added."""
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
    """The minute within a backlog in which the most deliveries ended."""

    rate: float
    """Tasks a second."""
    at: Millis


class PastInterval(NamedTuple):
    planned: int
    """Deliveries that began, by their planned time."""
    done: int
    """Deliveries that succeeded, by the time of their end."""


class Quarter(NamedTuple):
    """Deliveries of one topic in a quarter of an hour."""

    since: Millis
    deliveries: DeliveryCounts


class _Minute(Struct, gc=False):
    """Deliveries of one topic in one minute, in a tenth of the memory of their row."""

    begun: int
    done: int
    ended: int
    waited: int
    """Deliveries that had to queue."""
    planned_from: int
    """The earliest minute for which one of them was planned."""


def _minute_of(minute: int, counts: DeliveryCounts) -> _Minute:
    waited = sum(number for bucket, number in counts.late.items() if bucket >= _WAITED)
    return _Minute(counts.begun, counts.done, counts.ended, waited, min(counts.planned, default=minute))


class LastDay:
    """The last day: planned and completed deliveries, and the highest rate.

    Reads the store of an open client and belongs to its event loop. Has no data before the first `refresh` has ended.
    Keeps sums of rows by quarter of an hour, and a few numbers of each minute. This takes less than half the memory of
    the rows: some megabytes for a day of ten busy topics.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._query: CachedQuery[None] = CachedQuery(self.read, every=_EVERY, share=_SHARE)
        self._quarters: dict[int, MinuteRow] = {}
        """The sums by quarter of an hour of the epoch."""
        self._minutes: dict[int, dict[Topic, _Minute]] = {}
        self._planned: dict[int, dict[Topic, int]] = {}
        """Deliveries by the minute for which they were planned, whenever they began."""
        self._fastest: dict[Hashable, Fastest | None] = {}
        self._read_at: Millis | None = None
        self._whole_at: Millis = 0

    @property
    def whole(self) -> bool:
        """True once the day has been read; until then there is no data."""
        return self._read_at is not None

    async def refresh(self) -> None:
        """Read new rows, unless it is too soon. O(new rows; at first, the rows of a day). Raises StoreError."""
        await self._query.get()

    async def read(self) -> None:
        """Read the current quarter, and the previous one while it may still change; at first and every quarter of an
        hour read all, to catch late writes."""
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
        await self._query.close()

    def between(self, edges: Sequence[Millis], admits: May) -> list[PastInterval]:
        """The deliveries of each interval, for the topics that `admits` admits. Edges should be whole minutes."""
        planned, done = [0] * (len(edges) - 1), [0] * (len(edges) - 1)
        for minute in range(edges[0] // MINUTE, -(-edges[-1] // MINUTE)):
            place = bisect_right(edges, minute * MINUTE) - 1
            if not 0 <= place < len(planned):
                continue
            planned[place] += sum(number for topic, number in self._planned.get(minute, {}).items() if admits(topic))
            done[place] += sum(one.done for one in self._of(minute, admits))
        return [PastInterval(*both) for both in zip(planned, done, strict=True)]

    def quarters(self, topic: Topic) -> Sequence[Quarter]:
        """A day of one topic by quarters of an hour, oldest first, the current one last."""
        if self._read_at is None:
            return ()
        last = self._read_at // QUARTER
        rows = [(one, self._quarters.get(one) or MinuteRow()) for one in range(last - QUARTERS + 1, last + 1)]
        return [Quarter(one * QUARTER, row.topics.get(topic) or DeliveryCounts()) for one, row in rows]

    def topics(self) -> set[Topic]:
        return {topic for row in self._quarters.values() for topic in row.topics}

    def fastest(self, whose: Hashable, admits: May) -> Fastest | None:
        """The fastest minute with a constant backlog; None if there was no such minute.

        A burst that is delivered within seconds does not show the possible rate of a whole minute. So a minute counts
        only if it began and ended with a backlog, and nine of ten of its deliveries waited longer than a second.
        `whose` identifies the topics that `admits` admits; the answer is computed once for each value.
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
