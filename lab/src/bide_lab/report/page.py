"""The findings as one HTML page that asks nothing of any server: style and pictures are in it, scripts it has none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from bide_lab.report import tables
from bide_lab.report.charts import Picture, colours, pictures, write_pictures
from bide_lab.report.document import markdown
from bide_lab.report.findings import Family, Findings
from bide_lab.strategies import PARTS, Card

TITLE = "Delayed tasks, measured"
_AHEAD = "For each measure the best row of bide's, then every strategy that did better than that."
_PICKS = (
    "What <code>bide lab choose</code> answers in a few situations: the first is picked, the others would do too. Its "
    "rules go by servers, verbs, precision, flaws and figures; no strategy is named in them."
)


class Written(NamedTuple):
    """The files of a report."""

    page: Path
    tables: Path
    pictures: Sequence[Path]


def write_report(found: Findings, folder: Path) -> Written:
    """Draw the pictures, and write the page and the tables around them."""
    drawn = pictures(found)
    folder.mkdir(parents=True, exist_ok=True)
    written = Written(folder / "report.html", folder / "report.md", write_pictures(drawn, folder))
    written.page.write_text(page(found, drawn), encoding="utf-8")
    written.tables.write_text(markdown(found), encoding="utf-8")
    return written


def page(found: Findings, drawn: Sequence[Picture]) -> str:
    """The whole page."""
    links = [("known", "Known for"), ("ahead", "Ahead of bide"), ("picks", "Which to pick")]
    links += [*((one.name, one.title) for one in found.families), ("cells", "Every cell")]
    nav = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in links)
    families = "".join(
        _section(one.name, one.title, escape(one.about), "".join(_family(found, one, drawn))) for one in found.families
    )
    ahead = [
        [escape(title), escape(ours), f"ahead: {escape(theirs)}"]
        for title, ours, theirs in tables.ahead_table(found).lines
    ]
    picks = [
        [escape(situation), f"<b>{escape(pick)}</b><br><small>{escape(measured)}</small>",
         "" if others == tables.EMPTY else f"or {escape(others)}"]
        for situation, pick, measured, others in tables.picks_table(found).lines
    ]  # fmt: skip
    light, dark = colours(":root")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{TITLE}</title>
<style>
{light}
{dark}
{(files(__package__) / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><div>
<h1>{TITLE}</h1>
{"".join(f'<p class="way">{escape(one)}</p>' for one in tables.ways(found.results))}
</div></header>
<nav aria-label="Sections"><ul>{nav}</ul></nav>
<main>
{_glance(found)}
{_section("known", "What each is known for, and what was seen of it", "", _known(found))}
{_section("ahead", "Where another is ahead of bide", found.nobody_ahead or _AHEAD, _list(ahead, "known said"))}
{_section("picks", "Which to pick when", _PICKS, _list(picks, "known said"))}
{families}
{_section("cells", "Every cell", "Times in milliseconds; what a cell took, in seconds.", "".join(_cells(found)))}
<footer>Drawn from a results file by <code>bide lab report</code>; what is said here is computed from its figures. A
median or p99 is one that was measured, the nearest rank. The line between the points of a curve is only to guide the
eye.</footer>
</main>
</body>
</html>
"""


def _section(name: str, title: str, about: str, body: str) -> str:
    told = f"<p>{about}</p>" if about else ""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{told}\n{body}</section>\n'


def _list(lines: Iterable[Sequence[str]], kind: str) -> str:
    """Lines of a few parts, which stand side by side where there is room; nothing without a line."""
    told = "".join(f"<li>{''.join(f'<span>{part}</span>' for part in line)}</li>" for line in lines)
    return f'<ul class="{kind}">{told}</ul>' if told else ""


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
        lines = []
        for row in found.of(family):
            for number, one in enumerate(row.flaws):
                seen = f'<b class="seen">{escape(one.seen)}</b>' if one.seen else f"<i>{escape(one.why_not)}</i>"
                named = f"<b>{escape(row.name)}</b>" if number == 0 else ""
                lines.append([named, f"{escape(one.text)} <small>({escape(one.workload)})</small>", seen])
        if lines:
            parts.append(f"<h3>{escape(family.title)}</h3>{_list(lines, 'known')}")
    return "".join(parts)


def _family(found: Findings, family: Family, drawn: Sequence[Picture]) -> Iterator[str]:
    rows = found.of(family)
    figures = [f"<figure><figcaption>{escape(one.caption)}</figcaption>{one.svg()}</figure>"
               for one in drawn if one.family is family]  # fmt: skip
    if figures:
        yield f'<div class="pictures">{"".join(figures)}</div>'
    if (measured := tables.measure_table(found, family)) is not None:
        yield _table(measured, marked={row.name for row in found.bide} if family.name != "bide" else ())
    if (counted := tables.counted_table(rows)) is not None:
        yield _details("What was counted besides", "", _table(counted))
    if left_out := tables.not_measured(rows):
        lines = [[f"<b>{escape(', '.join(names))}</b>: {escape(why)}"] for why, names in left_out]
        yield f"<h3>Not measured</h3>{_list(lines, 'plain')}"
    if missing := tables.missing_verbs(rows):
        lines = [[f"{', '.join(f'<code>{verb}</code>' for verb in one.verbs)} in "
                  f"<b>{escape(', '.join(one.names))}</b>: {escape(one.why)}"] for one in missing]  # fmt: skip
        yield f"<h3>Verbs that are not there</h3>{_list(lines, 'plain')}"
    for card, variants in tables.cards_of(rows):
        yield _details(card.title, ", ".join(row.name for row in variants), _card(card))


def _details(title: str, small: str, body: str) -> str:
    """Folded away until it is wanted."""
    told = f" <small>{escape(small)}</small>" if small else ""
    return f"<details><summary>{escape(title)}{told}</summary><div>{body}</div></details>"


def _card(card: Card) -> str:
    """Within its paragraphs, what stands between backticks is code."""
    prose = {part: re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(card.parts[part])) for part in PARTS}
    told = "".join(f"<dt>{part}</dt><dd>{text}</dd>" for part, text in prose.items())
    return f"<pre>{escape(card.drawing)}</pre><dl>{told}</dl>"


def _cells(found: Findings) -> Iterator[str]:
    for family in found.families:
        table = tables.cell_table(found.of(family))
        if table.lines:
            yield _details(family.title, str(len(table.lines)), _table(table))


def _table(given: tables.Table, marked: Collection[str] = ()) -> str:
    """`marked`: the strategies whose lines stand out."""
    heads = "".join(_cell("th", text, number, given, ' scope="col"') for number, text in enumerate(given.heads))
    lines = []
    for line in given.lines:
        cells = "".join(_cell("td", text, number, given) for number, text in enumerate(line) if number)
        row = ' class="bide"' if line[0] in marked else ""
        lines.append(f'<tr{row}><th scope="row">{escape(line[0])}</th>{cells}</tr>')
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div>"
    )


def _cell(tag: str, text: str, number: int, given: tables.Table, more: str = "") -> str:
    titled = number == 1 and not given.heads[1]  # what the names mean: left out where there is no room
    kind = (
        "title" if titled else "right" if number in given.right else "words" if tag == "td" and len(text) > 24 else ""
    )
    named = f' class="{kind}"' if kind else ""
    return f"<{tag}{more}{named}>{escape(text)}</{tag}>"
