"""The findings as one HTML page that asks nothing of any server: style and pictures are in it, scripts it has none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from bide_lab.card import PARTS, Card
from bide_lab.report.drawing import DARK, LIGHT, variables
from bide_lab.report.families import Family
from bide_lab.report.findings import Findings, Row
from bide_lab.report.picks import picks_table
from bide_lab.report.pictures import Picture
from bide_lab.report.tables import (
    EMPTY,
    Table,
    ahead_table,
    cell_table,
    counted_table,
    measure_table,
    missing_verbs,
    not_measured,
)
from bide_lab.report.way import ways

TITLE = "Delayed tasks, measured"


def page(found: Findings, drawn: Sequence[Picture]) -> str:
    """The whole page."""
    links = [("known", "Known for"), ("ahead", "Ahead of bide"), ("picks", "Which to pick")]
    links += [*((one.name, one.title) for one in found.families), ("cells", "Every cell")]
    nav = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in links)
    families = "".join(_family(found, one, [made for made in drawn if made.family is one]) for one in found.families)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{TITLE}</title>
<style>
{_style()}</style>
</head>
<body>
<header><div>
<h1>{TITLE}</h1>
{"".join(f'<p class="way">{escape(one)}</p>' for one in ways(found.results))}
</div></header>
<nav aria-label="Sections"><ul>{nav}</ul></nav>
<main>
{_glance(found)}
<section id="known"><h2>What each is known for, and what was seen of it</h2>
{_known(found)}</section>
<section id="ahead"><h2>Where another is ahead of bide</h2>
{_ahead(found)}</section>
<section id="picks"><h2>Which to pick when</h2>
<p>What <code>bide lab choose</code> answers in a few situations: the first is picked, the others would do too. Its
rules go by servers, verbs, precision, flaws and figures; no strategy is named in them.</p>
{_picks(found)}</section>
{families}
<section id="cells"><h2>Every cell</h2>
<p>Times in milliseconds; what a cell took, in seconds.</p>
{_cells(found)}</section>
<footer>Drawn from a results file by <code>bide lab report</code>; what is said here is computed from its figures. A
median or p99 is one that was measured, the nearest rank. The line between the points of a curve is only to guide the
eye.</footer>
</main>
</body>
</html>
"""


def _style() -> str:
    given = (files(__package__) / "page.css").read_text(encoding="utf-8")
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}"
    return f":root {{ {variables(LIGHT)} }}\n{dark}\n{given}"


def _glance(found: Findings) -> str:
    flaws = [one for row in found.rows for one in row.flaws]
    cells = [one for one in found.results if one.figures is not None]
    boxes = (
        (f"{sum(bool(row.measured) for row in found.rows)} of {len(found.rows)}", "strategies measured"),
        (f"{len(cells)}", "cells measured, each one strategy under one workload"),
        (f"{sum(bool(one.seen) for one in flaws)} of {len(flaws)}", "known flaws seen happening"),
        (f"{len(found.better)}", "measures on which another is ahead of bide"),
    )
    return f'<ul class="glance">{"".join(f"<li><b>{value}</b> {what}</li>" for value, what in boxes)}</ul>'


def _known(found: Findings) -> str:
    parts = []
    for family in found.families:
        lines, before = [], ""
        for row in found.of(family):
            for one in row.flaws:
                name = "" if row.name == before else escape(row.name)
                seen = f'<span class="{"seen" if one.seen else "unseen"}">{escape(one.seen or one.why_not)}</span>'
                text = f"<span>{escape(one.text)} <small>({escape(one.workload)})</small></span>"
                lines.append(f"<li><b>{name}</b>{text}{seen}</li>")
                before = row.name
        if lines:
            parts.append(f'<h3>{escape(family.title)}</h3><ul class="known">{"".join(lines)}</ul>')
    return "".join(parts)


def _ahead(found: Findings) -> str:
    if found.nobody_ahead:
        return f"<p>{found.nobody_ahead}</p>"
    told = "<p>For each measure the best row of bide's, then every strategy that did better than that.</p>"
    lines = [
        f"<li><span>{escape(measure)}</span><span>{escape(ours)}</span><span>ahead: {escape(theirs)}</span></li>"
        for measure, ours, theirs in ahead_table(found.better).lines
    ]
    return f'{told}<ul class="known said">{"".join(lines)}</ul>'


