"""A stretch of time cut into steps, as a viewer's calendar has them: pure arithmetic for charts of what comes and was.

Every edge lies on a multiple of the step in the viewer's zone: quarters of an hour at :00 and :15, days at midnight,
weeks on Monday. Where the clocks change, steps of up to an hour keep their length, and longer ones keep their place on
the clock: a day of 23 or 25 hours is one interval.
"""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from typing import NamedTuple

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant, instant_text

SECOND: Millis = 1_000
MINUTE: Millis = 60 * SECOND
HOUR: Millis = 60 * MINUTE
DAY: Millis = 24 * HOUR
STEPS: tuple[Millis, ...] = (
    *(number * SECOND for number in (1, 2, 5, 10, 30)),
    *(number * MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
    *(number * DAY for number in (1, 7, 30)),
)
MOST = 120
"""Intervals of a range that somebody chose."""
SHORTEST: Millis = 10 * SECOND
LONGEST: Millis = 3_500 * DAY
BACK: Millis = DAY
"""How far back a range may go: the past is known for so long."""
_MINUTES: Millis = 5 * MINUTE
"""A range that goes back further has no finer steps than those by which the past is known."""
_LAST: Millis = LAST_INSTANT - 400 * DAY  # room for zones and for the last step


class Span(StrEnum):
    """The ranges with a name."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


class Range(NamedTuple):
    """From `first` on, before `until`, in steps of `step`; not aligned yet."""

    first: Millis
    until: Millis
    step: Millis

    @property
    def length(self) -> Millis:
        return self.until - self.first


_SPANS: dict[Span, tuple[Millis, Millis, Millis]] = {
    Span.MINUTE: (0, 2 * MINUTE, SECOND),
    Span.HOUR: (HOUR, HOUR, MINUTE),
    Span.DAY: (12 * HOUR, 48 * HOUR, 30 * MINUTE),  # tomorrow evening is in it, whatever the hour
    Span.MONTH: (0, 30 * DAY, 6 * HOUR),
}
"""How far back, how far ahead, by which step."""


def around(span: Span, now: Millis) -> Range:
    """The range that a span means now."""
    back, ahead, step = _SPANS[span]
    return Range(now - back, now + ahead, step)


def chosen(first: Millis, until: Millis, now: Millis) -> Range:
    """The range that somebody asks for: cut to a day back, and at least ten seconds long. Raises BadInput."""
    if until <= first:
        raise BadInput("until", instant_text(max(0, until)), f"a time after {instant_text(max(0, first))}, the start")
    if until <= now - BACK:
        raise BadInput("until", instant_text(max(0, until)), "a time that is not longer ago than a day")
    if until > _LAST:
        raise BadInput("until", instant_text(min(until, LAST_INSTANT)), "a time before the year 9998")
    first = max(first, now - BACK)
    if until - first > LONGEST:
        raise BadInput("until", instant_text(until), f"a time within {LONGEST // DAY:,} days of the start")
    missing = SHORTEST - (until - first)
    if missing > 0:
        first, until = first - missing // 2, until + missing - missing // 2
    step = step_for(until - first)
    return Range(first, until, max(step, MINUTE) if first < now - _MINUTES else step)


def step_for(length: Millis) -> Millis:
    """The smallest step that cuts so long a range into at most `MOST` intervals, wherever it begins."""
    for step in STEPS:
        # alignment may add one at the end, and a day of 23 hours another
        if -(-length // step) + 2 <= MOST:
            return step
    raise BadInput("length", length, f"at most {LONGEST // DAY:,} days")


def edges_of(wanted: Range, zone: tzinfo) -> list[Millis]:
    """The edges of its intervals: the first is not after its start, the last not before its end. O(intervals)."""
    return _by_wall(wanted, zone) if wanted.step > HOUR else _by_clock(wanted, zone)


def _by_clock(wanted: Range, zone: tzinfo) -> list[Millis]:
    """Steps of up to an hour: of equal length, but where the clocks change by less than a step."""
    step = wanted.step
    edge = wanted.first - _beyond(wanted.first, zone, step)
    edge -= _beyond(edge, zone, step)  # the clocks may have changed in between
    edges = [edge]
    while edge < wanted.until:
        edge += step
        beyond = _beyond(edge, zone, step)
        if beyond:
            edge += step - beyond
        edges.append(edge)
    return edges


def _beyond(at: Millis, zone: tzinfo, step: Millis) -> Millis:
    """How far the clock on the wall is beyond a multiple of the step."""
    offset = as_datetime(at).astimezone(zone).utcoffset() or timedelta()
    return (at + offset // timedelta(milliseconds=1)) % step


def _by_wall(wanted: Range, zone: tzinfo) -> list[Millis]:
    """Longer steps: as the clock on the wall shows them, the first time where it shows one twice."""
    step = timedelta(milliseconds=wanted.step)
    wall = as_datetime(wanted.first).astimezone(zone).replace(minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
    if wanted.step < DAY:
        wall = wall.replace(hour=wall.hour - wall.hour % (wanted.step // HOUR))
    else:
        wall = wall.replace(hour=0) - timedelta(days=(wall.toordinal() - 1) % (wanted.step // DAY))
    while (edge := _instant(wall, zone)) > wanted.first:
        wall -= step
    edges = [edge]
    while edge < wanted.until:
        wall += step
        edge = _instant(wall, zone)
        if edge > edges[-1]:  # two times that the clocks skipped are the same instant
            edges.append(edge)
    return edges


def _instant(wall: datetime, zone: tzinfo) -> Millis:
    return instant(wall.replace(tzinfo=zone))
