"""The history by the minute, read once and kept: what went through within the last minute, hour and day.

The history (`engine.history`) has a row for each minute. That of the running minute is written again every two seconds;
one that is over hardly changes any more. So a page that asks again and again reads the last two or four, and all of
them once in a while, for what was written late. A day of ten busy topics takes some fifteen megabytes.
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
from bide.engine.history import MINUTE, OTHERS, Past, Row, bucket_of, rows_between, together
from bide.insight.cached_query import CachedQuery
from bide.ports import Clock, Store

May = Callable[[Topic], bool]
_AT_ONCE = 60
"""Minutes that are read in one go, so that nobody waits long for the event loop."""


class MinuteLog:
    """The rows of the last `minutes`, of which the last `changing` are read again each time, and all after `afresh`.

    Belongs to one event loop; one `read` is under way at a time.
    """

    def __init__(self, store: Store, clock: Clock, minutes: int, *, changing: int, afresh: Millis) -> None:
        self.rows: dict[int, Row] = {}
        """By minute of the epoch; those in which nothing happened are left out."""
        self.latest: int | None = None
        """The minute of the last `read`."""
        self._store = store
        self._clock = clock
        self._minutes = minutes
        self._changing = changing
        self._afresh = afresh
        self._whole_at: Millis = 0

    async def read(self, now: Millis) -> bool:
        """See what has happened until `now`; whether older minutes than those that change may be others now.

        O(rows of the minutes that change, and of those since the last `read`). Raises StoreError; SetupError where a
        service refuses it to a token that may not read every topic.
        """
        minute = now // MINUTE
        oldest = first = max(minute - self._minutes + 1, 0)
        before = self.latest
        whole = before is None or not 0 <= now - self._whole_at < self._afresh
        if before is not None and not whole:
            first = max(oldest, min(before, minute) - self._changing + 1)
        found: dict[int, Row] = {}
        for start in range(first, minute + 1, _AT_ONCE):
            found |= await rows_between(self._store, self._clock, start, min(start + _AT_ONCE - 1, minute))
        self.rows = {one: row for one, row in self.rows.items() if oldest <= one < first} | found
        self.latest = minute
        if whole:
            self._whole_at = now
        return whole or before != minute

    def row(self, minute: int) -> Row:
        """All that happened in a minute. Not to be changed."""
        return self.rows.get(minute) or Row()


# --- the last minute, and the last hour

MINUTES = 60
"""How many are looked back at."""
_NEARLY: Millis = 58_000
"""The row that was seen so long ago is the beginning of the last minute."""


class Flow(Struct, frozen=True):
    """Deliveries and schedules within a length of time."""

    span: Millis
    past: Past
    scheduled: int | None
    """Calls for a task that were answered; None for a viewer who may not see all topics: it is counted over all."""

    def rate(self, number: int) -> float:
        """So many within that time, per second."""
        return number * 1000 / max(self.span, 1)

    @property
    def failed(self) -> int:
        """Deliveries that did not do it: tried again later, or dead."""
        return self.past.failed


class Recent(Struct, frozen=True):
    """The last minute and hour, of all topics."""

    minute_span: Millis
    minute: Row
    hour_span: Millis
    hour: Row
    """The running minute included."""
    rows: Sequence[Row]
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
            (past.lateness(0.99) or 0, topic)
            for topic, past in self.minute.topics.items()
            if topic != OTHERS and (may is None or may(topic))
        ]
        return max(late)[1] if late else None

    def by_minute(self, may: May | None = None) -> list[int]:
        """Deliveries that began, minute by minute, the running one last."""
        return [sum(past.begun for topic, past in row.topics.items() if may is None or may(topic)) for row in self.rows]


class _Seen(NamedTuple):
    """The row of a minute as it was then."""

    at: Millis
    minute: int
    row: Row


class Throughput:
    """Reads the last hour again and again. Belongs to one event loop; one `look` is under way at a time.

    The counts of a minute ago are taken off, so that "the last minute" is not up to two. The first look saw none a
    minute ago: it gets the minute before this one and this one so far, and `Flow.span` says how long that is.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._clock = clock
        self._log = MinuteLog(store, clock, MINUTES, changing=2, afresh=5 * MINUTE)
        self._seen: deque[_Seen] = deque()
        self._older = Row()
        """The sum of the minutes before the last."""

    async def look(self) -> Recent:
        """O(rows of two minutes); the first look, and one every five minutes, reads the hour. Raises StoreError."""
        now = self._clock.now()
        minute = now // MINUTE
        log = self._log
        changed = await log.read(now)
        rows = [log.row(one) for one in range(minute - MINUTES + 1, minute + 1)]
        if changed:
            self._older = together(rows[:-2])
        last, this = rows[-2:]
        self._seen.append(_Seen(now, minute, this))
        while self._seen[0].minute < minute - 1 or self._seen[0].at > now:
            self._seen.popleft()
        since, begun_with = max(minute - 1, 0) * MINUTE, Row()
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


def _flow(span: Millis, row: Row, may: May | None) -> Flow:
    total = Past()
    for topic, past in row.topics.items():
        if may is None or may(topic):
            total.add(past)
    return Flow(span, total, row.scheduled if may is None else None)


