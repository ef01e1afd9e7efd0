"""The outcome as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NONE = "-"
_SERVERS = {"redis": "Redis", "postgres": "PostgreSQL"}
_TITLES = {
    "schedule": "schedule: tasks due in an hour",
    "burst": "burst: tasks due at one instant",
    "lateness": "lateness: start less due time",
    "crash": "crash: one of two workers killed",
}


def show(about: Mapping[str, Any], measured: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """One table for each workload, and who was not measured."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    servers = ", ".join(f"{_SERVERS[kind]} {version}" for kind, version in about["servers"].items())
    parts = [
        f"{versions}\n{servers}, bide on {about['store']} beside peers on Redis, Python {about['python']}, "
        f"{about['loop']}, {about['cpus']} CPUs, N = {about['n']:,}, rounds: {about['rounds']}"
    ]
    for workload, by_name in measured.items():
        present = {name: outcome for name, outcome in by_name.items() if "not_measured" not in outcome}
        absent = {name: outcome["not_measured"] for name, outcome in by_name.items() if "not_measured" in outcome}
        lines = [_TITLES.get(workload, workload)]
        if present:
            lines += _crash(present) if workload == "crash" else _beside(present)
        lines += [f"{name}: not measured: {reason}" for name, reason in absent.items()]
        lines += [
            f"bide beside {name}: not measured: {outcome['bide_not_measured']}"
            for name, outcome in present.items()
            if "bide_not_measured" in outcome
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _beside(present: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [("peer", "figure", "peer", "bide", "bide / peer", "")]
    for name, outcome in present.items():
        wrong = [
            f"{who} {what} {number(outcome[who][what])}"
            for who in ("peer", "bide")
            for what in ("missing", "duplicated", "early")
            if outcome[who].get(what)
        ]
        for figure, ratio in outcome["ratio"].items():
            values = [number(outcome[who].get(figure)) for who in ("peer", "bide")]
            rows.append((name, figure, *values, number(ratio), ", ".join(wrong)))
            wrong = []
    return table(rows)


def _crash(present: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = list(next(iter(present.values()))["peer"])
    rows = [("", *names)]
    for name, outcome in present.items():
        rows.append((name, *(number(outcome["peer"].get(figure)) for figure in names)))
    beside = [outcome["bide"] for outcome in present.values() if "bide_not_measured" not in outcome]
    worst = [max((run[figure] or 0 for run in beside), default=None) for figure in names]
    rows.append((f"bide, worst of {len(beside)}", *map(number, worst)))
    return table(rows)


def number(value: float | None) -> str:
    """Four digits that count.

    >>> number(48120.0), number(3.14159), number(None), number(0.0)
    ('48,120', '3.142', '-', '0')
    """
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be; the first row is the heading, the first column is flush left.

    >>> table([("peer", "rate"), ("arq", "7")])
    ['peer  rate', 'arq      7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
