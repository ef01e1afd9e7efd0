"""What a column of times holds in SQLite, which has no type for them, and how it compares with an instant.

Numbers compare as they are. Text is compared twice: as text with a bound that is at most a second too late, which an
index serves; then exactly, by reading it. Text must sort as time does, which it does where all rows are of one form:
the separator and the offset of the form are taken from the rows that have been read.
"""

from __future__ import annotations

import logging
import math
import re
import sqlite3
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from itertools import count
from typing import Any

from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant
from bide.core.table_source import DueIs, TableSource
from bide.core.wall_clock import cutoff, instant_of

_log = logging.getLogger("bide.table")
_WARNINGS = 20
_numbers = count(1)
_SECOND = timedelta(seconds=1)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]|$)")
"""ISO 8601 has other forms too, which do not sort among these."""


class TableTimes:
    """The due column of one source. Used by several threads, each with a connection of its own."""

    def __init__(self, source: TableSource) -> None:
        self._source = source
        self._after = source.after_ms
        self._kind = DueIs(source.due_is)
        self._function = f"bide_due_{next(_numbers)}"
        self._separator = "T"
        """Sorts last of the two: a bound with it leaves nothing out before the first row has been read."""
        self._offset: timedelta | None = None
        self._unreadable: set[str] = set()
        column = '"' + source.due.replace('"', '""') + '"'
        self.millis = f"{self._function}({column})"
        if self._kind is DueIs.TIMESTAMP:
            self.come = f"{column} < :bound AND {self.millis} <= :now"
            self.ahead = f"{column} >= :bound AND {self.millis} > :now"
        else:
            self.come = f"{column} <= :now"
            self.ahead = f"{column} > :now"

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Teach a connection to read these times."""
        read = self._read if self._kind is DueIs.TIMESTAMP else self._number
        connection.create_function(self._function, 1, read, deterministic=True)

    def unprepared(self, error: sqlite3.Error) -> bool:
        return f"no such function: {self._function}" in str(error)

    def parameters(self, now: Millis, *, beyond: bool = False) -> dict[str, Any]:
        """What `come` (or, `beyond`, `ahead`) compares with."""
        now -= self._after
        if self._kind is DueIs.MILLISECONDS:
            return {"now": now}
        if self._kind is DueIs.SECONDS:
            return {"now": now / 1000}
        second = self._shown(now).replace(microsecond=0)
        if not beyond and second < datetime.max - _SECOND:  # noqa: DTZ901 - naive
            second += _SECOND
        return {"now": now, "bound": second.isoformat(self._separator)}

    def instant_of(self, value: Any) -> Millis:
        """When a row is due of which `millis` came to this."""
        if not math.isfinite(value):
            return 0 if value < 0 else LAST_INSTANT
        millis = math.ceil(Fraction(value) * 1000) if self._kind is DueIs.SECONDS else math.ceil(value)
        return max(0, min(millis + self._after, LAST_INSTANT))

    def written(self, now: Millis) -> str:
        """`now` as the column has it, for a statement."""
        if self._kind is not DueIs.TIMESTAMP:
            return str(now if self._kind is DueIs.MILLISECONDS else now // 1000)
        text = self._shown(now).isoformat(self._separator, timespec="milliseconds")
        if self._offset is not None:
            text = datetime.fromisoformat(text).replace(tzinfo=timezone(self._offset)).isoformat(
                self._separator, timespec="milliseconds"
            )  # fmt: skip
        return f"'{text}'"

    def _shown(self, now: Millis) -> datetime:
        """What a clock shows that keeps the column's time."""
        if self._offset is None:
            return cutoff(now, self._source.zone)
        return (as_datetime(now) + self._offset).replace(tzinfo=None)

    def _read(self, value: Any) -> Millis | None:
        """When that is, in milliseconds; None for what is no time."""
        if value is None:
            return None
        try:
            moment = datetime.fromisoformat(value) if _DATE.match(value) else None
        except (TypeError, ValueError):
            moment = None
        if moment is None:
            self._wonder_at(value)
            return None
        offset = moment.utcoffset()
        self._offset = offset
        if len(value) > 10:
            self._separator = value[10]
        if offset is None:
            return instant_of(moment, self._source.zone)
        try:
            return instant(moment)
        except ValueError:
            return 0 if moment.year < 1970 else LAST_INSTANT

    def _number(self, value: Any) -> float | None:
        if value is None or isinstance(value, int | float):
            return value
        self._wonder_at(value)
        return None

    def _wonder_at(self, value: Any) -> None:
        text = repr(value)[:80]
        if text not in self._unreadable and len(self._unreadable) < _WARNINGS:
            self._unreadable.add(text)
            _log.warning(
                "%s.%s: %s is no time in %s, and is never due%s", self._source.table, self._source.due, text,
                *(("ISO 8601", "; for numbers give due_is=") if self._kind is DueIs.TIMESTAMP else (self._kind, "")),
            )  # fmt: skip
