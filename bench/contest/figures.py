"""Turns what the workers wrote down into figures, and figures of several rounds into ratios. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from bide.cli.bench import workers
from bide.cli.bench.plan import rounded
from bide.cli.bench.worker import Settled, Start
from bide.cli.bench.workers import NANOSECONDS, Findings

Figures = Mapping[str, float | None]
"""Of one run; None: this contestant has no such thing."""


class Seen(NamedTuple):
    """The fate of tasks 1 ... count."""

    missing: frozenset[int]
    """Never started."""
    undone: frozenset[int]
    """Never ended, whether started or not."""
    found: Findings


def examine(count: int, lines: Iterable[str], *, sleeping: bool = False) -> Seen:
    """Look at the lines of all workers' logs. With `sleeping`, a task has ended when it says so, else at its start.

    >>> seen = examine(2, ["start 0000001 1000 1000500000"])
    >>> sorted(seen.missing), seen.found.lateness
    ([2], [0.5])
    """
    starts, ends = list[Start](), list[Settled]()
    for kind, number, due, at in map(str.split, lines):
        if kind == "start":
            starts.append(Start(number, int(due), int(at)))
        if kind == "end" or not sleeping:
            ends.append(Settled(number, int(at)))
    expected = {start.key: start.planned_at * NANOSECONDS for start in starts}
    everything = frozenset(range(1, count + 1))
    return Seen(
        missing=everything - {int(start.key) for start in starts},
        undone=everything - {int(end.key) for end in ends},
        found=workers.examine(expected, [*starts, *ends]),
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
