"""Cron expressions: the parser, the stream of matching local times, and their description in English.

Five fields, or six with the seconds first. Each field is a bit mask, so that finding the next match takes a few shifts
for each month that can match. Doubtful forms, which other programs read in different ways, are refused.
"""

from __future__ import annotations

import re
from calendar import monthrange
from datetime import date
from functools import lru_cache
from typing import NamedTuple

from bide.core.errors import BadInput
from bide.core.instants import Millis

_DAY_NAMES = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_WEEKDAYS = tuple(name[:3].lower() for name in _DAY_NAMES)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WORDS = {"-": " to ", ",": ", ", "7": "Sunday"} | dict(zip([*_WEEKDAYS, *"0123456"], _DAY_NAMES * 2, strict=True))
_EVERY = re.compile(r"0 \*(?:/(2|3|4|6|8|12))?|\*(?:/(2|3|4|5|6|10|12|15|20|30))? \*")
_NAMED = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
_ACCEPTED = (
    'five fields (minute, hour, day of month, month, day of week) such as "0 8 * * mon-fri", six with the seconds '
    f"first, or one of {' '.join(_NAMED)}"
)
_LONGEST = 1_000
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_WEEKS = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28
_MOST_MONTHS = 41 * 12
"""Each date and weekday that exists comes again within 40 years: Monday 29 February 2072 is followed by 2112."""


