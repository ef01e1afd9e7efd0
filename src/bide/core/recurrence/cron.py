"""Cron expressions: the parser, and their description in English.

Five fields, or six with the seconds first. Doubtful forms, which other programs read in different ways, are refused.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from bide.core.errors import BadInput
from bide.core.recurrence.pattern import Pattern

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
_PART = re.compile(r"(?:\*|(?P<first>\d\d?|[a-z]{3})(?:-(?P<last>\d\d?|[a-z]{3}))?)(?:/(?P<step>\d{1,4}))?", re.ASCII)
_NUMBERED_DAY = re.compile(r"(?P<day>[0-7]|[a-z]{3})(?:#(?P<number>[1-5])|l)", re.ASCII)


@lru_cache(maxsize=1024)
def cron_times(text: object) -> Pattern:
    """Parse an expression. Raises BadInput that names the field at fault."""
    plain = text.strip().lower() if isinstance(text, str) and len(text) <= _LONGEST and text.isascii() else ""
    parts = _NAMED.get(plain, plain).split()
    if len(parts) not in (5, 6):
        raise BadInput("cron", text, _ACCEPTED)
    parts = ["0", *parts][-6:]
    seconds, minutes, hours, days, months, weekdays = map(_values, _FIELDS, parts)
    star = [part.startswith("*") for part in parts]
    return Pattern(
        clock=tuple(tuple(sorted(one)) for one in (hours, minutes, seconds)), months=frozenset(months),
        month_days=frozenset(days if parts[3] != "*" else ()),
        weekdays=frozenset(((one % 10 - 1) % 7, one // 10) for one in weekdays if parts[5] != "*"),
        either=not (star[3] or star[5]), fixed=not any(star[:3]),
    )  # fmt: skip


def _values(field: Field, text: str) -> set[int]:
    """The values of a field. -1 is the last day of a month, and a weekday has its number as tens. Raises BadInput."""
    found = set[int]()
    try:
        for part in text.split(","):
            if part == "l" and field.name == "day of month":
                found.add(-1)
            elif field.name == "day of week" and (day := _NUMBERED_DAY.fullmatch(part)):
                found.add(10 * int(day["number"] or -1) + _number(field, day["day"]))
            else:
                found |= _range(field, part, text)
    except ValueError:
        names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
        more = {"day of month": " or L, the last day", "day of week": ", fri#2 (the second) or friL (the last)"}
        accepted = f"{field.low} to {field.high}{names}, *, ranges, lists, steps of ranges that fit into them"
        raise BadInput(field.name, text, accepted + more.get(field.name, "")) from None
    return found


def _range(field: Field, part: str, text: str) -> set[int]:
    """The values of a single one, a range or a step, also of a range that wraps: 22-2, sat-sun. Raises ValueError."""
    found, size = _PART.fullmatch(part), 7 if field.name == "day of week" else field.high - field.low + 1
    if found is None or (part == "*" and part != text):
        raise ValueError
    ends = [_number(field, end) for end in (found["first"], found["last"]) if end]
    first, last = (ends[0], ends[-1]) if ends else (field.low, field.low + size - 1)
    last += size if last < first else 0
    step = int(found["step"] or 1)
    if found["step"] is not None and not 1 <= step <= last - first:  # also 5/20, which has no range
        raise ValueError
    return {(value - field.low) % size + field.low for value in range(first, last + 1, step)}


def _number(field: Field, text: str) -> int:
    number = field.names.index(text) + field.low if text.isalpha() else int(text)
    if not field.low <= number <= field.high:
        raise ValueError
    return number


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
