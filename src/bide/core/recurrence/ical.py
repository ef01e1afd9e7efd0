"""Recurrence rules of iCalendar (RFC 5545): the reader of their text, and the stream of local times.

`dateutil` expands a rule from its beginning on, which takes ever longer. So the stream is cut into windows, each of
which is expanded by itself. A window is a whole number of intervals, so that the rule stays in step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from datetime import UTC, datetime
from functools import lru_cache

from bide.core.errors import BadInput, MissingExtra
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.recurrence.zones import DAY

_LONGEST = 1_000
_LENGTHS = {"SECONDLY": 1_000, "MINUTELY": 60_000, "HOURLY": 3_600_000, "DAILY": DAY, "WEEKLY": 7 * DAY}
_MONTHS = {"MONTHLY": 1, "YEARLY": 12}
_PERIODS = {"DAILY": 32, "WEEKLY": 16, "MONTHLY": 12, "YEARLY": 8}
"""The intervals in a window; 64 of the shorter ones."""
_HORIZON: Millis = 400 * 366 * DAY  # after 400 years the calendar repeats itself
_BOUNDS = {
    "INTERVAL": (1, 10_000), "COUNT": (1, 100_000), "BYSECOND": (0, 59), "BYMINUTE": (0, 59), "BYHOUR": (0, 23),
    "BYMONTH": (1, 12), "BYMONTHDAY": (-31, 31), "BYYEARDAY": (-366, 366), "BYWEEKNO": (-53, 53),
    "BYSETPOS": (-366, 366),
}  # fmt: skip
"""The bounds of each numeric part. Where they begin below zero, zero itself is refused."""
_DAYS = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)(,([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU))*", re.ASCII)
_STAMP = re.compile(r"(\d{8})(?:T(\d{6})(Z?))?", re.ASCII)
_START = re.compile(r"DTSTART(?:;VALUE=DATE(?:-TIME)?)?(?:;TZID=([^:;]+))?:(\S+)", re.IGNORECASE)


def read_rrule(text: object) -> tuple[str, Millis | None, str | None, Millis | None]:
    """Take a text apart: the rule without an UNTIL of UTC, the local time and zone of DTSTART, the UNTIL of UTC.

    Raises BadInput.
    """
    lines = text.split() if isinstance(text, str) and len(text) <= _LONGEST and text.isascii() else []
    begin = zone = until = None
    if len(lines) == 2 and (found := _START.fullmatch(lines[0])):
        begin, is_utc = _stamp(found[2].upper(), text)
        zone = "UTC" if is_utc else found[1]
        del lines[0]
    if len(lines) != 1:
        raise _refusal(text, "one rule, with at most a line DTSTART before it")
    parts = _parts(lines[0].upper().removeprefix("RRULE:"), text)
    if "UNTIL" in parts:
        at, is_utc = _stamp(parts["UNTIL"], text)
        if is_utc:
            until = at
            del parts["UNTIL"]
    return _joined(parts), begin, zone, until


def _refusal(text: object, wanted: str) -> BadInput:
    return BadInput("rrule", text, f'a rule of RFC 5545 such as "FREQ=MONTHLY;BYDAY=-1FR": {wanted}')


def _stamp(stamp: str, text: object, *, ends: bool = False) -> tuple[Millis, bool]:
    """The milliseconds of a date or time, and whether it is one of UTC. With `ends`, the end of a date."""
    try:
        if (found := _STAMP.fullmatch(stamp)) is None:
            raise ValueError
        moment = datetime.strptime(f"{found[1]}{found[2] or '000000'}+0000", "%Y%m%d%H%M%S%z")
    except ValueError:
        raise _refusal(text, "times such as 20300131T080000, of UTC with a Z after them") from None
    return _local(moment) + (DAY - 1 if ends and found[2] is None else 0), found[3] == "Z"


def _joined(parts: dict[str, str]) -> str:
    return ";".join(f"{name}={value}" for name, value in parts.items())


def _parts(rule: str, text: object) -> dict[str, str]:
    """The parts of a rule by name, each within its bounds. Raises BadInput that shows the part at fault."""
    parts: dict[str, str] = {}
    for part in rule.split(";"):
        name, _, value = part.partition("=")
        if name in _BOUNDS:
            low, high = _BOUNDS[name]
            numbers = value.split(",") if name.startswith("BY") else [value]
            good = all(re.fullmatch(r"[+-]?\d{1,6}", one, re.ASCII) and low <= int(one) <= high for one in numbers)
            good = good and (low >= 0 or 0 not in map(int, numbers))
        elif name == "BYDAY":
            numbered = parts.get("FREQ") in _MONTHS
            good = _DAYS.fullmatch(value) is not None and (numbered or value.replace(",", "").isalpha())
        else:
            good = name in ("UNTIL", "WKST") or (name == "FREQ" and value in _LENGTHS.keys() | _MONTHS.keys())
        if not good or name in parts:
            raise _refusal(text, f"{part!r} is not understood, comes twice or is out of bounds")
        parts[name] = value
    if not rule.startswith("FREQ=") or {"COUNT", "UNTIL"} <= set(parts):
        raise _refusal(text, "FREQ first, and COUNT or UNTIL but not both")
    return parts


class RRuleTimes:
    """The stream of local times of a rule that begins at the local time `begin`."""

    def __init__(self, text: str, begin: Millis) -> None:
        parts = _parts(text, text)
        frequency, interval = parts["FREQ"], int(parts.get("INTERVAL", 1))
        periods = interval * _PERIODS.get(frequency, 64)
        self.begin = begin
        self.fixed = _LENGTHS.get(frequency, DAY) >= DAY
        self._count = int(parts.pop("COUNT", 0))
        self._until = _stamp(parts.pop("UNTIL"), text, ends=True)[0] if "UNTIL" in parts else LAST_INSTANT
        self._months, self._width = _MONTHS.get(frequency, 0) * periods, _LENGTHS.get(frequency, 0) * periods
        self._horizon = _HORIZON * (interval if frequency == "YEARLY" else 1)
        if self._months:  # a window begins on the first of a month, so what the beginning implies has to be said
            moment = as_datetime(begin)
            if not {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"} & set(parts):
                parts["BYMONTHDAY"] = str(moment.day)
                if frequency == "YEARLY":
                    parts.setdefault("BYMONTH", str(moment.month))
            for name in ("hour", "minute", "second"):
                parts.setdefault(f"BY{name.upper()}", str(getattr(moment, name)))
        self._rule = _joined(parts)

    def first_at_or_after(self, local: Millis) -> Millis | None:
        found = _counted(self, self._count) if self._count else _window(self, self._index(max(local, self.begin)))
        place = bisect_left(found, local)
        return found[place] if place < len(found) and found[place] <= self._until else None

    def window(self, index: int) -> list[Millis]:
        """The times of a window, and the first one after it. Empty if there are none up to the horizon."""
        try:
            from dateutil.rrule import rrulestr
        except ImportError:
            raise MissingExtra("rrule", "a recurrence rule of iCalendar") from None
        first, end, found = self._edge(index), self._edge(index + 1), list[Millis]()
        if first > self._until:
            return found
        horizon = as_datetime(min(end + self._horizon, LAST_INSTANT)).strftime("%Y%m%dT%H%M%S")
        try:
            for moment in rrulestr(f"{self._rule};UNTIL={horizon}", dtstart=as_datetime(first).replace(tzinfo=None)):
                found.append(_local(moment))
                if found[-1] >= end:
                    break
        except ValueError as error:
            raise _refusal(self._rule, str(error)) from None
        return found

    def counted(self, count: int) -> list[Millis]:
        """The first `count` times."""
        found, index = list[Millis](), 0
        while len(found) < count and (more := self.window(index)):
            found += [time for time in more if not found or time > found[-1]]
            index = max(index + 1, self._index(found[-1]))
        return found[:count]

    def _index(self, local: Millis) -> int:
        if self._width:
            return (local - self.begin) // self._width
        return (_month(local) - _month(self.begin)) // self._months

    def _edge(self, index: int) -> Millis:
        if index == 0 or self._width:
            return self.begin + index * self._width
        year, month = divmod(_month(self.begin) + index * self._months, 12)
        return LAST_INSTANT + 1 if year > 9999 else _local(datetime(year, month + 1, 1, tzinfo=UTC))


def _month(local: Millis) -> int:
    moment = as_datetime(local)
    return moment.year * 12 + moment.month - 1


def _local(moment: datetime) -> Millis:
    return int(moment.replace(tzinfo=UTC).timestamp()) * 1000


rrule_times = lru_cache(maxsize=512)(RRuleTimes)
_window = lru_cache(maxsize=2048)(RRuleTimes.window)
_counted = lru_cache(maxsize=64)(RRuleTimes.counted)
