"""The journals of a cell, which its processes write and the judge reads: calls, and effects.

Each line is written at once by an append of its own, so that it survives the end of its process by any signal: a
system call, of half a microsecond.

    > 17 schedule k1 1763800000000 1763799998000000000      a call was begun: number, verb, key, due, at
    < 17 ok 1763799998001000000                             and answered: ok, late (too late) or failed
    ! k1 1763800000000 1763800000002000000                  an effect is done: key, due, and when it began

Times of `at` are nanoseconds, `due` milliseconds; `-` stands for no due time. An effect whose process dies before it is
done has not been.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bide_bench.worker import percentile
from bide_lab.figures import SHARES, Figures

_MS = 1_000_000
"""Nanoseconds."""


class Call(NamedTuple):
    """One verb of one key, as its caller saw it."""

    verb: str
    key: str
    due: int | None
    begun: int
    answered: int | None
    """None: it never was, or with an error."""
    done: bool
    """True if the answer says that it was done."""

    @property
    def sets(self) -> int | None:
        """The time in force from it on, in nanoseconds; None: it shall not happen."""
        return None if self.verb == "cancel" else self.begun if self.verb == "fire_now" else (self.due or 0) * _MS


class Firing(NamedTuple):
    """One effect that was done."""

    key: str
    due: int
    at: int
    """When it began."""


class Journal:
    """One process's file. Any thread may write: what is appended in one call stays together."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._number = 0

    def begun(self, verb: str, keys: Iterable[tuple[str, int | None]]) -> list[int]:
        """A call for several keys is begun; the numbers to answer by."""
        at, first = time.time_ns(), self._number + 1
        lines = [f"> {number} {verb} {key} {'-' if due is None else due} {at}\n"
                 for number, (key, due) in enumerate(keys, start=first)]  # fmt: skip
        self._number += len(lines)
        os.write(self._file, "".join(lines).encode())
        return list(range(first, self._number + 1))

    def answered(self, numbers: Iterable[int], word: str) -> None:
        at = time.time_ns()
        os.write(self._file, "".join(f"< {number} {word} {at}\n" for number in numbers).encode())

    def effect(self, key: str, due: int, at: int) -> None:
        os.write(self._file, b"! %b %d %d\n" % (key.encode(), due, at))

    def close(self) -> None:
        os.close(self._file)


def whole_lines(path: Path, *, since: int = 0) -> bytes:
    """The journal from the byte `since` on, up to its last line that is whole."""
    with path.open("rb") as file:
        file.seek(since)
        new = file.read()
    return new[: new.rfind(b"\n") + 1]


def read(paths: Iterable[Path]) -> tuple[list[Call], list[Firing]]:
    """All calls by their beginning and all firings by their time. A line that was cut off is passed over."""
    calls: list[Call] = []
    firings: list[Firing] = []
    for path in paths:
        begun: dict[str, Call] = {}
        for line in whole_lines(path).decode().splitlines():
            kind, *words = line.split()
            if kind == "!":
                firings.append(Firing(words[0], int(words[1]), int(words[2])))
            elif kind == ">":
                due = None if words[3] == "-" else int(words[3])
                begun[words[0]] = Call(words[1], words[2], due, int(words[4]), None, False)
            elif words[1] != "failed":
                begun[words[0]] = begun[words[0]]._replace(answered=int(words[2]), done=words[1] == "ok")
        calls += begun.values()
    return sorted(calls, key=lambda call: call.begun), sorted(firings, key=lambda firing: firing.at)


def judge(calls: Iterable[Call], firings: Iterable[Firing], *, until: int) -> Figures:
    """The firings that had to be, those that there were, and those that should not have been.

    `until`, in nanoseconds: what is due later need not have fired. `calls` in the order in which they began. A call
    that was never answered may have been done or not, so that nothing is held against a strategy for it.
    """
    by_key: dict[str, list[Call]] = defaultdict(list)
    for one in calls:
        if one.answered is None or one.done:  # else nothing was done, as the answer says
            by_key[one.key].append(one)
    fired: Counter[Call] = Counter()
    early = revived = 0
    late: list[float] = []
    for firing in sorted(firings, key=lambda one: one.at):
        call = _in_force(by_key.get(firing.key, ()), firing.at, fired)
        if call is None or call.sets is None:
            revived += 1
            continue
        early += firing.at < call.sets
        if call not in fired:
            late.append((firing.at - call.sets) / _MS)
        fired[call] += 1
    owed = [
        one for *_, one in by_key.values() if one.answered is not None and one.sets is not None and one.sets <= until
    ]
    done = sum(one in fired for one in owed)
    return Figures(
        scheduled=sum(1 for ones in by_key.values() if ones[0].answered is not None),
        expected=len(owed), fired=done, lost=len(owed) - done,
        duplicated=fired.total() - len(fired), early=early, revived=revived, late=curve(late),
    )  # fmt: skip


def _in_force(calls: Sequence[Call], at: int, fired: Container[Call]) -> Call | None:
    """The call whose time a firing belongs to; None if there was none yet.

    While a call is under way the one before it may count as well: the one that the firing fits.
    """
    chosen: Call | None = None
    for one in calls:
        if one.begun > at:
            break
        settled = one.answered is not None and one.answered <= at
        if settled or chosen is None or chosen in fired or chosen.sets is None or at < chosen.sets:
            chosen = one
    return chosen


def curve(late: Sequence[float]) -> Sequence[float]:
    """The lateness at each of `SHARES`, to the microsecond."""
    ordered = sorted(late)
    return [round(percentile(ordered, share), 3) for share in SHARES] if ordered else ()