class Field(NamedTuple):
    """One field of an expression: its bounds, and the names of its values from the lowest on."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


_FIELDS = (
    Field("second", 0, 59), Field("minute", 0, 59), Field("hour", 0, 23), Field("day of month", 1, 31),
    Field("month", 1, 12, _MONTHS), Field("day of week", 0, 7, _WEEKDAYS),
)  # fmt: skip
_PART = re.compile(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d{1,4}))?", re.ASCII)
_SPECIAL_DAY = re.compile(r"(?P<day>[0-7]|[a-z]{3})(?:#(?P<number>[1-5])|l)", re.ASCII)


class CronTimes(NamedTuple):
    """The stream of local times that match an expression. A bit for each value that matches."""

    seconds: int
    minutes: int
    hours: int
    days: int
    """Days of the month; bit 0 is the last one."""
    months: int
    weekdays: int
    special: tuple[tuple[int, int], ...]
    """Weekdays with their number in the month; 0 is the last one."""
    both_days: bool
    """Day of month and day of week must both match, not only one of them."""
    fixed: bool
    """No field of the time of day begins with `*`: the rule names times rather than an interval."""

    def first_at_or_after(self, local: Millis) -> Millis | None:
        day, rest = divmod(-(-local // 1000), 86_400)
        try:
            first = date.fromordinal(day + _EPOCH_DAY)
        except (ValueError, OverflowError):
            return None
        year, month, left = first.year, first.month, -1 << first.day
        clock = self._clock(rest)
        if clock < 0:
            left &= ~(1 << first.day)
        for _ in range(_MOST_MONTHS):
            if self.months >> month & 1:
                left &= _days(self, year, month)
                if left:
                    found = (left & -left).bit_length() - 1
                    ordinal = date(year, month, found).toordinal()
                    if ordinal != day + _EPOCH_DAY:
                        clock = self._clock(0)
                    return ((ordinal - _EPOCH_DAY) * 86_400 + clock) * 1000
            year, month, left = (year + 1, 1, -1) if month == 12 else (year, month + 1, -1)
            if year > 9999:
                break
        return None

    def _clock(self, rest: int) -> int:
        """The first matching second of a day, not before `rest`; -1 if there is none."""
        hour, rest = divmod(rest, 3600)
        minute, second = divmod(rest, 60)
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1 and (later := self.seconds >> second):
                return hour * 3600 + minute * 60 + second + _lowest(later)
            if later := self.minutes >> minute + 1:
                return hour * 3600 + (minute + 1 + _lowest(later)) * 60 + _lowest(self.seconds)
        if later := self.hours >> hour + 1:
            return (hour + 1 + _lowest(later)) * 3600 + _lowest(self.minutes) * 60 + _lowest(self.seconds)
        return -1


@lru_cache(maxsize=1024)
def _days(times: CronTimes, year: int, month: int) -> int:
    """The matching days of a month, as bits 1 to 31."""
    first, length = monthrange(year, month)
    whole = (2 << length) - 2
    by_day = (times.days | (times.days & 1) << length) & whole
    by_weekday = 0
    for weekday in range(7):
        if times.weekdays >> weekday & 1:
            by_weekday |= _WEEKS << 1 + (weekday - 1 - first) % 7
    for weekday, number in times.special:
        held = _WEEKS << 1 + (weekday - 1 - first) % 7 & whole
        by_weekday |= 1 << held.bit_length() - 1 if number == 0 else held & 127 << 7 * number - 6
    return (by_day & by_weekday if times.both_days else by_day | by_weekday) & whole


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@lru_cache(maxsize=1024)
def cron_times(text: object) -> CronTimes:
    """Parse an expression. Raises BadInput that names the field at fault."""
    plain = text.strip().lower() if isinstance(text, str) and len(text) <= _LONGEST and text.isascii() else ""
    parts = _NAMED.get(plain, plain).split()
    if len(parts) not in (5, 6):
        raise BadInput("cron", text, _ACCEPTED)
    parts = ["0", *parts][-6:]
    seconds, minutes, hours, days, months, weekdays = map(_bits, _FIELDS, parts)
    special = filter(None, map(_SPECIAL_DAY.fullmatch, parts[5].split(",")))
    numbered = tuple((_number(_FIELDS[5], one["day"], parts[5]) % 7, int(one["number"] or 0)) for one in special)
    star = [part.startswith("*") for part in parts]
    both, fixed = star[3] or star[5], not any(star[:3])
    return CronTimes(seconds, minutes, hours, days, months, weekdays, numbered, both, fixed)


def _bits(field: Field, text: str) -> int:
    """The bits of a field, but for special weekdays. Raises BadInput."""
    bits = 0
    for part in text.split(","):
        if part == "l" and field.name == "day of month":
            bits |= 1
        elif field.name != "day of week" or not _SPECIAL_DAY.fullmatch(part):
            bits |= _range_bits(field, part, text)
    return bits


def _range_bits(field: Field, part: str, text: str) -> int:
    """The bits of a value, a range or a step. A range may wrap: 22-2, sat-sun."""
    found = _PART.fullmatch(part)
    if found is None or (found["first"] is None and found["step"] is None and part != text):
        raise _refusal(field, text)
    size = 7 if field.name == "day of week" else field.high - field.low + 1
    if found["first"] is None:
        first, last = field.low, field.low + size - 1
    else:
        first = _number(field, found["first"], text)
        last = first if found["last"] is None else _number(field, found["last"], text)
        if size == 7 and first == 7:
            first, last = 0, last % 7
        last += size if last < first else 0
    step = int(found["step"] or 1)
    if found["step"] is not None and not 1 <= step <= last - first:  # also 5/20, which has no range
        raise _refusal(field, text)
    return sum({1 << (value - field.low) % size + field.low for value in range(first, last + 1, step)})


def _number(field: Field, text: str, whole: str) -> int:
    if text in field.names:
        return field.names.index(text) + field.low
    if not text.isdigit() or len(text) > 2 or not field.low <= int(text) <= field.high:
        raise _refusal(field, whole)
    return int(text)


def _refusal(field: Field, text: str) -> BadInput:
    names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    more = {"day of month": " or L, the last day", "day of week": ", fri#2 (the second) or friL (the last)"}
    accepted = f"{field.low} to {field.high}{names}, *, ranges, lists, steps of ranges that fit into them"
    return BadInput(field.name, text, accepted + more.get(field.name, ""))


def cron_words(text: str) -> str | None:
    """The expression in English, such as "at 08:00 on Monday to Friday"; None if it has no short description."""
    parts = _NAMED.get(text.lower(), text.lower()).split()
    if len(parts) != 5 or parts[3] != "*" or (parts[2] != "*" and parts[4] != "*"):
        return None
    minute, hour, day, _, weekday = parts
    if minute.isdigit() and hour.replace(",", "").isdigit():
        words = "at " + ", ".join(f"{int(one):02}:{int(minute):02}" for one in hour.split(","))
    elif found := _EVERY.fullmatch(f"{minute} {hour}"):
        number, unit = found[1] or found[2] or "", "hour" if minute == "0" else "minute"
        words = f"every {number} {unit}s" if number else f"every {unit}"
    else:
        return None
    named = [_WORDS.get(piece) for piece in re.split("([-,])", weekday)]
    if weekday == "*":
        on = "" if day == "*" else f" on day {int(day)} of the month" if day.isdigit() else None
        on = " on the last day of the month" if day == "l" else on
    else:
        on = None if None in named else f" on {''.join(map(str, named))}"
    return None if on is None else words + on
