"""What a column of times holds in MySQL and MariaDB, and how it compares with the server's clock in a statement."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.table_source import DueIs, TableSource
from bide.core.wall_clock import instant_of, stretch

_BEHIND: Millis = 10
"""The offset of a zone is that of so long ago: what is known here of the server's clock may be ahead of it."""
_MICROSECOND = timedelta(microseconds=1)
_WHOLE = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_NUMBERS = _WHOLE | {"decimal", "double"}


class TableTimes:
    """The due column of one source, of the type `kind`. Raises SetupError for one that cannot hold these times."""

    def __init__(self, source: TableSource, kind: str) -> None:
        self._is = DueIs(source.due_is)
        self._kind = kind
        self._after = source.after_ms
        self._zone = source.zone
        what = f"{source.table}.{source.due} is of type {kind}"
        if self._is is DueIs.TIMESTAMP:
            if kind not in ("timestamp", "datetime"):
                raise SetupError(f'{what}; for numbers give due_is="seconds" or "milliseconds"')
            if kind == "timestamp":
                self._zone = UTC  # that type has a zone: the session's, and ours is in UTC
        elif kind == "float":
            raise SetupError(f"{what}, which holds such times to two minutes only: make it double or bigint")
        elif kind not in _NUMBERS:
            raise SetupError(f"{what}, which holds no {self._is}; leave out due_is= for datetimes")

    def cutoff(self, now: str, about: Millis) -> str:
        """The latest time of the column that is due at `now`, an expression; `about` is what we take that to be."""
        if self._after:  # the column stays as it is, so that an index on it serves
            now, about = f"({now} - INTERVAL {self._after * 1000} MICROSECOND)", about - self._after
        return self.shown_at(now, about)

    def shown_at(self, now: str, about: Millis) -> str:
        """`now` as the column has it."""
        if self._is is not DueIs.TIMESTAMP:
            passed = f"UNIX_TIMESTAMP({now}){'' if self._is is DueIs.SECONDS else ' * 1000'}"
            return f"CAST(FLOOR({passed}) AS SIGNED)" if self._kind in _WHOLE else passed
        if self._zone is UTC:
            return now
        held = stretch(max(about - _BEHIND, 0), self._zone)
        until = literal(as_datetime(held.until).replace(tzinfo=None))
        shown = f"LEAST({now}, {until}) + INTERVAL {held.offset // _MICROSECOND} MICROSECOND"
        return f"LEAST({shown}, {literal(held.least)})"

    def instant_of(self, value: Any) -> Millis:
        """When a row with this value is due, rounded up. Raises ValueError for a date such as 0000-00-00."""
        if isinstance(value, datetime):
            return min(instant_of(value, self._zone) + self._after, LAST_INSTANT)
        if self._is is DueIs.TIMESTAMP:
            raise ValueError(f"no date: {value!r}")
        millis = math.ceil(Fraction(value) * (1000 if self._is is DueIs.SECONDS else 1))
        return max(0, min(millis + self._after, LAST_INSTANT))


def literal(moment: datetime) -> str:
    """A naive time within a statement."""
    return f"TIMESTAMP'{moment.isoformat(' ', timespec='microseconds')}'"
