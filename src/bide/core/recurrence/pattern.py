"""The months, days and times of day that a rule of wall-clock times names, and the search for the first of them.

Each part is a bit mask, also the days of a month once it is looked at, so that a search takes a few shifts for each
month that can match.
"""

from __future__ import annotations

from calendar import isleap, monthrange
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import lru_cache, partial
from typing import TypeVar

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.recurrence.zones import DAY, Times

T = TypeVar("T")
EPOCH_DAY = date(1970, 1, 1).toordinal()
MOST_LOOKS = 5_000
"""The months and the periods of an interval that one step looks at. Each date and weekday comes again in 40 years."""


class Pattern(Struct, frozen=True, cache_hash=True, kw_only=True):
    """The parts of local times. An empty set leaves no day out; numbers below zero count from the end."""

    seconds: int
    """A bit for each value that matches, as in the three fields below."""
    minutes: int
    hours: int
    months: int
    month_days: frozenset[int] = frozenset()
    weekdays: frozenset[tuple[int, int]] = frozenset()
    """Monday is 0. The second is the number within the month, or the year; 0: all of them."""
    year_days: frozenset[int] = frozenset()
    weeks: frozenset[int] = frozenset()
    of_year: bool = False
    """Weekdays are numbered within the year."""
    either: bool = False
    """Day of month or day of week must match, not both."""
    fixed: bool = True
    """The rule names times of day rather than an interval."""

    def search(self) -> Times:
        """The stream of matching times for one step."""
        return partial(self.first, iter(range(MOST_LOOKS)))

    def first(self, looks: Iterator[int], local: Millis) -> Millis | None:
        """The first time that is not before `local`; None: there is none, or no look at a later month is left."""
        day, rest = divmod(local, DAY)
        try:
            when = date.fromordinal(day + EPOCH_DAY)
        except (ValueError, OverflowError):
            return None
        year, month, clock = when.year, when.month, self._clock(-(-rest // 1000))
        left = -1 << when.day + (clock < 0)
        while not (self.months >> month & 1 and (days := left & _days(self, year, month))):
            year, month, left = (year + 1, 1, -1) if month == 12 else (year, month + 1, -1)
            if year > 9999 or next(looks, None) is None:
                return None
        found = date(year, month, _lowest(days)).toordinal() - EPOCH_DAY
        return found * DAY + (clock if found == day else self._clock(0)) * 1000

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
def _days(pattern: Pattern, year: int, month: int) -> int:
    """The matching days of a month, as bits 1 to 31."""
    first, length = monthrange(year, month)
    in_month, in_year = range(1, length + 1), range(1, 366 + isleap(year))
    before = date(year, month, 1).toordinal() - date(year, 1, 1).toordinal()
    by_day = mask(nth(in_month, pattern.month_days)) if pattern.month_days else -1
    by_weekday = 0 if pattern.weekdays else -1
    for weekday, number in pattern.weekdays:
        days = in_month[(weekday - first) % 7 :: 7]
        if number and pattern.of_year:
            by_weekday |= mask(nth(in_year[(weekday - first + before) % 7 :: 7], [number])) >> before
        else:
            by_weekday |= mask(nth(days, [number]) if number else days)
    found = by_day | by_weekday if pattern.either else by_day & by_weekday
    if pattern.year_days:
        found &= mask(nth(in_year, pattern.year_days)) >> before
    if pattern.weeks:
        mondays = range(1 - first, length + 1, 7)
        found &= sum(
            127 << monday + 7 >> 7 for monday in mondays if _is_in(pattern.weeks, date(year, month, max(monday, 1)))
        )
    return found & mask(in_month)


def _is_in(weeks: frozenset[int], day: date) -> bool:
    """True if the week of a day, by ISO 8601, has one of these numbers from the beginning or the end of its year."""
    year, week, _ = day.isocalendar()
    return not weeks.isdisjoint((week, week - date(year, 12, 28).isocalendar().week - 1))


def nth(found: Sequence[T], numbers: Iterable[int]) -> set[T]:
    """The members with these numbers: 1 is the first, -1 the last. Numbers beyond either end name none."""
    return {found[number - (number > 0)] for number in numbers if abs(number) <= len(found)}


def mask(values: Iterable[int]) -> int:
    """A bit for each value."""
    return sum([1 << value for value in set(values)])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
