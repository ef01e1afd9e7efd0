"""Recurrence rules of iCalendar (RFC 5545): the reader of their text, and the stream of local times.

The parts of a rule name months, days and times of day: a `Pattern`. Its interval allows some periods: years, months,
weeks, days or shorter ones. The search takes turns: the first time of the pattern from an allowed period on, and the
first allowed period that does not end before that time. A period is found by division, so that the next time costs the
same however long ago the rule began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime
from functools import lru_cache
from itertools import chain, islice
from math import gcd, prod

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.recurrence.pattern import EPOCH_DAY, Pattern, nth
from bide.core.recurrence.zones import DAY

_LONGEST, _MOST_A_DAY = 1_000, 96
_UNITS = {"SECONDLY": 1_000, "MINUTELY": 60_000, "HOURLY": 3_600_000, "DAILY": DAY, "WEEKLY": 7 * DAY}
_MONTHS = {"MONTHLY": 1, "YEARLY": 12}
_BOUNDS = {
    "INTERVAL": (1, 10_000), "COUNT": (1, 10_000), "BYSECOND": (0, 59), "BYMINUTE": (0, 59), "BYHOUR": (0, 23),
    "BYMONTH": (1, 12), "BYMONTHDAY": (-31, 31), "BYYEARDAY": (-366, 366), "BYWEEKNO": (-53, 53),
    "BYSETPOS": (-366, 366),
}  # fmt: skip
"""The bounds of each numeric part. Where they begin below zero, zero itself is refused."""
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_DAY = re.compile(rf"([+-]?\d{{1,2}})?({'|'.join(_WEEKDAYS)})", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,6}", re.ASCII)
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
    return ";".join(f"{name}={value}" for name, value in parts.items()), begin, zone, until


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
    return int(moment.timestamp()) * 1000 + (DAY - 1 if ends and found[2] is None else 0), found[3] == "Z"


def _parts(rule: str, text: object) -> dict[str, str]:
    """The parts of a rule by name, each within its bounds. Raises BadInput that shows the part at fault."""
    parts: dict[str, str] = {}
    for part in rule.split(";"):
        name, _, value = part.partition("=")
        if name in _BOUNDS:
            low, high = _BOUNDS[name]
            numbers = value.split(",") if name.startswith("BY") else [value]
            good = all(_NUMBER.fullmatch(one) and low <= int(one) <= high and (low >= 0 or int(one)) for one in numbers)
        elif name == "BYDAY":
            days = [_DAY.fullmatch(day) for day in value.split(",")]
            good = all(day and (day[1] is None or (int(day[1]) and parts.get("FREQ") in _MONTHS)) for day in days)
        else:
            good = name == "UNTIL" or value in {"WKST": _WEEKDAYS, "FREQ": (*_UNITS, *_MONTHS)}.get(name, ())
        if not good or name in parts:
            raise _refusal(text, f"{part!r} is not understood, comes twice or is out of bounds")
        parts[name] = value
    if not rule.startswith("FREQ=") or {"COUNT", "UNTIL"} <= set(parts):
        raise _refusal(text, "FREQ first, and COUNT or UNTIL but not both")
    if ("BYSETPOS" in parts and _UNITS.get(parts["FREQ"], DAY) < DAY) or (
        "BYWEEKNO" in parts and (parts["FREQ"] != "YEARLY" or parts.get("WKST", "MO") != "MO")
    ):
        raise _refusal(text, "BYSETPOS of days or more, BYWEEKNO of years whose weeks begin on Monday")
    return parts


class RRuleTimes:
    """The local times of a rule that begins at the local time `begin`: a pattern, in the periods of an interval."""

    def __init__(self, text: str, begin: Millis) -> None:
        parts, moment = _parts(text, text), as_datetime(begin)
        freq, unit, self._months = parts["FREQ"], _UNITS.get(parts["FREQ"], DAY), _MONTHS.get(parts["FREQ"], 0)
        self._interval, self.count = int(parts.get("INTERVAL", 1)), int(parts.get("COUNT", 0))
        self._until = _stamp(parts["UNTIL"], text, ends=True)[0] if "UNTIL" in parts else LAST_INSTANT
        self._begin, self._length, self.fixed = begin, self._months or unit, unit >= DAY
        week = (_WEEKDAYS.index(parts.get("WKST", "MO")) - date(1970, 1, 1).weekday()) * DAY
        self._origin = _month(begin) // self._length * self._length if self._months else begin - (begin - week) % unit
        any_day = {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"}.isdisjoint(parts)
        for name, value, implied in (
            ("BYSECOND", moment.second, unit > 1_000), ("BYMINUTE", moment.minute, unit > 60_000),
            ("BYHOUR", moment.hour, self.fixed), ("BYMONTHDAY", moment.day, any_day and freq in _MONTHS),
            ("BYDAY", _WEEKDAYS[moment.weekday()], any_day and freq == "WEEKLY"),
            ("BYMONTH", moment.month, any_day and freq == "YEARLY"),
        ):  # fmt: skip
            if implied:  # by the beginning
                parts.setdefault(name, str(value))
        by = {name: frozenset(map(int, parts[name].split(",") if name in parts else ())) for name in _BOUNDS}
        days = filter(None, map(_DAY.fullmatch, parts.get("BYDAY", "").split(",")))
        clock = by["BYHOUR"] or range(24), by["BYMINUTE"] or range(60), by["BYSECOND"] or range(60)
        self._pattern = Pattern(
            clock=tuple(tuple(sorted(one)) for one in clock), months=by["BYMONTH"] or frozenset(range(1, 13)),
            month_days=by["BYMONTHDAY"],
            weekdays=frozenset((_WEEKDAYS.index(day[2]), int(day[1] or 0)) for day in days),
            year_days=by["BYYEARDAY"], weeks=by["BYWEEKNO"], of_year=freq == "YEARLY" and not by["BYMONTH"],
            fixed=self.fixed,
        )  # fmt: skip
        self._places, times_a_day = by["BYSETPOS"], prod(map(len, clock))
        if self._places and times_a_day > _MOST_A_DAY:
            raise _refusal(text, f"with BYSETPOS at most {_MOST_A_DAY} times a day")
        self._open = b"\1"
        """A 1 for each period of the interval that has times of day, until these come again."""
        if unit < DAY and times_a_day < 86_400:
            units, first = DAY // unit, begin % DAY // unit
            having = {second * 1000 // unit for second in self._pattern.in_day()}
            turn = range(first, first + units // gcd(self._interval, units) * self._interval, self._interval)
            self._open = bytes(one % units in having for one in turn)
            if not any(self._open):
                raise _refusal(text, "an interval that meets its times of day")

    def first(self, looks: Iterator[int], local: Millis) -> Millis | None:
        """The first time that is not before `local`: of each period that may have it, until one does."""
        at = max(-(-local // 1000) * 1000, self._begin)
        for _ in chain([0], islice(looks, None, None, self._months or 1)):  # the first period costs no look
            start, end = self._period(at)
            if (found := self._pattern.first(looks, max(at, start))) is None:
                break
            if self._places and found < end:
                found = next((one for one in _chosen(self, start, end) if one >= at), end)
            if found < end:
                return found if found <= self._until else None
            at = found
        return None

    def _period(self, at: Millis) -> tuple[Millis, Millis]:
        """Beginning and end of the first period that ends after `at` and that interval and times of day allow."""
        index = ((_month(at) if self._months else at) - self._origin) // self._length
        turn, place = divmod(-(-index // self._interval), len(self._open))
        if (place := self._open.find(1, place)) < 0:
            turn, place = turn + 1, self._open.find(1)
        start = self._origin + (turn * len(self._open) + place) * self._interval * self._length
        end = start + self._length
        return (_month_start(start), _month_start(end)) if self._months else (start, end)


@lru_cache(maxsize=256)
def _chosen(rule: RRuleTimes, start: Millis, end: Millis) -> list[Millis]:
    """The times of a period that BYSETPOS chooses. A period has whole days here."""
    in_day, days, day, more = list(rule._pattern.in_day()), list[Millis](), start, range((rule._months or 2) - 1)
    while (found := rule._pattern.first(iter(more), day)) is not None and found < end:
        days.append(found // DAY * DAY)
        day = days[-1] + DAY
    chosen = nth(range(len(days) * len(in_day)), rule._places)
    return sorted(days[one // len(in_day)] + in_day[one % len(in_day)] * 1000 for one in chosen)


def _month(at: Millis) -> int:
    """The number of a month, counted from the year 0."""
    moment = as_datetime(at)
    return moment.year * 12 + moment.month - 1


@lru_cache(maxsize=1024)
def _month_start(month: int) -> Millis:
    year, month = divmod(month, 12)
    return (date(year, month + 1, 1).toordinal() - EPOCH_DAY) * DAY if year <= 9999 else LAST_INSTANT + 1


rrule_times = lru_cache(maxsize=512)(RRuleTimes)
