"""The findings as a Markdown file: tables that read well as plain text."""

from __future__ import annotations

from bide_lab.report.families import Family
from bide_lab.report.findings import Findings
from bide_lab.report.picks import picks_table
from bide_lab.report.tables import (
    Missing,
    Table,
    ahead_table,
    cell_table,
    counted_table,
    flaw_table,
    measure_table,
    missing_verbs,
    not_measured,
)
from bide_lab.report.way import ways


def markdown(found: Findings) -> str:
    """The whole file."""
    parts = ["# Delayed tasks, measured", *ways(found.results)]
    parts += ["## What each is known for", table(flaw_table(found.rows))]
    parts += ["## Where another is ahead of bide", ahead(found)]
    parts += ["## Which to pick when", table(picks_table(found))]
    for family in found.families:
        parts += [f"## {family.title}", family.about, *family_parts(found, family)]
    parts += ["## Every cell", table(cell_table(found.rows))]
    return "\n\n".join(parts) + "\n"


def ahead(found: Findings) -> str:
    """Where others are ahead of bide, or that they nowhere are."""
    return found.nobody_ahead or table(ahead_table(found.better))


def family_parts(found: Findings, family: Family) -> list[str]:
    """What was measured of a family, which verbs it has not, and what was not measured."""
    parts = []
    if (measured := measure_table(found, family)) is not None:
        parts.append(table(measured))
    rows = found.of(family)
    if (counted := counted_table(rows)) is not None:
        parts.append(table(counted))
    if missing := missing_verbs(rows):
        parts.append(bullets([missing_words(one) for one in missing]))
    if left_out := not_measured(rows):
        parts.append(bullets([f"{', '.join(names)}: {reason}" for reason, names in left_out]))
    return parts


def missing_words(one: Missing) -> str:
    """A line about verbs that are not there."""
    return f"no {', '.join(f'`{verb}`' for verb in one.verbs)} in {', '.join(one.names)}: {one.why}"


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(given: Table) -> str:
    """A Markdown table, the first column bold."""
    rules = ["---:" if number in given.right else "---" for number in range(len(given.heads))]
    lines = [[f"**{line[0]}**", *line[1:]] for line in given.lines]
    body = [" | ".join(one.replace("|", "\\|") for one in line) for line in [given.heads, *lines]]
    return "\n".join([f"| {body[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in body[1:])])
