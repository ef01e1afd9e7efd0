"""Instants, durations and due times: integer milliseconds inside, aware datetimes and text such as "15m" outside.

An *instant* is milliseconds since the Unix epoch, UTC; a *duration* is milliseconds. Below the public API, every time
is one of these two integers. The public API accepts what a person would write, and refuses ambiguous values: a naive
datetime (which zone?) and a bare number (which unit?).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction
from typing import TypeAlias

from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.recurrence.zones import EPOCH, WIDEST, next_step, zone_info
from bide.core.recurrence.zones import LAST_INSTANT as LAST_INSTANT
from bide.core.recurrence.zones import Millis as Millis

When: TypeAlias = datetime | str
"""An instant in the public API: an aware datetime, ISO 8601 text with an offset, or text such as "08:00 Asia/Tokyo"."""

Length: TypeAlias = timedelta | str
"""A duration in the public API: a timedelta, or text such as "15m", "1h30m", "1.5s", "PT15M"."""

Now = Callable[[], int] | None
"""The milliseconds since the epoch, for times without a date; None: no clock is at hand, and they are refused."""

NEVER: Millis = 2**62  # later than every instant
LONGEST: Millis = LAST_INSTANT
LONGEST_TEXT = 80
"""The most characters in the text of a time; longer text is neither parsed nor kept."""

_LAST = EPOCH + timedelta(milliseconds=LAST_INSTANT)
_MILLISECOND = timedelta(milliseconds=1)
_UNITS: dict[str, int] = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?:(?P<w>\d+(?:\.\d+)?)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)
_INSTANT_ACCEPTED = (
    'an aware datetime, ISO 8601 text with an offset such as "2030-01-31T08:00:00+01:00", or a time with its zone '
    'such as "08:00 Asia/Shanghai", "tomorrow 20:00 Europe/Rome", "mon 09:00 UTC" or "2030-01-31 08:00 Europe/Rome"'
)
_WALL_TIME = re.compile(
    r"(?:(\d{4}-\d\d-\d\d)[ T]|(today|tomorrow|mon(?:day)?|tue(?:sday)?|wed(?:nesday)?|thu(?:rsday)?|fri(?:day)?"
    r"|sat(?:urday)?|sun(?:day)?) +)?([01]?\d|2[0-3])(:[0-5]\d(?::[0-5]\d(?:\.\d{1,6})?)?)(?: +([a-z][\w+/-]*))?",
    re.ASCII | re.IGNORECASE,
)
_DURATION_ACCEPTED = (
    'a timedelta or text such as "15m", "1h30m", "1.5s", "250ms", "2d" or "PT15M" (units: ms s m h d w)'
)


class NoClock(BadInput):
    """A time without a date, where it is not known which day it is."""


def duration(value: Length, *, field: str = "delay", negative: bool = False) -> Millis:
    """The milliseconds of `value`, rounded up to whole ones so that nothing is early.

    Raises BadInput for unknown units, bare numbers, lengths beyond year 9999 and, unless `negative`, below zero.
    """
    if isinstance(value, timedelta):
        whole, rest = divmod(value, _MILLISECOND)
        millis = whole + bool(rest)
    elif isinstance(value, str):
        try:
            if len(value) > LONGEST_TEXT:
                raise ValueError
            millis = _duration_of_text(value)
        except ValueError:
            raise BadInput(field, value, _DURATION_ACCEPTED) from None
    else:
        raise BadInput(field, value, _DURATION_ACCEPTED)
    if millis < 0 and not negative:
        raise BadInput(field, value, "a duration that is not negative")
    if abs(millis) > LONGEST:
        raise BadInput(field, value, "a duration that ends before the year 10000")
    return millis


def instant(value: When, *, field: str = "at", now: Now = None, zone: str | None = None) -> Millis:
    """The milliseconds since the epoch of `value`, rounded up. Raises BadInput for naive datetimes and before 1970.

    For a wall-clock time such as "08:00" the zone is in the text, or `zone`; without a date it is read as of `now()`.
    """
    moment: object = value
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT or not value.isprintable():  # fromisoformat reads past a NUL
            raise BadInput(field, value, _INSTANT_ACCEPTED)
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            moment = None
    try:
        if not isinstance(moment, datetime) or moment.tzinfo is None or moment.utcoffset() is None:
            millis = _wall_time(value, field, zone, now, moment is not None)
        else:
            millis = -((EPOCH - moment) // _MILLISECOND)
    except OverflowError:
        raise BadInput(field, value, "an instant within the years 1970 to 9999") from None
    return check_instant(millis, field=field, value=value)


def _wall_time(value: object, field: str, zone: str | None, now: Now, iso: bool) -> Millis:
    """The instant of a wall-clock time: text (`iso`: in ISO 8601), or a naive datetime. Raises BadInput, OverflowError.

    The text names its zone, or else it is `zone`. `now` is called for text without a date; without it raises NoClock.
    """
    known = None if zone is None else zone_info(zone)
    found = _WALL_TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if known is None and (named := found and found[5]):
            known = zone_info(named)
        if known is None:
            raise ValueError("without a zone it could mean two dozen instants" if found or iso else "")
        if isinstance(value, datetime):
            return _first(value, known.key)
        if found is None or found[5] not in (None, known.key):
            raise ValueError(f"one zone, not {found[5]} and {zone}" if found else "")
        at = time.fromisoformat(found[3].zfill(2) + found[4])
        day = date.fromisoformat(found[1]) if found[1] else None
    except ValueError as error:
        why = error.accepted if isinstance(error, BadInput) else str(error)
        raise BadInput(field, value, f"{_INSTANT_ACCEPTED}{why and ': '}{why}") from None
    if day is not None:
        return _first(datetime.combine(day, at), known.key)
    if now is None:
        raise NoClock(field, value, f"{_INSTANT_ACCEPTED}: here with its date")
    moment, word = now(), (found[2] or "").lower()
    day = (EPOCH + timedelta(milliseconds=moment)).astimezone(known).date()
    if word[:2] == "to":
        return _first(datetime.combine(day + timedelta(word == "tomorrow"), at), known.key)
    day += timedelta(("montuewedthufrisatsun".index(word[:3]) // 3 - day.weekday()) % 7 if word else 0)
    while (ahead := _first(datetime.combine(day, at), known.key)) <= moment:
        day += timedelta(7 if word else 1)
    return ahead


def _first(shown: datetime, zone: str) -> Millis:
    """The first instant at which the clocks of a zone show a time or, if they skip it, after that gap, as for rules."""
    local = -((EPOCH - shown.replace(tzinfo=UTC)) // _MILLISECOND)
    found = next_step(lambda at: local if at <= local else None, zone, local - WIDEST, "run_after", "first")
    if found is None:
        raise OverflowError
    return found


def check_instant(millis: Millis, *, field: str, value: object = None) -> Millis:
    """Return `millis` if it lies within 1970..9999; raise BadInput otherwise."""
    if 0 <= millis <= LAST_INSTANT:
        return millis
    raise BadInput(field, millis if value is None else value, "an instant within the years 1970 to 9999")


def as_datetime(millis: Millis) -> datetime:
    """The aware UTC datetime of an instant, computed exactly without floats.

    An out-of-range instant, which only a damaged row has, becomes the nearest datetime, so that it can be shown.
    """
    try:
        return EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return EPOCH if millis < 0 else _LAST


# --- when a task is due


class At(Struct, frozen=True, gc=False, tag="at"):
    """Due at an instant of UTC."""

    millis: Millis

    def resolve(self, now: Millis) -> Millis:
        return self.millis


class In(Struct, frozen=True, gc=False, tag="in"):
    """Due a length from now, by the store's own clock."""

    millis: Millis

    def resolve(self, now: Millis) -> Millis:
        return now + self.millis


