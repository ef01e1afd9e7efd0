"""Time zones as segments of constant offset, and the step from one occurrence of a wall-clock rule to the next.

Between two changes of a zone's clocks its UTC offset is constant, so a wall-clock time is the instant plus the offset.
Local times are integers like instants: the milliseconds that a clock in UTC would have if it showed that date and time.
A step walks segments and asks a stream of local times for its first time in each, so that its cost is a few look-ups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

from bide.core.errors import BadInput

Millis: TypeAlias = int
"""An integer number of milliseconds: since the epoch (an instant) or a length (a duration)."""

LAST_INSTANT: Millis = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z, the last instant that a datetime can hold
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

OnGap: TypeAlias = Literal["run_after", "skip"]
OnRepeat: TypeAlias = Literal["first", "second", "both"]

Times: TypeAlias = Callable[[Millis], Millis | None]
"""A stream of local times: returns the first that is not before the given one; None if there is none."""

DAY: Millis = 86_400_000
FIRST_LOCAL: Millis = -719_162 * DAY
"""The beginning of the year 1."""
_CHUNK: Millis = 360 * DAY
_SAMPLE: Millis = 3 * DAY  # no zone changes its offset twice within three days and back
WIDEST: Millis = 26 * 3_600_000
"""More than two offsets of a zone ever differ by."""
_MOST_STEPS = 1_000


def zone_info(name: str) -> ZoneInfo:
    """The zone of this name. Raises BadInput if the time zone database does not know it."""
    try:
        if name in ("localtime", "posixrules") or str(name).startswith("right/"):
            raise KeyError  # on each machine another zone, or one that counts leap seconds
        return known_zone(name)
    except (KeyError, ValueError, TypeError, OSError):  # OSError: the name of a directory
        raise BadInput("zone", name, 'a name of the IANA time zone database, such as "Europe/Rome" or "UTC"') from None


known_zone = lru_cache(maxsize=1024)(ZoneInfo.no_cache)


class Segment(NamedTuple):
    """A time of constant offset, from `start` until just before `end`, with the offsets `before` and `following` it."""

    start: Millis
    end: Millis
    offset: Millis
    before: Millis
    following: Millis


def segment(zone: str, at: Millis) -> Segment:
    """The segment around the instant `at`. A segment also ends where a cached chunk of about a year does.

    Raises BadInput if the time zone database does not know the zone.
    """
    starts, segments = chunk(zone, at // _CHUNK)
    return segments[bisect_right(starts, at) - 1]


@lru_cache(maxsize=4096)
def chunk(zone: str, index: int) -> tuple[list[Millis], list[Segment]]:
    """All segments of a chunk, found by sampling offsets and bisecting each change to the second."""
    known = zone_info(zone)
    first, last = index * _CHUNK, (index + 1) * _CHUNK
    starts, offsets = [first], [_offset(known, first)]
    for edge in range(first + _SAMPLE, last + 1, _SAMPLE):
        found = _offset(known, edge)
        if found != offsets[-1]:
            low, high = (edge - _SAMPLE) // 1000, edge // 1000
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(known, middle * 1000) == offsets[-1] else (low, middle)
            starts.append(high * 1000)
            offsets.append(found)
    before = [_offset(known, first - 1000), *offsets]
    ends, following = [*starts[1:], last], [*offsets[1:], _offset(known, last)]
    return starts, list(map(Segment, starts, ends, offsets, before, following))


def _offset(zone: ZoneInfo, at: Millis) -> Millis:
    known = max(FIRST_LOCAL + 2 * DAY, min(at, LAST_INSTANT - 2 * DAY))
    offset = (EPOCH + timedelta(milliseconds=known)).astimezone(zone).utcoffset()
    return 0 if offset is None else (offset.days * 86_400 + offset.seconds) * 1000


def next_step(times: Times, zone: str, after: Millis, on_gap: OnGap, on_repeat: OnRepeat) -> Millis | None:
    """The first instant later than `after` at which the clocks of `zone` show a time of the stream.

    With "run_after", times inside a gap together become one occurrence at the first instant after the gap. Times that
    exist twice count at the first, the second or both instants. Returns None if there is none up to the year 9999.
    """
    at = after + 1
    for _ in range(_MOST_STEPS):
        if at > LAST_INSTANT:
            return None
        start, end, offset, before, following = held = segment(zone, at)
        if at == start and on_gap == "run_after" and gap_time(times, held) is not None:
            return start
        first, stop = at + offset, end + offset
        if on_repeat == "first":
            first = max(first, start + before)
        elif on_repeat == "second":
            stop = min(stop, end + following)
        found = times(first)
        if found is not None and found < stop:
            return found - offset if found - offset <= LAST_INSTANT else None
        if following < offset and on_repeat != "first":
            at = end  # local times before `found` come again
        elif found is None:
            return None
        else:
            at = max(end, found - offset - WIDEST)
    return None


def gap_time(times: Times, held: Segment) -> Millis | None:
    """The first time of the stream that the jump forward at the start of a segment skips; None if there is none."""
    if held.before >= held.offset:
        return None
    found = times(held.start + held.before)
    return found if found is not None and found < held.start + held.offset else None
