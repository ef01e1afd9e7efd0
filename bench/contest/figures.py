"""What the workers wrote down, turned into figures; and figures of several rounds, turned into ratios. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bide.cli.bench.plan import rounded
from bide.cli.bench.workers import NANOSECONDS

Figures = Mapping[str, float | None]
"""Of one run; None: this contestant has no such thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What happened to tasks 1 ... count. Lateness in milliseconds."""

    missing: frozenset[int]
    """Never started."""
    undone: frozenset[int]
    """Never ended, whether started or not."""
    duplicated: int
    """Started again after they had ended."""
    redelivered: int
    """Started again after a start that had not ended: only a crash may cause it."""
    early: int
    """Started before they were due."""
    lateness: Sequence[float]
    """Of the first start of each task, sorted."""
    latest: float
    """The greatest lateness of any start, so also of those that were repeated."""
    first: int
    """When the first start was, in nanoseconds since the epoch; 0: there was none."""
    last: int
    """When the last first start was, in nanoseconds since the epoch; 0: there was none."""


def examine(count: int, lines: Iterable[str], *, sleeping: bool = False) -> Findings:
    """Look at the lines of all workers' logs. With `sleeping`, a task has ended when it says so, else at its start.

    >>> found = examine(2, ["start 0000001 1000 1000500000"])
    >>> sorted(found.missing), found.lateness
    ([2], [0.5])
    """
    events = sorted((int(line.split()[3]), line.split()) for line in lines)
    first: dict[int, int] = {}
    ended: set[int] = set()
    duplicated = redelivered = early = 0
    latest = 0.0
    lateness: list[float] = []
    for at, (kind, name, due, _) in events:
        number = int(name)
        if kind == "end":
            ended.add(number)
            continue
        latest = max(latest, at / NANOSECONDS - int(due))
        if number in ended:
            duplicated += 1
        elif number in first:
            redelivered += 1
        else:
            first[number] = at
            lateness.append(at / NANOSECONDS - int(due))
            early += at < int(due) * NANOSECONDS
        if not sleeping:
            ended.add(number)
    return Findings(
        missing=frozenset(range(1, count + 1)) - first.keys(),
        undone=frozenset(range(1, count + 1)) - ended,
        duplicated=duplicated,
        redelivered=redelivered,
        early=early,
        latest=latest,
        lateness=sorted(lateness),
        first=min(first.values(), default=0),
        last=max(first.values(), default=0),
    )


def middle(rounds: Sequence[Figures], name: str) -> float | None:
    """The median of a figure over all rounds that have it.

    >>> middle([{"p50_ms": 3.0}, {"p50_ms": None}, {"p50_ms": 1.0}], "p50_ms")
    2.0
    """
    values = [value for figures in rounds if (value := figures.get(name)) is not None]
    return rounded(median(values)) if values else None


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], name: str) -> float | None:
    """bide / peer: the median over the rounds, each divided by its neighbour in time, which met the same machine.

    None where either has no such figure.

    >>> ratio([{"rate": 300.0}, {"rate": 50.0}], [{"rate": 100.0}, {"rate": 10.0}], "rate")
    4.0
    """
    ratios = [
        mine / yours
        for one, other in zip(ours, theirs, strict=True)
        if (mine := one.get(name)) is not None and (yours := other.get(name))
    ]
    return rounded(median(ratios)) if ratios else None
