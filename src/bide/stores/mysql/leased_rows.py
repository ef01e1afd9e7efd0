"""Where the tasks lie that this process has leased, so that to settle them they need not be looked up by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bide.core.records import Record, Settlement, Token, Topic

_MOST = 10_000
"""Leases that are remembered for certain; what is settled later than that is looked up."""

Row = tuple[int, Token, bool]
"""The number of a row, the token of its lease, and whether the task has a group."""


class LeasedRows:
    """By name. Two generations, so that what is never settled here is forgotten without looking for the oldest."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._new: dict[tuple[Topic, str], Row] = {}
        self._old: dict[tuple[Topic, str], Row] = {}

    def leased(self, rows: Iterable[int], tasks: Iterable[Record]) -> None:
        if len(self._new) >= _MOST:
            self._old, self._new = self._new, {}
        new = self._new
        for row, task in zip(rows, tasks, strict=True):
            new[task.topic, task.key] = (row, task.token, task.group is not None)

    def of(self, outcomes: Sequence[Settlement]) -> list[Row] | None:
        """The row of each, sorted, or None if one of them was not leased here by this token. They are forgotten."""
        found = []
        new, old = self._new, self._old
        complete = True
        for one in outcomes:
            name = (one.topic, one.key)
            row = new.pop(name, None) or old.pop(name, None)
            if row is None or row[1] != one.token:
                complete = False
            else:
                found.append(row)
        return sorted(found) if complete else None
