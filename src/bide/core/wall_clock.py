"""Wall-clock times, such as "tomorrow 20:00 Europe/Rome": the instants at which the clocks of a zone show them.

As for recurring rules, a time that the clocks skip is the first instant after the gap, one that they repeat the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from bide.core.errors import BadInput

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


def zone_info(name: str) -> ZoneInfo:
    """The zone of this name. Raises BadInput if the time zone database does not know it."""
    try:
        if name in ("localtime", "posixrules") or str(name).startswith("right/"):
            raise KeyError  # on each machine another zone, or one that counts leap seconds
        return known_zone(name)
    except (KeyError, ValueError, TypeError, OSError):  # OSError: the name of a directory
        raise BadInput("zone", name, 'a name of the IANA time zone database, such as "Europe/Rome" or "UTC"') from None


known_zone = lru_cache(maxsize=1024)(ZoneInfo.no_cache)


def wall_time(value: object, field: str, zone: str | None, now: Now, iso: bool) -> datetime:
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
            return _first(value, known)
        if found is None or found[5] not in (None, known.key):
            raise ValueError(f"one zone, not {found[5]} and {zone}" if found else "")
        at = time.fromisoformat(found[3].zfill(2) + found[4])
        if found[1]:
            return _first(datetime.combine(date.fromisoformat(found[1]), at), known)
    except ValueError as error:
        why = error.accepted if isinstance(error, BadInput) else str(error)
        raise BadInput(field, value, f"{INSTANT_ACCEPTED}{why and ': '}{why}") from None
    if now is None:
        raise NoClock(field, value, f"{INSTANT_ACCEPTED}: here with its date")
    return _ahead((found[2] or "").lower(), at, known, datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=now()))


def _ahead(word: str, at: time, zone: ZoneInfo, now: datetime) -> datetime:
    """Of today or tomorrow, or the next one, on this day of the week or any day."""
    day, step = now.astimezone(zone).date(), timedelta(7 if word else 1)
    if word[:2] == "to":
        return _first(datetime.combine(day + timedelta(word == "tomorrow"), at), zone)
    day += timedelta(("montuewedthufrisatsun".index(word[:3]) // 3 - day.weekday()) % 7 if word else 0)
    while (found := _first(datetime.combine(day, at), zone)) <= now:
        day += step
    return found


def _first(shown: datetime, zone: ZoneInfo) -> datetime:
    """The first instant (in UTC) at which the clocks of a zone show a time or, if they skip it, a later one."""
    early, late = (shown.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if early <= late:
        return early
    after, low, high = early.astimezone(zone).utcoffset(), int(late.timestamp()), int(early.timestamp()) + 1
    while high - low > 1:  # bisect for the change of the clocks, to the second
        middle = (low + high) // 2
        low, high = (low, middle) if datetime.fromtimestamp(middle, zone).utcoffset() == after else (middle, high)
    return datetime.fromtimestamp(high, UTC)
