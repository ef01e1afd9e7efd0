"""The outcome as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from bench.command import show_table

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
            f"{who} {what} {number(outcome[who][what])}"
            for who in ("peer", "bide")
            for what in ("missing", "duplicated", "early")
            if outcome[who].get(what)
        ]
        for figure, ratio in outcome["ratio"].items():
            values = [number(outcome[who].get(figure)) for who in ("peer", "bide")]
            yield name, figure, *values, number(ratio), ", ".join(wrong)
            wrong = []


def _crash(present: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    names = list(next(iter(present.values()))["peer"])
    yield "", *names
    for name, outcome in present.items():
        yield name, *(number(outcome["peer"].get(figure)) for figure in names)
    beside = [outcome["bide"] for outcome in present.values()]
    worst = [max((run[figure] or 0 for run in beside), default=None) for figure in names]
    yield f"bide, worst of {len(beside)}", *map(number, worst)


def number(value: float | None) -> str:
    """Four digits that count.

    >>> number(48120.0), number(3.14159), number(None), number(0.0)
    ('48,120', '3.142', '-', '0')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"
