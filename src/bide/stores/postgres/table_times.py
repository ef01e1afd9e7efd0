"""What a column of times holds in PostgreSQL, and how it compares with the server's clock within a statement."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.table_source import DueIs, TableSource
from bide.core.wall_clock import instant_of, stretch

_EPOCH = as_datetime(0)
_MILLISECOND = timedelta(milliseconds=1)
_BEHIND: Millis = 10
"""The offset of a zone is that of so long ago: what is known here of the server's clock may be ahead of it."""
_WHOLE = frozenset({"smallint", "integer", "bigint"})
_NUMBERS = _WHOLE | {"numeric", "double precision"}

Given = Callable[[Any, str], str]
"""Takes a value and its type, and says what stands for it in the statement."""


class TableTimes:
    """The due column of one source, of the type `kind`. Raises SetupError for one that cannot hold these times."""

    def __init__(self, source: TableSource, kind: str) -> None:
        self._zone = source.zone
        self._is = DueIs(source.due_is)
        self._type = kind
        self._after = source.after_ms
        due = '"' + source.due.replace('"', '""') + '"'
        self.shown = due
        """The column, as the driver can read it: its years end at 9999, and begin at 1."""
        if self._is is DueIs.TIMESTAMP:
            self.shown = f"least(greatest({due}, '0001-01-03'), '9999-12-29')"
        what = f"{source.table}.{source.due} is of type {kind}"
        if self._is is DueIs.TIMESTAMP:
            self._zoned = kind == "timestamp with time zone"
            if not self._zoned and kind != "timestamp without time zone":
                raise SetupError(f'{what}; for numbers give due_is="seconds" or "milliseconds"')
        elif kind == "real":
            raise SetupError(f"{what}, which holds such times to two minutes only: make it double precision or bigint")
        elif kind not in _NUMBERS:
            raise SetupError(f"{what}, which holds no {self._is}; leave out due_is= for timestamps")

    def cutoff(self, now: str, about: Millis, given: Given) -> str:
        """The latest time of the column that is due at `now`, an expression; `about` is what we take that to be."""
        if self._after:  # the column stays as it is, so that an index on it serves
            now, about = f"({now} - interval '{self._after} milliseconds')", about - self._after
        return self.shown_at(now, about, given)

    def shown_at(self, now: str, about: Millis, given: Given) -> str:
        """`now` as the column has it."""
        if self._is is not DueIs.TIMESTAMP:
            factor = "" if self._is is DueIs.SECONDS else " * 1000"
            passed = f"extract(epoch FROM {now}){factor}"
            return f"floor({passed})::{self._type}" if self._type in _WHOLE else f"({passed})::{self._type}"
        if self._zoned:
            return now
        held = stretch(max(about - _BEHIND, 0), self._zone)
        until = given(as_datetime(held.until), "timestamptz")
        offset, least = given(held.offset, "interval"), given(held.least, "timestamp")
        return f"least((least({now}, {until}) AT TIME ZONE 'UTC') + {offset}, {least})"

    def instant_of(self, value: Any) -> Millis:
        """When a row with this value is due, rounded up."""
        if isinstance(value, datetime) and value.tzinfo is None:
            millis = instant_of(value, self._zone)
        elif isinstance(value, datetime):
            millis = -((_EPOCH - value) // _MILLISECOND)
        elif not math.isfinite(value):  # NaN is behind all others, as the server has it
            millis = 0 if float(value) < 0 else LAST_INSTANT
        else:
            millis = math.ceil(Fraction(value) * (1000 if self._is is DueIs.SECONDS else 1))
        return max(0, min(millis + self._after, LAST_INSTANT))
