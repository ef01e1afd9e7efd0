"""Where the tasks lie that this process has leased, so that to settle them they need not be looked up by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from bide.core.instants import Millis
from bide.core.records import Record, Settlement, Token, Topic
from bide.stores.mysql.filing import File, FileName

_MOST = 10_000
"""Leases that are remembered for certain; what is settled later than that is looked up."""

Row = tuple[int, Token, bool, File]
"""The number of a row, the token of its lease, whether the task has a group, and where the lease is on file."""
_number, _file = itemgetter(0), itemgetter(3)


class Settling(NamedTuple):
    """What is known of the tasks of a batch that is to be settled, which are forgotten by that."""

    rows: list[Row]
    """Of each that was leased here by the token it is to be settled with, sorted."""
    complete: bool
    """Whether that is all of them."""
    files: Mapping[File, int]
    """How many there are of each file."""
    emptied: list[FileName]
    """The files of which nothing is left then."""

    def settled(self) -> None:
        """The leases are over: each is settled, or was not held any more. If that is not known, the files stay."""
        for file, count in self.files.items():
            file.left -= count


class LeasedRows:
    """By name. Two generations, so that what is never settled here is forgotten without looking for the oldest."""

    __slots__ = ("_new", "_old", "_over")

    def __init__(self) -> None:
        self._over: list[FileName] = []
        self._new: dict[tuple[Topic, str], Row] = {}
        self._old: dict[tuple[Topic, str], Row] = {}

    def leased(self, rows: Iterable[int], tasks: Iterable[Record], files: Iterable[File]) -> None:
        if len(self._new) >= _MOST:
            self._old, self._new = self._new, {}
        new = self._new
        for row, task, file in zip(rows, tasks, files, strict=True):
            new[task.topic, task.key] = (row, task.token, task.group is not None, file)

    def of(self, outcomes: Sequence[Settlement]) -> Settling:
        """What is known of these."""
        found: list[Row] = []
        new, old = self._new, self._old
        for one in outcomes:
            name = (one.topic, one.key)
            for rows in (new, old):
                row = rows.get(name)
                if row is not None and row[1] == one.token:
                    found.append(row)
                    del rows[name]
                    break
        found.sort(key=_number)
        files = Counter(map(_file, found))
        emptied = [file.name for file, count in files.items() if count == file.left]
        return Settling(found, len(found) == len(outcomes), files, emptied)

    def settled(self, known: Iterable[Settling]) -> None:
        """These were committed, with their files left as they are."""
        for one in known:
            one.settled()
            self._over += [file.name for file in one.files if file.left == 0]

    def over(self, since: Millis) -> list[FileName]:
        """Files of which nothing is left, and at which nobody has looked before `since`. They are forgotten."""
        over, self._over = self._over, []
        return [name for name in over if name.until > since]
