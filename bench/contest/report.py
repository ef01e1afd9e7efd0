"""Figures of what the workers wrote down, ratios of those of several rounds, and tables of both for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import click
from bench.command import digits, show_table

from bide_bench import workers
from bide_bench.plan import rounded
from bide_bench.worker import Settled, Start
from bide_bench.workers import NANOSECONDS, Findings

_SERVERS = {"redis": "Redis", "postgres": "PostgreSQL"}
_TITLES = {
    "schedule": "schedule: tasks due in an hour",
    "burst": "burst: tasks due at one instant",
    "lateness": "lateness: start less due time",
    "crash": "crash: one of two workers killed",
}


def show(about: Mapping[str, Any], measured: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One table for each workload, and who was not measured."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    servers = ", ".join(f"{_SERVERS[kind]} {version}" for kind, version in about["servers"].items())
    click.echo(
        f"{versions}\n{servers}, Python {about['python']}, {about['loop']}, {about['cpus']} CPUs, "
        f"N = {about['n']:,}, rounds: {about['rounds']}"
    )
    for workload, by_name in measured.items():
        present = {name: outcome for name, outcome in by_name.items() if "not_measured" not in outcome}
        head, *rows = [*(_crash(present) if workload == "crash" else _beside(present))] if present else [()]
        show_table(_TITLES[workload], head, rows, right=head[1:], for_programs=False)
        for name, outcome in by_name.items():
            if "not_measured" in outcome:
                click.echo(f"{workload}: {name}: not measured: {outcome['not_measured']}")


def _beside(present: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    yield "peer", "figure", "of the peer", "of bide", "bide / peer", ""
    for name, outcome in present.items():
        wrong = [
            f"{who} {what} {digits(outcome[who][what])}"
            for who in ("peer", "bide")
            for what in ("missing", "duplicated", "early")
            if outcome[who].get(what)
        ]
        for figure, ratio in outcome["ratio"].items():
            values = [digits(outcome[who].get(figure)) for who in ("peer", "bide")]
            yield name, figure, *values, digits(ratio), ", ".join(wrong)
            wrong = []


def _crash(present: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    names = list(next(iter(present.values()))["peer"])
    yield "", *names
    for name, outcome in present.items():
        yield name, *(digits(outcome["peer"].get(figure)) for figure in names)
    beside = [outcome["bide"] for outcome in present.values()]
    worst = [max((run[figure] or 0 for run in beside), default=None) for figure in names]
    yield f"bide, worst of {len(beside)}", *map(digits, worst)


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
