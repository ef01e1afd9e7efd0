"""The findings as a Markdown file: tables that read well as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bide.lab.figures import Figures, Result
from bide.lab.report.families import Family
from bide.lab.report.findings import Better, Findings, Row
from bide.lab.report.measures import BY_NAME, Measure, figure
from bide.lab.report.way import ways

COLUMNS = tuple(
    BY_NAME[name]
    for name in (
        "late-p50", "late-p99", "completed", "idle-cpu", "idle-server-cpu", "idle-trips", "bytes", "server-bytes",
        "verb-schedule",
    )
)  # fmt: skip
"""What the table of a family shows."""
EMPTY = "·"


def markdown(found: Findings) -> str:
    """The whole file."""
    ahead = better_lines(found.better) or ["Nowhere in this run."]
    parts = ["# Delayed tasks, measured", *ways(found.results), "## What each is known for", flaw_table(found.rows)]
    parts += ["## Where another is ahead of bide", *ahead]
    for family in found.families:
        parts += [f"## {family.title}", family.about, *family_parts(found, family)]
    parts += ["## Every cell", cell_table(found)]
    return "\n\n".join(parts) + "\n"


def family_parts(found: Findings, family: Family) -> list[str]:
    """What was measured of a family, which verbs it has not, and what was not measured."""
    rows = found.of(family)
    reference = found.reference(family)
    measured = [row for row in rows if row.measured]
    parts = []
    if measured:
        beside = [reference] if reference is not None and reference not in measured else []
        parts.append(measure_table([*measured, *beside], COLUMNS))
    if lines := missing_verbs(rows):
        parts.append("\n".join(["Verbs that are not there:", "", *lines]))
    if lines := not_measured(rows):
        parts.append("\n".join(lines))
    return parts


def measure_table(rows: Sequence[Row], measures: Sequence[Measure]) -> str:
    """A row for each strategy; a column for each measure that anybody has."""
    shown = [one for one in measures if any(row.value(one) is not None for row in rows)]
    heads = ["strategy", "", *(f"{one.head}{f', {one.unit}' if one.unit.isalpha() or one.unit == '%' else ''}"
                               for one in shown)]  # fmt: skip
    lines = []
    for row in rows:
        values = [row.value(one) for one in shown]
        lines.append([f"**{row.name}**", row.title, *(EMPTY if one is None else figure(one) for one in values)])
    return table(heads, lines, right=range(2, len(heads)))


def flaw_table(rows: Iterable[Row]) -> str:
    """What each strategy is known for, and what was seen of it."""
    lines = [
        [f"**{row.name}**", flaw.text, flaw.workload, f"**{flaw.seen}**" if flaw.seen else flaw.why_not]
        for row in rows for flaw in row.flaws
    ]  # fmt: skip
    return table(["strategy", "known for", "workload", "seen"], lines)


def better_lines(better: Iterable[Better]) -> list[str]:
    """A list: a measure, bide's best row, and whoever is ahead of that."""
    lines = []
    for one in better:
        ahead = ", ".join(f"{name} ({one.measure.words(value)})" for name, value in one.ahead)
        lines.append(f"- {one.measure.title}: {one.bide} {one.measure.words(one.value)}; ahead of it: {ahead}")
    return ["\n".join(lines)] if lines else []


def missing_verbs(rows: Iterable[Row]) -> list[str]:
    """A line for each verb and reason, with all strategies that share it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for verb, reason in (row.cannot or {}).items():
            found.setdefault((verb, reason), []).append(row.name)
    return [f"- `{verb}`: {reason} ({', '.join(names)})" for (verb, reason), names in found.items()]


def not_measured(rows: Iterable[Row]) -> list[str]:
    """A line for each reason, with all strategies of which nothing was measured for it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not:
            found.setdefault(row.why_not, []).append(row.name)
    return [f"- {', '.join(f'**{name}**' for name in names)}: {reason}" for reason, names in found.items()]


def cell_table(found: Findings) -> str:
    """Every cell of the results, one line each."""
    lines = [
        [f"**{row.name}**", result.workload, *cell_words(result)]
        for row in found.rows
        for result in row.results.values()
    ]
    heads = ["strategy", "workload", "fired", "lost", "twice", "early", "late p50", "p99", "most", "besides", "s"]
    return table(heads, lines, right=(*range(2, 9), 10))


def cell_words(result: Result) -> list[str]:
    """The columns of `cell_table` after the first two."""
    seen, took = result.figures, figure(result.seconds)
    if seen is None:
        return [*[EMPTY] * 7, result.why_not, took]
    late = [EMPTY if one is None else figure(one) for one in (seen.p50, seen.p99, seen.most)]
    counts = [EMPTY if one is None else f"{one:,}" for one in (seen.lost, seen.duplicated, seen.early)]
    return [f"{seen.fired:,} of {seen.expected:,}" if seen.expected else EMPTY, *counts, *late, besides(seen), took]


def besides(seen: Figures) -> str:
    """What a cell has beyond the columns: what was counted, and firings after a cancel."""
    extra = {"fired after a cancel": float(seen.revived or 0)} if seen.revived else {}
    return ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in {**extra, **seen.counts}.items())


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """A Markdown table. `right`: the columns whose values stand to the right."""
    to_the_right = set(right)
    rules = ["---:" if number in to_the_right else "---" for number in range(len(heads))]
    whole = [heads, rules, *([one.replace("|", "\\|") for one in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in whole)
