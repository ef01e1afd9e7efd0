"""The values of a column of times, and how they compare with the server's clock within a statement."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, ClassVar

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.table_source import DueIs, TableSource
from bide.stores.sql.table import Give
from bide.stores.wall_clock import Stretch, instant_of, stretch

_EPOCH = as_datetime(0)
_MILLISECOND = timedelta(milliseconds=1)
_BEHIND: Millis = 10
"""The offset of a zone is that of so long ago: what is known here of the server's clock may be ahead of it."""


class TableTimes(ABC):
    """The due column of one source, of the type `kind`. Raises SetupError for one that cannot hold these times."""

    zoned: ClassVar[str]
    """The server's type of moments, and that of wall times."""
    naive: ClassVar[str]
    whole: ClassVar[Collection[str]]
    """Its types of whole numbers, and of others that tell milliseconds apart."""
    fractions: ClassVar[Collection[str]]
    coarse: ClassVar[str]
    """Its type of numbers that does not, and which to take instead."""
    finer: ClassVar[str]
    called: ClassVar[str]
    """Its word for times."""

    def __init__(self, source: TableSource, kind: str) -> None:
        self._is = DueIs(source.due_is)
        self._kind = kind
        self._after = source.after_ms
        self._zone = source.zone
        what = f"{source.table}.{source.due} is of type {kind}"
        if self._is is DueIs.TIMESTAMP:
            if kind not in (self.zoned, self.naive):
                raise SetupError(f'{what}; for numbers give due_is="seconds" or "milliseconds"')
            if kind == self.zoned:
                self._zone = UTC
        elif kind == self.coarse:
            raise SetupError(f"{what}, which holds such times to two minutes only: make it {self.finer}")
        elif kind not in self.whole and kind not in self.fractions:
            raise SetupError(f"{what}, which holds no {self._is}; leave out due_is= for {self.called}")

    def cutoff(self, now: str, about: Millis, give: Give) -> str:
        """The latest time of the column that is due at `now`, an expression; `about` is what we take that to be."""
        if self._after:  # the column stays as it is, so that an index on it serves
            now, about = f"({now} - {self._length(self._after)})", about - self._after
        return self.shown_at(now, about, give)

    def shown_at(self, now: str, about: Millis, give: Give) -> str:
        """`now` as the column has it."""
        if self._is is not DueIs.TIMESTAMP:
            return self._number(now, "" if self._is is DueIs.SECONDS else " * 1000", whole=self._kind in self.whole)
        if self._kind == self.zoned:
            return now
        return self._in_zone(now, stretch(max(about - _BEHIND, 0), self._zone), give)

    def instant_of(self, value: Any) -> Millis:
        """When a row with this value is due, rounded up. Raises ValueError for a date such as 0000-00-00."""
        if isinstance(value, datetime):
            millis = instant_of(value, self._zone) if value.tzinfo is None else -((_EPOCH - value) // _MILLISECOND)
        elif self._is is DueIs.TIMESTAMP:
            raise ValueError(f"no date: {value!r}")
        elif not math.isfinite(value):  # NaN is behind all others, as the server has it
            millis = 0 if float(value) < 0 else LAST_INSTANT
        else:
            millis = math.ceil(Fraction(value) * (1000 if self._is is DueIs.SECONDS else 1))
        return max(0, min(millis + self._after, LAST_INSTANT))

    # --- the server's part

    @abstractmethod
    def _length(self, millis: Millis) -> str:
        """A length of time within a statement."""

    @abstractmethod
    def _number(self, now: str, factor: str, *, whole: bool) -> str:
        """`now` in seconds times a factor, rounded down if the column has whole numbers."""

    @abstractmethod
    def _in_zone(self, now: str, held: Stretch, give: Give) -> str:
        """`now` as the clocks of the source's zone show it."""
