"""What a cell's journals mean: which firings had to be, which there were, and which should not have been.

Each key has *versions*: from every call on that was answered as done, another time is in force, or none. A firing
belongs to the version in force at its time; while a call is under way, to the one before or after it, whichever it
fits. A call that was never answered may have been done or not, so that nothing is held against a strategy for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bide_lab.figures import SHARES, Figures
from bide_lab.journal import Call, Firing

_NANOSECONDS = 1_000_000
"""In a millisecond."""


@dataclass(slots=True)
class Version:
    """What was in force from a call on."""

    called: int
    answered: int | None
    """None: nobody knows whether it came to be."""
    due: int | None
    """Nanoseconds; None: it shall not happen."""
    begun: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Counts, and lateness in milliseconds, sorted."""

    scheduled: int
    expected: int
    fired: int
    lost: Sequence[str]
    """Their keys."""
    duplicated: int
    early: int
    revived: int
    late: Sequence[float]
    first: int
    """Nanoseconds of the first firing; 0 without one."""
    last: int

    def figures(self) -> Figures:
        return Figures(
            scheduled=self.scheduled, expected=self.expected, fired=self.fired, lost=len(self.lost),
            duplicated=self.duplicated, early=self.early, revived=self.revived,
            late=[round(percentile(self.late, share), 3) for share in SHARES] if self.late else (),
        )  # fmt: skip


def judge(calls: Iterable[Call], firings: Iterable[Firing], *, until: int) -> Verdict:
    """`until`, in nanoseconds: what is due later need not have fired. `calls` in the order in which they began."""
    versions: dict[str, list[Version]] = defaultdict(list)
    for call in calls:
        if version := _version(call):
            versions[call.key].append(version)
    duplicated = early = revived = first = last = 0
    late: list[float] = []
    under_way: dict[tuple[str, int], Version] = {}
    for firing in sorted(firings, key=lambda one: one.at):
        key = firing.key, firing.process
        version = _in_force(versions.get(firing.key, ()), firing.at) if firing.begun else under_way.pop(key)
        if version is None or version.due is None:
            revived += 1
            version = Version(firing.at, firing.at, None)
        elif firing.begun:
            early += firing.at < version.due
            version.begun += 1
            if version.begun == 1:
                late.append((firing.at - version.due) / _NANOSECONDS)
        if firing.done:
            version.done += 1
            duplicated += version.done > 1
            if version.done == 1:
                first, last = first or firing.at, firing.at
        else:
            under_way[key] = version
    expected = [(key, at_last) for key, ones in versions.items() if (at_last := _must_fire(ones, until)) is not None]
    return Verdict(
        scheduled=sum(1 for ones in versions.values() if ones[0].answered is not None),
        expected=len(expected), fired=sum(1 for _, version in expected if version.done),
        lost=[key for key, version in expected if not version.done],
        duplicated=duplicated, early=early, revived=revived, late=sorted(late), first=first, last=last,
    )  # fmt: skip


def _version(call: Call) -> Version | None:
    """None: the answer says that nothing was done."""
    if call.answered is not None and not call.done:
        return None
    if call.verb == "cancel":
        due = None
    elif call.verb == "fire_now":
        due = call.begun
    else:
        due = (call.due or 0) * _NANOSECONDS
    return Version(call.begun, call.answered, due)


def _in_force(versions: Sequence[Version], at: int) -> Version | None:
    """The version that a firing at this time belongs to; None if there was none yet."""
    chosen: Version | None = None
    for version in versions:
        if version.called > at:
            break
        settled = version.answered is not None and version.answered <= at
        # while its call is under way the one before it may count as well: the one that the firing fits
        if settled or chosen is None or chosen.done or chosen.due is None or at < chosen.due:
            chosen = version
    return chosen


def _must_fire(versions: Sequence[Version], until: int) -> Version | None:
    """The version whose firing is owed; None if none is, or if nobody can know."""
    at_last = versions[-1] if versions else None
    if at_last is None or at_last.answered is None or at_last.due is None or at_last.due > until:
        return None
    return at_last


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted values: one that was really measured.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.0)
    (2.0, 1.0)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
