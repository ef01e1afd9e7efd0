"""Recurrence rules of iCalendar (RFC 5545): the reader of their text, and the stream of local times.

A rule is expanded period by period: the year, month, week or day of its frequency, or the unit above a shorter one.
A period is found by division, so that the next time costs the same however long ago the rule began.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from datetime import date, datetime
from functools import lru_cache
from itertools import product
from math import gcd

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.recurrence.zones import DAY

_LONGEST, _MOST_A_DAY = 1_000, 96
MOST_OF_STEP, MOST_OF_COUNT = 41 * 366, 60_000
"""The days that are searched for a next time (each date and weekday comes again within 40 years), and for the last of
those that are counted. Ten days are a month, or a period that is looked at in vain for a rule of hours or less."""
_UNITS = {"SECONDLY": 1, "MINUTELY": 60, "HOURLY": 3_600, "DAILY": 86_400, "WEEKLY": 7 * 86_400}
_MONTHS = {"MONTHLY": 1, "YEARLY": 12}
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH_WEEKDAY = date(1970, 1, 1).weekday()
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
    if ("BYSETPOS" in parts and _UNITS.get(parts["FREQ"], 86_400) < 86_400) or (
        "BYWEEKNO" in parts and (parts["FREQ"] != "YEARLY" or parts.get("WKST", "MO") != "MO")
    ):
        raise _refusal(text, "BYSETPOS of days or more, BYWEEKNO of years whose weeks begin on Monday")
    return parts


class RRuleTimes:
    """The stream of local times of a rule that begins at the local time `begin`."""

    def __init__(self, text: str, begin: Millis) -> None:
        parts, moment = _parts(text, text), as_datetime(begin)
        unit, self._months = _UNITS.get(parts["FREQ"], 86_400), _MONTHS.get(parts["FREQ"], 0)
        self._interval, self.count = int(parts.get("INTERVAL", 1)), int(parts.get("COUNT", 0))
        self._begin = begin // 1000
        self._until = _stamp(parts["UNTIL"], text, ends=True)[0] if "UNTIL" in parts else LAST_INSTANT
        self.fixed, self._unit = unit >= 86_400, min(unit, 86_400)
        self._size = unit // 86_400 if self.fixed else unit * (24 if unit == 3_600 else 60)  # days, or seconds
        if not {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"} & set(parts):  # what the beginning implies
            if self._months:
                parts["BYMONTHDAY"] = str(moment.day)
            elif parts["FREQ"] == "WEEKLY":
                parts["BYDAY"] = _WEEKDAYS[moment.weekday()]
            if self._months == 12:
                parts.setdefault("BYMONTH", str(moment.month))
        self._origin = begin // DAY
        if self._months:
            self._origin = moment.year * 12 + (moment.month - 1) * (self._months == 1)
        elif parts["FREQ"] == "WEEKLY":
            self._origin -= (moment.weekday() - _WEEKDAYS.index(parts.get("WKST", "MO"))) % 7
        self._by = {name: {int(one) for one in parts[name].split(",")} for name in _BOUNDS if name in parts}
        days = filter(None, map(_DAY.fullmatch, parts.get("BYDAY", "").split(",")))
        self._weekdays = {(_WEEKDAYS.index(day[2]), int(day[1] or 0)) for day in days}
        self._in_year = self._months == 12 and "BYMONTH" not in parts
        self._dated = not {"BYMONTH", "BYMONTHDAY", "BYYEARDAY"}.isdisjoint(parts)
        fine, self._limits = list[list[int]](), list[tuple[int, int, set[int]]]()
        for name, size, modulus in (("BYHOUR", 3_600, 24), ("BYMINUTE", 60, 60), ("BYSECOND", 1, 60)):
            if size < self._unit:
                fine.append([one * size for one in self._by.get(name, {self._begin // size % modulus})])
            elif name in parts:
                self._limits.append((size, modulus, self._by[name]))
        self._offsets = sorted(map(sum, product(*fine)))
        if len(self._offsets) > _MOST_A_DAY:
            raise _refusal(text, f"at most {_MOST_A_DAY} combinations of BYHOUR, BYMINUTE and BYSECOND")
        step = self._interval * self._unit
        turn = 86_400 // gcd(step, 86_400) if self._limits else 1  # after so many units the times of day come again
        day, limits = b"\1", {size: given for size, _, given in self._limits}
        for size, modulus in ((1, 60), (60, 60), (3_600, 24)):  # each second of a day, as far as the limits allow it
            day = b"".join(day if one in limits.get(size, range(modulus)) else bytes(size) for one in range(modulus))
        self._open = bytes(day[(self._begin + number * step) % 86_400] for number in range(turn))
        """For each unit of a turn from the beginning on, whether the rule allows its time of day."""

    def search(self, local: Millis, left: int) -> tuple[Millis | None, int]:
        """The first time that is not before `local`, without the COUNT, and what is left of `left` days to search."""
        seconds = max(-(-local // 1000), self._begin)
        index = self._index(seconds)
        try:
            while left > 0 and 1 in self._open:
                times = _period(self, index)
                if (place := bisect_left(times, seconds)) < len(times):
                    found = times[place] * 1000
                    return found if found <= self._until else None, left
                begun, index = index, index + 1 if self.fixed else self._open_unit(index + 1) // self._size
                index = max(index, self._index(self._open_day(self._days(index).start) * 86_400))
                left -= (index - begun) * (self._months * 10 or 1) if self.fixed else 10
        except (OverflowError, ValueError):  # after the year 9999
            pass
        return None, left

    def period(self, index: int) -> list[int]:
        """The times of a period, in seconds."""
        days, day = list[int](), (span := self._days(index)).start
        while day < span.stop:
            if (open_day := self._open_day(day)) == day:
                days.append(day * 86_400)
            day = max(open_day, day + 1)
        if not self.fixed:
            at, limits = index * self._size, self._limits
            if any(size >= self._size and at // size % modulus not in given for size, modulus, given in limits):
                return []
            days = list(filter(self._allows, self._units(index) if days else ()))
        times = [start + offset for start in days for offset in self._offsets]
        if "BYSETPOS" in self._by:
            chosen = {place - (place > 0) for place in self._by["BYSETPOS"] if abs(place) <= len(times)}
            times = sorted({times[place] for place in chosen})
        return [time for time in times if time >= self._begin]

    def _units(self, index: int) -> range:
        """The units of a shorter period that its interval allows, in seconds; the first may lie after the period."""
        first = index * self._size // self._unit
        first += (self._begin // self._unit - first) % self._interval
        return range(first * self._unit, (index + 1) * self._size, self._interval * self._unit)

    def _open_unit(self, index: int) -> int:
        """The first unit from a shorter period on whose time of day the rule allows, in seconds."""
        first, step, turn = self._units(index).start, self._interval * self._unit, len(self._open)
        number = (first // self._unit - self._begin // self._unit) // self._interval % turn
        place = self._open.find(1, number)
        return first + ((place if place >= 0 else turn + self._open.find(1)) - number) * step

    def _allows(self, unit: int) -> bool:
        return all(unit // size % modulus in given for size, modulus, given in self._limits)

    def _days(self, index: int) -> range:
        """The days of a period, as days since 1970-01-01; the day around a period that is shorter."""
        if self._months:
            month = self._origin + index * self._interval * self._months
            return range(_first_day(month), _first_day(month + self._months))
        first = self._origin + index * self._interval * self._size if self.fixed else index * self._size // 86_400
        return range(first, first + (self._size if self.fixed else 1))

    def _index(self, seconds: int) -> int:
        """The last period that does not begin after `seconds`."""
        if not self.fixed:
            return seconds // self._size
        at, size = seconds // 86_400, self._months or self._size
        if self._months:
            when = date.fromordinal(at + _EPOCH_DAY)
            at = when.year * 12 + when.month - 1
        return (at - self._origin) // (self._interval * size)

    def _open_day(self, day: int) -> int:
        """`day` if it has times, by the parts of the rule that name days; else the first day after it that may."""
        if not self._dated and self._weekdays and all(one != (day + _EPOCH_WEEKDAY) % 7 for one, _ in self._weekdays):
            return day + 1
        when, by, after, has_times = date.fromordinal(day + _EPOCH_DAY), self._by, day + 1, True
        month, year = when.year * 12 + when.month - 1, when.year * 12
        if when.month not in by.get("BYMONTH", {when.month}):
            return _first_day(month + 1)
        in_month, in_year = (_first_day(month), _first_day(month + 1)), (_first_day(year), _first_day(year + 12))
        for name, (low, end) in (("BYMONTHDAY", in_month), ("BYYEARDAY", in_year)):
            if name in by:
                days = [low - 1 + one if one > 0 else end + one for one in by[name]]
                has_times = has_times and day in days
                after = max(after, min((one for one in days if day < one < end), default=end))
        if self._weekdays:
            low, end = in_year if self._in_year else in_month
            numbers = (0, (day - low) // 7 + 1, -((end - 1 - day) // 7 + 1))
            has_times = has_times and any((when.weekday(), number) in self._weekdays for number in numbers)
        if "BYWEEKNO" in by:
            week, weeks = when.isocalendar().week, date(when.isocalendar().year, 12, 28).isocalendar().week
            has_times = has_times and not by["BYWEEKNO"].isdisjoint((week, week - weeks - 1))
        return day if has_times else after


@lru_cache(maxsize=1024)
def _first_day(month: int) -> int:
    """The first day of a month, which is counted from the year 0."""
    return date(month // 12, month % 12 + 1, 1).toordinal() - _EPOCH_DAY


rrule_times = lru_cache(maxsize=512)(RRuleTimes)
_period = lru_cache(maxsize=256)(RRuleTimes.period)


class RRuleSearch:
    """The stream of a rule for one search, of at most `left` days in all: after these it has no more times."""

    def __init__(self, times: RRuleTimes, left: int = MOST_OF_STEP) -> None:
        self._search, self.fixed, self.left = times.search, times.fixed, left

    def first_at_or_after(self, local: Millis) -> Millis | None:
        found, self.left = self._search(local, self.left)
        return found
