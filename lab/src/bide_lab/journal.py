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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bide.cli.bench.worker import percentile
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


@dataclass(slots=True)
class Version:
    """The time in force for a key from a call on, or that there is none.

    A firing belongs to the version in force at its time; while a call is under way, to the one before or after it,
    whichever it fits. A call that was never answered may have been done or not, so that nothing is held against a
    strategy for it.
    """

    called: int
    answered: int | None
    """None: nobody knows whether it came to be."""
    due: int | None
    """Nanoseconds; None: it shall not happen."""
    fired: int = 0


def judge(calls: Iterable[Call], firings: Iterable[Firing], *, until: int) -> Figures:
    """The firings that had to be, those that there were, and those that should not have been.

    `until`, in nanoseconds: what is due later need not have fired. `calls` in the order in which they began.
    """
    versions: dict[str, list[Version]] = defaultdict(list)
    for call in calls:
        if call.answered is None or call.done:  # else nothing was done, as the answer says
            due = None if call.verb == "cancel" else call.begun if call.verb == "fire_now" else (call.due or 0) * _MS
            versions[call.key].append(Version(call.begun, call.answered, due))
    duplicated = early = revived = 0
    late: list[float] = []
    for firing in sorted(firings, key=lambda one: one.at):
        version = _in_force(versions.get(firing.key, ()), firing.at)
        if version is None or version.due is None:
            revived += 1
            continue
        early += firing.at < version.due
        if not version.fired:
            late.append((firing.at - version.due) / _MS)
        version.fired += 1
        duplicated += version.fired > 1
    owed = [ones[-1] for ones in versions.values() if _must_fire(ones[-1], until)]
    fired = sum(1 for version in owed if version.fired)
    return Figures(
        scheduled=sum(1 for ones in versions.values() if ones[0].answered is not None),
        expected=len(owed), fired=fired, lost=len(owed) - fired,
        duplicated=duplicated, early=early, revived=revived, late=curve(late),
    )  # fmt: skip


def _in_force(versions: Sequence[Version], at: int) -> Version | None:
    """The version that a firing at this time belongs to; None if there was none yet."""
    chosen: Version | None = None
    for version in versions:
        if version.called > at:
            break
        settled = version.answered is not None and version.answered <= at
        # while its call is under way the one before it may count as well: the one that the firing fits
        if settled or chosen is None or chosen.fired or chosen.due is None or at < chosen.due:
            chosen = version
    return chosen


def _must_fire(last: Version, until: int) -> bool:
    """True if a firing of a key's last version is owed; of one that nobody knows of, none is."""
    return last.answered is not None and last.due is not None and last.due <= until


def curve(late: Sequence[float]) -> Sequence[float]:
    """The lateness at each of `SHARES`, to the microsecond."""
    ordered = sorted(late)
    return [round(percentile(ordered, share), 3) for share in SHARES] if ordered else ()
