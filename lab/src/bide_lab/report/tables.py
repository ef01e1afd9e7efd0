"""The tables and lists of a report, as plain cells: the Markdown file and the page write them each in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bide_lab.figures import Figures, Result
from bide_lab.report.families import Family
from bide_lab.report.findings import NOT_WAITED_FOR, Better, Findings, Row
from bide_lab.report.measures import BY_NAME, Measure, figure

COLUMNS = tuple(
    BY_NAME[name]
    for name in (
        "late-p50", "late-p99", "completed", "idle-cpu", "idle-server-cpu", "idle-trips", "bytes", "server-bytes",
        "trips", "verb-schedule", "verb-reschedule", "verb-cancel", "verb-fire_now",
    )
)  # fmt: skip
"""What the table of a family shows."""
EMPTY = "·"


class Table(NamedTuple):
    """Cells are plain text; the first of each line names a strategy."""

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    """The columns whose values stand to the right."""


def measure_table(found: Findings, family: Family, measures: Sequence[Measure] = COLUMNS) -> Table | None:
    """A line for each strategy of the family that has any of the measures, and one of bide's; a column for each."""
    reference = found.reference(family)
    rows = [row for row in found.of(family) if any(row.value(one) is not None for one in measures)]
    beside = [reference] if rows and reference is not None and reference not in rows else []
    shown = [one for one in measures if any(row.value(one) is not None for row in rows)]
    if not shown:
        return None
    heads = ["strategy", "", *(_head(one) for one in shown)]
    lines = [
        [row.name, row.title, *(EMPTY if (one := row.value(measure)) is None else figure(one) for measure in shown)]
        for row in [*rows, *beside]
    ]
    return Table(heads, lines, frozenset(range(2, len(heads))))


def _head(measure: Measure) -> str:
    unit = measure.unit if measure.unit not in measure.head and measure.unit != "B" else ""
    return f"{measure.head}, {unit}" if unit else measure.head


def counted_table(rows: Iterable[Row]) -> Table | None:
    """What strategies and workloads counted besides: hops, visits, bytes; None if nothing was."""
    lines = [
        [row.name, name, besides]
        for row in rows for name, one in row.measured.items() if one.figures and (besides := _besides(one.figures))
    ]  # fmt: skip
    return Table(["strategy", "workload", "counted besides"], lines) if lines else None


def flaw_table(rows: Iterable[Row]) -> Table:
    """What each strategy is known for, and what was seen of it."""
    lines = [[row.name, one.text, one.workload, one.seen or one.why_not] for row in rows for one in row.flaws]
    return Table(["strategy", "known for", "workload", "seen here"], lines)


def ahead_table(better: Iterable[Better]) -> Table:
    """A line for each measure: bide's best row, and whoever is ahead of that."""
    lines = [
        [one.measure.title, f"{one.measure.words(one.value)} ({one.bide})",
         ", ".join(f"{name} {one.measure.words(value)}" for name, value in one.ahead)]
        for one in better
    ]  # fmt: skip
    return Table(["measure", "best of bide", "ahead of it"], lines)


class Missing(NamedTuple):
    """Verbs that some strategies have not, all for one reason."""

    verbs: Sequence[str]
    why: str
    names: Sequence[str]


def missing_verbs(rows: Iterable[Row]) -> list[Missing]:
    """Every verb that a strategy has not, those with the same reason and the same strategies together."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for verb, why in (row.cannot or {}).items():
            found.setdefault((why, verb), []).append(row.name)
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (why, verb), names in found.items():
        together.setdefault((why, tuple(names)), []).append(verb)
    return [Missing(verbs, why, names) for (why, names), verbs in together.items()]


def not_measured(rows: Iterable[Row]) -> list[tuple[str, list[str]]]:
    """Each reason, with all strategies of which nothing was measured for it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not:
            found.setdefault(row.why_not, []).append(row.name)
    return list(found.items())


def cell_table(rows: Iterable[Row]) -> Table:
    """Every cell of the results, one line each; times in milliseconds, and what the cell took in seconds."""
    heads = ["strategy", "workload", "fired", "lost", "twice", "early", "late p50", "p99", "most", "took s", "besides"]
    lines = [[row.name, result.workload, *_cell_words(result)] for row in rows for result in row.results.values()]
    return Table(heads, lines, frozenset(range(2, 10)))


def _cell_words(result: Result) -> list[str]:
    """The columns of `cell_table` after the first two."""
    seen, took = result.figures, figure(result.seconds)
    if seen is None:
        return [*[EMPTY] * 7, took, result.why_not]
    if result.workload in NOT_WAITED_FOR:  # what is due after its end was not lost
        return [*[EMPTY] * 7, took, _besides(seen)]
    late = [EMPTY if one is None else figure(one) for one in (seen.p50, seen.p99, seen.most)]
    counts = [EMPTY if one is None or not seen.expected else f"{one:,}"
              for one in (seen.lost, seen.duplicated, seen.early)]  # fmt: skip
    return [f"{seen.fired:,} of {seen.expected:,}" if seen.expected else EMPTY, *counts, *late, took, _besides(seen)]


def _besides(seen: Figures) -> str:
    """What a cell has beyond the columns: what was counted, and firings after a cancel."""
    extra = {"fired after a cancel": float(seen.revived)} if seen.revived else {}
    return ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in {**extra, **seen.counts}.items())