Due: TypeAlias = At | In


def with_grain(due: Due, grain: Millis) -> Due:
    """Add `grain`, the most by which a clock rounds down, to a length above zero, so that none is shortened."""
    return In(due.millis + grain) if grain and type(due) is In and due.millis else due


def one_due(
    at: When | None, delay: Length | None, *, grain: Millis = 0, at_field: str = "at", delay_field: str = "delay",
    now: Now = None, zone: str | None = None,
) -> Due:  # fmt: skip
    """The due time by `at` or `delay`. Raises BadInput for both, neither, or one that is not an instant or length.

    For `grain` see `with_grain`, for `now` and `zone` see `instant`.
    """
    if zone is not None:
        zone_info(zone)
    if at is not None:
        if delay is not None:
            raise BadInput(f"{at_field}, {delay_field}", (at, delay), "only one of the two")
        return At(instant(at, field=at_field, now=now, zone=zone))
    if type(delay) is str and len(delay) <= LONGEST_TEXT:
        return _due_after(delay, grain, delay_field)
    if delay is None:
        raise BadInput(f"{at_field}, {delay_field}", None, "one of the two, to say when it is due")
    return with_grain(In(duration(delay, field=delay_field)), grain)


def due_later(at: When | None, delay: Length | None, *, at_field: str = "at", delay_field: str = "delay") -> Due | str:
    """Like `one_due`, for an outcome: text without a date is checked, and kept until `resolved` knows the time."""
    try:
        return one_due(at, delay, at_field=at_field, delay_field=delay_field)
    except NoClock:
        return str(at)


