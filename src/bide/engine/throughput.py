"""What went through of late: within the last minute, within the last hour, and in each minute of it.

The history has a row for each minute, and that of the running minute is written again every two seconds. So a look
reads two minutes, and keeps the older ones, which change no more; what was seen a minute ago is taken off, so that "the
last minute" is not up to two. Whoever has just begun to look, and saw nothing a minute ago, gets the minute before this
one and this one so far: `Flow.span` says how long that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.engine.history import MINUTE, OTHERS, Past, Row, rows_between, summed
from bide.ports import Clock, Store

MINUTES = 60
"""How many are looked back at."""
_AFRESH: Millis = 5 * MINUTE
"""After so long all of them are read again: what could not be written in its time comes later."""
_NEARLY: Millis = 58_000
"""What was seen so long ago is the beginning of the last minute."""
May = Callable[[Topic], bool]


class Flow(Struct, frozen=True):
    """What happened within a length of time."""

    span: Millis
    past: Past
    scheduled: int | None
    """Calls for a task that were answered; None for whoever may not see all topics: it is counted over all."""

    def rate(self, number: int) -> float:
        """So many within that time, per second."""
        return number * 1000 / max(self.span, 1)

    @property
    def failed(self) -> int:
        """Deliveries that did not do it: tried again later, or dead."""
        return self.past.retried + self.past.dead


class _Seen(NamedTuple):
    """The row of a minute as it was then."""

    at: Millis
    minute: int
    row: Row


class Recent(Struct, frozen=True):
    """One look, of all topics."""

    minute_span: Millis
    minute: Mapping[Topic, Past]
    minute_scheduled: int
    hour_span: Millis
    hour: Mapping[Topic, Past]
    hour_scheduled: int
    begun: tuple[Mapping[Topic, int], ...]
    """Deliveries that began in each minute, the newest last."""

    def last_minute(self, may: May | None = None) -> Flow:
        """Of the topics that somebody may see; None: of all."""
        scheduled = self.minute_scheduled if may is None else None
        return Flow(self.minute_span, _together(self.minute, may), scheduled)

    def latest(self, may: May | None = None) -> Topic | None:
        """The topic whose 99th percentile of lateness was the highest within the last minute. O(topics)."""
        late = [
            (past.lateness(0.99) or 0, topic)
            for topic, past in self.minute.items()
            if topic != OTHERS and (may is None or may(topic))
        ]
        return max(late)[1] if late else None

    def last_hour(self, may: May | None = None) -> Flow:
        """The same of the last hour, the running minute included."""
        return Flow(self.hour_span, _together(self.hour, may), self.hour_scheduled if may is None else None)

    def by_minute(self, may: May | None = None) -> list[int]:
        """Deliveries that began, minute by minute, the running one last."""
        return [sum(number for topic, number in topics.items() if may is None or may(topic)) for topics in self.begun]


class Throughput:
    """Looks at the history of a store again and again. Belongs to one event loop; one look is under way at a time."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._rows: dict[int, Row] = {}
        self._looked: int | None = None
        """The minute of the last look."""
        self._whole_at: Millis = 0
        self._seen: deque[_Seen] = deque()
        self._older_of: int | None = None
        self._older: tuple[dict[Topic, Past], int, tuple[Mapping[Topic, int], ...]] = ({}, 0, ())

    async def look(self) -> Recent:
        """O(rows of two minutes); the first look, and one every five minutes, reads the hour. Raises StoreError."""
        now = self._clock.now()
        minute = now // MINUTE
        first = max(minute - MINUTES + 1, 0)
        afresh = self._looked is None or not 0 <= now - self._whole_at < _AFRESH
        if not afresh and self._looked is not None:
            first = max(first, min(self._looked, minute) - 1)
        found = await rows_between(self._store, self._clock, first, minute)
        self._rows = {one: row for one, row in self._rows.items() if minute - MINUTES < one < first} | found
        if afresh:
            self._whole_at = now
        if afresh or self._looked != minute:
            self._older_of = None
        self._looked = minute
        self._seen.append(_Seen(now, minute, self._rows.get(minute) or Row()))
        while self._seen[0].minute < minute - 1 or self._seen[0].at > now:
            self._seen.popleft()
        return self._told(now, minute)

    def _told(self, now: Millis, minute: int) -> Recent:
        last, this = self._rows.get(minute - 1) or Row(), self._rows.get(minute) or Row()
        since, begun_with = max(minute - 1, 0) * MINUTE, Row()
        for seen in self._seen:
            if seen.minute == minute - 1 and seen.at <= now - _NEARLY:
                since, begun_with = seen.at, seen.row
        scheduled = last.scheduled + this.scheduled - begun_with.scheduled
        older, older_scheduled, older_begun = self._of_older(minute)
        hour = summed([older, last.topics, this.topics])
        return Recent(
            max(now - since, 1),
            _less(summed([last.topics, this.topics]), begun_with.topics),
            max(scheduled, 0),
            max(now - max(minute - MINUTES + 1, 0) * MINUTE, 1),
            hour,
            older_scheduled + last.scheduled + this.scheduled,
            (*older_begun, _begun(last), _begun(this)),
        )

    def _of_older(self, minute: int) -> tuple[dict[Topic, Past], int, tuple[Mapping[Topic, int], ...]]:
        """Of the minutes before the last: their sum, and what began in each. Worked out once a minute."""
        if self._older_of != minute:
            rows = [self._rows.get(one) or Row() for one in range(minute - MINUTES + 1, minute - 1)]
            self._older = (
                summed(row.topics for row in rows), sum(row.scheduled for row in rows), tuple(map(_begun, rows)),
            )  # fmt: skip
            self._older_of = minute
        return self._older


def _begun(row: Row) -> Mapping[Topic, int]:
    return {topic: past.begun for topic, past in row.topics.items()}


def _together(topics: Mapping[Topic, Past], may: May | None) -> Past:
    found = Past()
    for topic, past in topics.items():
        if may is None or may(topic):
            found.add(past)
    return found


def _less(topics: Mapping[Topic, Past], before: Mapping[Topic, Past]) -> dict[Topic, Past]:
    """What came after `before`; a topic of which nothing came is left out."""
    found = {}
    for topic, past in topics.items():
        was = before.get(topic)
        left = past if was is None else _without(past, was)
        if left.begun or left.ended:
            found[topic] = left
    return found


def _without(past: Past, was: Past) -> Past:
    late = {bucket: number - was.late.get(bucket, 0) for bucket, number in past.late.items()}
    planned = {minute: number - was.planned.get(minute, 0) for minute, number in past.planned.items()}
    return Past(
        max(past.begun - was.begun, 0), max(past.done - was.done, 0), max(past.retried - was.retried, 0),
        max(past.deferred - was.deferred, 0), max(past.dead - was.dead, 0),
        {bucket: number for bucket, number in late.items() if number > 0},
        {minute: number for minute, number in planned.items() if number > 0},
    )  # fmt: skip