def _picks(found: Findings) -> str:
    lines = [
        f"<li><span>{escape(situation)}</span><span><b>{escape(pick)}</b><br><small>{escape(measured)}</small></span>"
        f"<span>{'' if others == EMPTY else f'or {escape(others)}'}</span></li>"
        for situation, pick, measured, others in picks_table(found).lines
    ]
    return f'<ul class="known said">{"".join(lines)}</ul>'


def _family(found: Findings, family: Family, drawn: Sequence[Picture]) -> str:
    rows = found.of(family)
    parts = [f'<section id="{family.name}"><h2>{escape(family.title)}</h2><p>{escape(family.about)}</p>']
    if drawn:
        parts.append(f'<div class="pictures">{"".join(_figure(one) for one in drawn)}</div>')
    if (measured := measure_table(found, family)) is not None:
        ours = {row.name for row in found.bide} if family.name != "bide" else set()
        parts.append(_table(measured, marked=ours))
    if (counted := counted_table(rows)) is not None:
        parts.append(f"<details><summary>What was counted besides</summary><div>{_table(counted)}</div></details>")
    if left_out := not_measured(rows):
        lines = "".join(f"<li><b>{escape(', '.join(names))}</b>: {escape(why)}</li>" for why, names in left_out)
        parts.append(f'<h3>Not measured</h3><ul class="plain">{lines}</ul>')
    if missing := missing_verbs(rows):
        lines = "".join(
            f"<li>{', '.join(f'<code>{verb}</code>' for verb in one.verbs)} in <b>{escape(', '.join(one.names))}</b>: "
            f"{escape(one.why)}</li>"
            for one in missing
        )
        parts.append(f'<h3>Verbs that are not there</h3><ul class="plain">{lines}</ul>')
    parts += _cards(rows)
    return "".join([*parts, "</section>\n"])


def _figure(one: Picture) -> str:
    return f"<figure><figcaption>{escape(one.caption)}</figcaption>{one.svg()}</figure>"


def _cards(rows: Sequence[Row]) -> list[str]:
    """One for each file, that its variants share."""
    cards: dict[str, tuple[Card, list[Row]]] = {}
    for row in rows:
        if row.card is not None:
            cards.setdefault(row.card.title, (row.card, []))[1].append(row)
    return [_card(card, variants) for card, variants in cards.values()]


def _card(card: Card, variants: Sequence[Row]) -> str:
    names = ", ".join(row.name for row in variants)
    told = "".join(f"<dt>{part}</dt><dd>{_prose(card.parts[part])}</dd>" for part in PARTS)
    return (
        f"<details><summary>{escape(card.title)} <small>{escape(names)}</small></summary>"
        f"<div><pre>{escape(card.drawing)}</pre><dl>{told}</dl></div></details>"
    )


def _prose(text: str) -> str:
    """A paragraph of a card: what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _cells(found: Findings) -> str:
    tables = []
    for family in found.families:
        table = cell_table(found.of(family))
        if table.lines:
            tables.append(f"<details><summary>{escape(family.title)} <small>{len(table.lines)}</small></summary>"
                          f"<div>{_table(table)}</div></details>")  # fmt: skip
    return "".join(tables)


def _table(given: Table, marked: Iterable[str] = ()) -> str:
    """`marked`: the strategies whose lines stand out."""
    stand_out = set(marked)
    heads = "".join(_cell("th", text, number, given, ' scope="col"') for number, text in enumerate(given.heads))
    lines = []
    for line in given.lines:
        cells = "".join(_cell("td", text, number, given) for number, text in enumerate(line) if number)
        row = ' class="bide"' if line[0] in stand_out else ""
        lines.append(f'<tr{row}><th scope="row">{escape(line[0])}</th>{cells}</tr>')
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div>"
    )


def _cell(tag: str, text: str, number: int, given: Table, more: str = "") -> str:
    titled = number == 1 and not given.heads[1]  # what the names mean: left out where there is no room
    kind = (
        "title" if titled else "right" if number in given.right else "words" if tag == "td" and len(text) > 24 else ""
    )
    named = f' class="{kind}"' if kind else ""
    return f"<{tag}{more}{named}>{escape(text)}</{tag}>"