def resolved(due: Due | str, now: Millis, grain: Millis = 0) -> Due:
    """The due time of an outcome, as of `now`. For `grain` see `with_grain`."""
    return At(instant(due, now=lambda: now)) if isinstance(due, str) else with_grain(due, grain)


@functools.lru_cache(maxsize=512)
def _due_after(delay: str, grain: Millis, field: str) -> Due:
    """Parse a delay. Cached, since programs use the same few lengths repeatedly."""
    return with_grain(In(duration(delay, field=field)), grain)


def due_of(
    when: When | Length, field: str = "when", *, grain: Millis = 0, now: Now = None, zone: str | None = None
) -> Due:
    """An instant (see `instant`) or a length from now (a timedelta, "15m"). For `grain` see `with_grain`."""
    try:
        if isinstance(when, (str, timedelta)):
            return with_grain(In(duration(when, field=field)), grain)
    except BadInput:
        if isinstance(when, timedelta):
            raise
    return At(instant(when, field=field, now=now, zone=zone))


# --- as text


def instant_text(millis: Millis) -> str:
    """RFC 3339 in UTC with milliseconds: "2030-01-31T07:00:00.000Z"."""
    seconds, rest = divmod(millis, 1_000)
    return f"{_seconds_text(seconds)}.{rest:03d}Z"


@functools.lru_cache(maxsize=4096)
def _seconds_text(seconds: int) -> str:
    """Format whole seconds. Cached, since many tasks have times in the same seconds."""
    return as_datetime(1_000 * seconds).isoformat(timespec="seconds").removesuffix("+00:00")


def duration_text(millis: Millis) -> str:
    """The shortest exact text that `duration` reads back: 5_400_000 -> "1h30m", 0 -> "0s"."""
    if millis == 0:
        return "0s"
    sign, rest = ("-", -millis) if millis < 0 else ("", millis)
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest = divmod(rest, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return sign + "".join(parts)


def rough_text(millis: Millis, units: Sequence[str] = ("d", "h", "m", "s"), between: str = " ") -> str:
    """A length of a second or more in its two largest units, for a person: "14m 3s", "2d 4h", "4.2s"."""
    if millis < 10_000:
        return f"{millis // 100 / 10:g}{units[3]}"
    rest = millis + 500  # to the nearest second: a task requested in 15m is not "in 14m 59s"
    parts: list[str] = []
    for unit, size in zip(units, ("d", "h", "m", "s"), strict=True):
        count, rest = divmod(rest, _UNITS[size])
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return between.join(part for part in parts[:2] if part)


@functools.lru_cache(maxsize=512)
def _duration_of_text(text: str) -> Millis:
    """Parse a duration. Cached, since programs use the same few durations repeatedly. Raises ValueError."""
    stripped = text.strip()
    sign, body = (-1, stripped[1:]) if stripped.startswith("-") else (1, stripped.removeprefix("+"))
    if body.startswith("P"):
        found = _ISO_DURATION.fullmatch(body)
        parts = {unit: number for unit, number in found.groupdict().items() if number} if found else {}
        if not parts or body.endswith("T"):
            raise ValueError
        return math.ceil(sign * sum(_scaled(number, unit) for unit, number in parts.items()))
    total: int | Fraction = 0
    position, seen = 0, set[str]()
    while position < len(body):
        part = _PART.match(body, position)
        if part is None or part[2] in seen:
            raise ValueError
        seen.add(part[2])
        total += _scaled(part[1], part[2])
        position = part.end()
    if not seen:
        raise ValueError
    return math.ceil(sign * total)


def _scaled(number: str, unit: str) -> int | Fraction:
    """Convert `number` of `unit` to milliseconds exactly: a float would make 0.1 s early."""
    scale = _UNITS[unit]
    return Fraction(number) * scale if "." in number else int(number) * scale
