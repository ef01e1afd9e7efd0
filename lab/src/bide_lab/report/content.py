"""The content of a report as blocks, which `document` makes Markdown of, and `page` HTML.

In paragraphs and lines of a list, what stands between backticks is code, and between double asterisks bold; cells of
tables are plain text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.resources import files
from typing import NamedTuple, TypeAlias

import msgspec

from bide_lab.choose import Wishes, choose, late_words
from bide_lab.figures import MEASURES, Figures, Measure, Result, figure, grouped
from bide_lab.findings import NOT_WAITED_FOR, Findings, Row
from bide_lab.report.charts import Picture
from bide_lab.strategies import PARTS, Card, Family
from bide_lab.strategy import VERBS

TITLE = "Delayed tasks, measured"
COLUMNS = [one for one in MEASURES.values() if one.column]
"""The columns of a family's table."""
EMPTY = "·"


class Table(NamedTuple):
    """Cells are plain text; the first of each line names what it is about."""

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    """The columns whose values stand to the right."""
    folded: str = ""
    """On a page it is folded away under this title."""
    marked: frozenset[str] = frozenset()
    """The first cells of lines that stand out."""


class Bullets(NamedTuple):
    """A list of short lines."""

    lines: Sequence[str]


class Drawing(NamedTuple):
    """Plain characters whose places matter."""

    text: str


class Pictures(NamedTuple):
    """Drawings that stand side by side."""

    drawn: Sequence[Picture]


class Part(NamedTuple):
    """A heading, and the blocks below it."""

    title: str
    blocks: Sequence[Block]
    name: str = ""
    """Of a section of the report; one without a name is folded away on a page."""


Block: TypeAlias = str | Table | Bullets | Drawing | Part | Pictures
"""A string is a paragraph."""


def measure_table(found: Findings, family: Family) -> Table | None:
    """A line for each strategy of the family that has any of the measures, and one of bide's; a column for each."""
    rows = [row for row in found.of(family) if any(row.value(one) is not None for one in COLUMNS)]
    shown = [one for one in COLUMNS if any(row.value(one) is not None for row in rows)]
    if not shown:
        return None
    heads = ["strategy", "", *(_head(one) for one in shown)]
    lines = [
        [row.name, row.strategy.title, *(_or_empty(row.value(measure)) for measure in shown)]
        for row in [*rows, *found.guests(family)]
    ]
    marked = frozenset(row.name for row in found.bide) if family.name != "bide" else frozenset()
    return Table(heads, lines, frozenset(range(2, len(heads))), marked=marked)


def _head(measure: Measure) -> str:
    unit = measure.unit if measure.unit not in measure.head and measure.unit != "B" else ""
    return f"{measure.head}, {unit}" if unit else measure.head


def _or_empty(value: float | None) -> str:
    return EMPTY if value is None else figure(value)


def counted_table(rows: Iterable[Row]) -> Table | None:
    """Further counts of strategies and workloads: hops, visits, bytes; None if there are none."""
    lines = [[row.name, name, besides] for row in rows for name, seen in row.measured.items()
             if (besides := _besides(seen))]  # fmt: skip
    heads = ["strategy", "workload", "counted besides"]
    return Table(heads, lines, folded="What was counted besides") if lines else None


def flaw_table(rows: Iterable[Row]) -> Table:
    """The flaws of each strategy, and what was seen of them."""
    lines = [[row.name, one.text, one.workload, one.seen or one.why_not] for row in rows for one in row.flaws]
    return Table(["strategy", "known for", "workload", "seen here"], lines)


def ahead(found: Findings) -> str | Table:
    """A line for each measure: bide's best row, and each strategy that is ahead of it; or that none is."""
    if not found.better:
        bide = any(row.measured for row in found.bide)
        return "Nowhere in this run." if bide else "bide was not measured in this run, so nothing can be said."
    lines = [
        [one.measure.title, f"{one.measure.words(one.value)} ({one.bide})",
         ", ".join(f"{name} {one.measure.words(value)}" for name, value in one.ahead)]
        for one in found.better
    ]  # fmt: skip
    return Table(["measure", "best of bide", "ahead of it"], lines)


def cell_table(rows: Iterable[Row]) -> Table:
    """Every cell of the results, one line each; times in milliseconds, and what the cell took in seconds."""
    heads = ["strategy", "workload", "fired", "lost", "twice", "early", "late p50", "p99", "most", "took s", "besides"]
    lines = [[row.name, result.workload, *_cell_words(result)] for row in rows for result in row.results.values()]
    return Table(heads, lines, frozenset(range(2, 10)), folded=f"{len(lines)} cells")


def _cell_words(result: Result) -> list[str]:
    """The columns of `cell_table` after the first two."""
    seen, took = result.figures, figure(result.seconds)
    if seen is None:
        return [*[EMPTY] * 7, took, result.why_not]
    if result.workload in NOT_WAITED_FOR:  # what is due after its end was not lost
        return [*[EMPTY] * 7, took, _besides(seen)]
    counts = [EMPTY if one is None or not seen.expected else f"{one:,}"
              for one in (seen.lost, seen.duplicated, seen.early)]  # fmt: skip
    late = [_or_empty(one) for one in (seen.p50, seen.p99, seen.most)]
    return [f"{seen.fired:,} of {seen.expected:,}" if seen.expected else EMPTY, *counts, *late, took, _besides(seen)]


