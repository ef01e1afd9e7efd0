"""Wall-clock times, such as "tomorrow 20:00 Europe/Rome": the instants at which the clocks of a zone show them.

As for recurring rules, a time that the clocks skip is the first instant after the gap, one that they repeat the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta

from bide.core.errors import BadInput
from bide.core.recurrence.zones import EPOCH, WIDEST, Millis, next_step, zone_info

Now = Callable[[], int] | None
"""The milliseconds since the epoch, for times without a date; None: no clock is at hand, and they are refused."""
INSTANT_ACCEPTED = (
    'an aware datetime, ISO 8601 text with an offset such as "2030-01-31T08:00:00+01:00", or a time with its zone '
    'such as "08:00 Asia/Shanghai", "tomorrow 20:00 Europe/Rome", "mon 09:00 UTC" or "2030-01-31 08:00 Europe/Rome"'
)
_TEXT = re.compile(
    r"(?:(\d{4}-\d\d-\d\d)[ T]|(today|tomorrow|mon(?:day)?|tue(?:sday)?|wed(?:nesday)?|thu(?:rsday)?|fri(?:day)?"
    r"|sat(?:urday)?|sun(?:day)?) +)?([01]?\d|2[0-3])(:[0-5]\d(?::[0-5]\d(?:\.\d{1,6})?)?)(?: +([a-z][\w+/-]*))?",
    re.ASCII | re.IGNORECASE,
)


class NoClock(BadInput):
    """A time without a date, where it is not known which day it is."""


def wall_time(value: object, field: str, zone: str | None, now: Now, iso: bool) -> Millis:
    """The instant of a wall-clock time: text (`iso`: in ISO 8601), or a naive datetime. Raises BadInput, OverflowError.

    The text names its zone, or else it is `zone`. `now` is called for text without a date; without it raises NoClock.
    """
    known = None if zone is None else zone_info(zone)
    found = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
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
        raise BadInput(field, value, f"{INSTANT_ACCEPTED}{why and ': '}{why}") from None
    if day is not None:
        return _first(datetime.combine(day, at), known.key)
    if now is None:
        raise NoClock(field, value, f"{INSTANT_ACCEPTED}: here with its date")
    moment, word = now(), (found[2] or "").lower()
    day = (EPOCH + timedelta(milliseconds=moment)).astimezone(known).date()
    if word[:2] == "to":
        return _first(datetime.combine(day + timedelta(word == "tomorrow"), at), known.key)
    day += timedelta(("montuewedthufrisatsun".index(word[:3]) // 3 - day.weekday()) % 7 if word else 0)
    while (ahead := _first(datetime.combine(day, at), known.key)) <= moment:
        day += timedelta(7 if word else 1)
    return ahead


def _first(shown: datetime, zone: str) -> Millis:
    """The first instant at which the clocks of a zone show a time or, if they skip it, a later one."""
    local = -((EPOCH - shown.replace(tzinfo=UTC)) // timedelta(milliseconds=1))
    found = next_step(lambda at: local if at <= local else None, zone, local - WIDEST, "run_after", "first")
    if found is None:
        raise OverflowError
    return found