def _less(row: Row, before: Row) -> Row:
    """The part that came after `before`; a topic of which nothing came is left out."""
    found = Row(max(row.scheduled - before.scheduled, 0))
    for topic, past in row.topics.items():
        was = before.topics.get(topic)
        if was is not None:
            past = Past(
                max(past.begun - was.begun, 0), max(past.done - was.done, 0), max(past.retried - was.retried, 0),
                max(past.deferred - was.deferred, 0), max(past.dead - was.dead, 0),
                dict(Counter(past.late) - Counter(was.late)), dict(Counter(past.planned) - Counter(was.planned)),
            )  # fmt: skip
        if past.begun or past.ended:
            found.topics[topic] = past
    return found


# --- the last day

QUARTER: Millis = 15 * MINUTE
QUARTERS = 96
"""Of an hour: a day."""
_EVERY = 5.0
_SHARE = 0.01
_WAITED = bucket_of(1_000)
"""Deliveries that begin later than a second had to wait for their turn: the first bucket of those."""


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
    past: Past


class LastDay:
    """The last day as it happened: what was planned, what was done, and how fast it can go.

    Of an open client's store; belongs to its event loop. Nothing is known before the first `look` has ended.
    """

    def __init__(self, client: Client) -> None:
        self._clock = client.clock
        self._log = MinuteLog(
            client.store, client.clock, QUARTERS * QUARTER // MINUTE + 1, changing=4, afresh=15 * MINUTE
        )
        self._query: CachedQuery[None] = CachedQuery(self.read, every=_EVERY, share=_SHARE)
        self._planned: dict[int, dict[Topic, int]] = {}
        """Deliveries by the minute that they were planned for, whenever they began."""
        self._fastest: dict[Hashable, Fastest | None] = {}

    @property
    def whole(self) -> bool:
        """True once the day is known; before that, nothing of it is."""
        return self._log.latest is not None

    async def look(self) -> None:
        """See that what is known here is new enough. O(what happened since; at first in a day). Raises StoreError."""
        await self._query.get()

    async def read(self) -> None:
        """Look now."""
        await self._log.read(self._clock.now())
        self._planned = {}
        for row in self._log.rows.values():
            for topic, past in row.topics.items():
                for minute, number in past.planned.items():
                    its = self._planned.setdefault(minute, {})
                    its[topic] = its.get(topic, 0) + number
        self._fastest.clear()

    async def close(self) -> None:
        """Let no query go on."""
        await self._query.close()

    def between(self, edges: Sequence[Millis], admits: May) -> list[PastInterval]:
        """Of each interval, of the topics that `admits` admits. Edges should be of whole minutes."""
        planned, done = [0] * (len(edges) - 1), [0] * (len(edges) - 1)
        for minute in range(edges[0] // MINUTE, -(-edges[-1] // MINUTE)):
            place = bisect_right(edges, minute * MINUTE) - 1
            if not 0 <= place < len(planned):
                continue
            planned[place] += sum(number for topic, number in self._planned.get(minute, {}).items() if admits(topic))
            done[place] += sum(past.done for past in self._of(minute, admits))
        return [PastInterval(*both) for both in zip(planned, done, strict=True)]

    def quarters(self, topic: Topic) -> Sequence[Quarter]:
        """A day of one topic by quarters of an hour, the oldest first, the running one last. O(minutes of a day)."""
        if self._log.latest is None:
            return ()
        last = self._log.latest * MINUTE // QUARTER
        found = [Quarter(one * QUARTER, Past()) for one in range(last - QUARTERS + 1, last + 1)]
        for minute, row in self._log.rows.items():
            place, past = minute * MINUTE // QUARTER - last - 1, row.topics.get(topic)
            if past is not None and place >= -QUARTERS:
                found[place].past.add(past)
        return found

    def topics(self) -> set[Topic]:
        """All of which something happened."""
        return {topic for row in self._log.rows.values() for topic in row.topics}

    def fastest(self, whose: Hashable, admits: May) -> Fastest | None:
        """The fastest minute throughout which tasks had to wait; None where there was no such minute.

        A burst that is worked off within seconds says nothing of what a minute could do. So only a minute counts into
        and out of which some of the backlog was carried, and in which nine of ten waited for longer than a second.
        `whose` stands for what `admits` admits: it is reckoned once for each.
        """
        if whose not in self._fastest:
            best: Fastest | None = None
            for minute in self._log.rows:
                mine, after = self._of(minute, admits), self._of(minute + 1, admits)
                rate = sum(past.ended for past in mine) / 60
                if (
                    rate > (0 if best is None else best.rate)
                    and 10 * sum(map(_waited, mine)) >= 9 * sum(past.begun for past in mine)
                    and _planned_before(minute, mine)
                    and _planned_before(minute + 1, after)
                ):
                    best = Fastest(rate, minute * MINUTE)
            self._fastest[whose] = best
        return self._fastest[whose]

    def _of(self, minute: int, admits: May) -> list[Past]:
        return [past for topic, past in self._log.row(minute).topics.items() if admits(topic)]


def _planned_before(minute: int, pasts: Sequence[Past]) -> bool:
    return any(one < minute for past in pasts for one in past.planned)


def _waited(past: Past) -> int:
    return sum(number for bucket, number in past.late.items() if bucket >= _WAITED)