def _besides(seen: Figures) -> str:
    """Everything that has no column: further counts, and firings after a cancel."""
    extra = {"fired after a cancel": float(seen.revived)} if seen.revived else {}
    return ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in {**extra, **seen.counts}.items())


def missing_verbs(rows: Iterable[Row]) -> list[str]:
    """Every verb that a strategy lacks, those of one reason together, and the strategies that lack the same."""
    lacks = [
        ((", ".join(verbs), why), row.name) for row in rows
        for why, verbs in grouped((row.strategy.cannot[verb], f"`{verb}`") for verb in VERBS
                                  if verb in row.strategy.cannot).items()
    ]  # fmt: skip
    return [f"no {verbs} in {', '.join(names)}: {why}" for (verbs, why), names in grouped(lacks).items()]


def not_measured(rows: Iterable[Row]) -> list[str]:
    """Each reason, with all strategies of which nothing was measured for it."""
    reasons = grouped((row.why_not, row.name) for row in rows if row.why_not)
    return [f"{', '.join(names)}: {why}" for why, names in reasons.items()]


def card_parts(rows: Iterable[Row]) -> list[Part]:
    """The card of each file, with the variants that share it."""
    found: dict[str, tuple[Card, list[str]]] = {}
    for row in rows:
        if row.card is not None:
            found.setdefault(row.card.title, (row.card, []))[1].append(f"`{row.name}`: {row.strategy.title}")
    return [
        Part(title, [Bullets(variants), Drawing(card.drawing), *(f"**{name}.** {card.parts[name]}" for name in PARTS)])
        for title, (card, variants) in found.items()
    ]


def picks_table(found: Findings) -> Table:
    """A line for each situation: what is picked, what was measured of it, and up to three that would do too."""
    lines = []
    situations = tomllib.loads((files(__package__) / "situations.toml").read_text(encoding="utf-8"))
    for words, wishes in situations.items():
        fitting = [one.row for one in choose(msgspec.convert(wishes, Wishes), found).fitting]
        lines.append([
            words,
            ", ".join(f"{row.name} ({row.strategy.title})" for row in fitting[:1]) or EMPTY,
            ", ".join(late_words(row) for row in fitting[:1]) or EMPTY,
            ", ".join(row.name for row in fitting[1:4]) or EMPTY,
        ])  # fmt: skip
    return Table(["situation", "pick", "measured", "or"], lines)


def ways(results: Sequence[Result]) -> list[str]:
    """A paragraph for each way in which cells were measured; more than one if the file was filled by several runs."""
    found = grouped(((one.quick, one.minute, one.version, machine_words(one)), one) for one in results)
    return [_way(*key, some) for key, some in found.items()] or ["The results file is empty: `bide lab run` fills it."]


def _way(quick: bool, minute: float, version: str, machine: str, some: Sequence[Result]) -> str:
    measured = sum(one.figures is not None for one in some)
    minutes, seconds = divmod(round(sum(one.seconds for one in some)), 60)
    days = sorted({datetime.fromisoformat(one.at).date().isoformat() for one in some})
    return (
        f"A {'quick' if quick else 'full'} run of bide {version} on {machine}: {measured} cells measured, "
        f"{len(some) - measured} not, {f'{minutes} min ' if minutes else ''}{seconds} s of playing, some at a time, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}. One minute of a strategy's own periods and "
        f"levels took {figure(minute)} s; the delays of tasks are not scaled."
    )


def machine_words(result: Result) -> str:
    cpus, system, python = (result.machine.get(name, "?") for name in ("cpus", "system", "python"))
    return f"{cpus} processor{'' if cpus == 1 else 's'}, {system}, Python {python}"


def sections(found: Findings, drawn: Sequence[Picture] = ()) -> list[Part]:
    """The whole report, but for how it was measured: see `ways`. The first block of each says what it is about.

    Of a family its pictures, tables, lists and cards.
    """
    families = []
    for one in found.families:
        rows = found.of(one)
        pictures = [picture for picture in drawn if picture.family == one]
        tables = filter(None, (measure_table(found, one), counted_table(rows)))
        lists = [Bullets(lines) for lines in (not_measured(rows), missing_verbs(rows)) if lines]
        shown: list[Block] = [*([Pictures(pictures)] if pictures else []), *tables, *lists, *card_parts(rows)]
        families.append(Part(one.title, [one.about, *shown], one.name))
    return [
        Part("What each is known for", ["What was seen of each flaw in these measurements.", flaw_table(found.rows)],
             "known"),
        Part("Where another is ahead of bide",
             ["For each measure the best row of bide's, then every strategy that did better than that.", ahead(found)],
             "ahead"),
        Part("Which to pick when",
             ["What `bide lab choose` answers in a few situations: the first is picked, the others would do too. Its "
              "rules go by servers, verbs, precision, flaws and figures; no strategy is named in them.",
              picks_table(found)],
             "picks"),
        *families,
        Part("Every cell", ["Times in milliseconds; what a cell took, in seconds.", cell_table(found.rows)], "cells"),
    ]  # fmt: skip
