"""The months, days and times of day that a rule of wall-clock times names, and the search for the first of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from calendar import isleap, monthrange
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import lru_cache
from itertools import product
from typing import TypeVar

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.recurrence.zones import DAY

T = TypeVar("T")
EPOCH_DAY = date(1970, 1, 1).toordinal()
MOST_LOOKS = 1_500
"""The months and the periods of an interval that one step looks at. Each date and weekday comes again in 40 years."""


class Pattern(Struct, frozen=True, cache_hash=True, kw_only=True):
    """The parts of local times. An empty set leaves no day out; numbers below zero count from the end."""

    clock: tuple[tuple[int, ...], ...]
    """The hours, the minutes in each of them, and the seconds in each of these, in order."""
    months: frozenset[int]
    month_days: frozenset[int] = frozenset()
    weekdays: frozenset[tuple[int, int]] = frozenset()
    """Monday is 0. The second is the number within the month, or the year; 0: all of them."""
    year_days: frozenset[int] = frozenset()
    weeks: frozenset[int] = frozenset()
    """Weeks of ISO 8601."""
    of_year: bool = False
    """Weekdays are numbered within the year."""
    either: bool = False
    """Day of month or day of week must match, not both."""
    fixed: bool = True
    """The rule names times of day rather than an interval."""

    def first(self, looks: Iterator[int], local: Millis) -> Millis | None:
        """The first time that is not before `local`; None: there is none, or no look at a later month is left."""
        day, rest = divmod(local, DAY)
        try:
            when = date.fromordinal(day + EPOCH_DAY)
        except (ValueError, OverflowError):
            return None
        clock = self._clock(-(-rest // 1000))
        year, month, least = when.year, when.month, when.day + (clock < 0)
        while not (
            month in self.months and (found := next((one for one in _days(self, year, month) if one >= least), 0))
        ):
            year, month, least = (year + 1, 1, 1) if month == 12 else (year, month + 1, 1)
            if year > 9999 or next(looks, None) is None:
                return None
        number = date(year, month, found).toordinal() - EPOCH_DAY
        return number * DAY + (clock if number == day else self._clock(0)) * 1000

    def _clock(self, rest: int) -> int:
        """The first matching second of a day, not before `rest`; -1 if there is none."""
        (hours, minutes, seconds), hour, minute, second = self.clock, rest // 3600, rest // 60 % 60, rest % 60
        if hour in hours:
            if minute in minutes and second <= seconds[-1]:
                return hour * 3600 + minute * 60 + seconds[bisect_left(seconds, second)]
            if minute < minutes[-1]:
                return hour * 3600 + minutes[bisect_right(minutes, minute)] * 60 + seconds[0]
        later = bisect_right(hours, hour)
        return hours[later] * 3600 + minutes[0] * 60 + seconds[0] if later < len(hours) else -1

    def in_day(self) -> Iterator[int]:
        """The seconds of a day that match, in order."""
        return (3600 * hour + 60 * minute + second for hour, minute, second in product(*self.clock))


@lru_cache(maxsize=2048)  # more than the months of one step, since a bisection repeats it
def _days(pattern: Pattern, year: int, month: int) -> list[int]:
    """The matching days of a month, in order."""
    first, length = monthrange(year, month)
    in_month, in_year = range(1, length + 1), range(1, 366 + isleap(year))
    before = date(year, month, 1).toordinal() - date(year, 1, 1).toordinal()
    found, named = nth(in_month, pattern.month_days or in_month), set[int]()
    for weekday, number in pattern.weekdays:
        span, start = (in_year, before) if number and pattern.of_year else (in_month, 0)
        days = span[(weekday - first + start) % 7 :: 7]
        named |= {day - start for day in (nth(days, [number]) if number else days)}
    if pattern.weekdays:
        found = found | named if pattern.either else found & named
    if pattern.year_days:
        found = {
            day for day in found if not pattern.year_days.isdisjoint((before + day, before + day - len(in_year) - 1))
        }
    if pattern.weeks:
        found = {day for day in found if not pattern.weeks.isdisjoint(_weeks(date(year, month, day)))}
    return sorted(found)


def _weeks(day: date) -> tuple[int, int]:
    """The number of a day's week by ISO 8601, from the beginning and from the end of its year."""
    year, week, _ = day.isocalendar()
    return week, week - date(year, 12, 28).isocalendar().week - 1


def nth(found: Sequence[T], numbers: Iterable[int]) -> set[T]:
    """The members with these numbers: 1 is the first, -1 the last. Numbers beyond either end name none."""
    return {found[number - (number > 0)] for number in numbers if abs(number) <= len(found)}
