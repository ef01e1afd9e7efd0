"""The findings as one HTML page that asks nothing of any server: style and pictures are in it, scripts it has none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, assert_never

from bide_lab.report.charts import Picture, colours, pictures, write_pictures
from bide_lab.report.document import TITLE, Block, Bullets, Drawing, Part, Section, Table, markdown, sections, ways
from bide_lab.report.findings import Findings


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
    written.tables.write_text(markdown(found, drawn), encoding="utf-8")
    return written


def page(found: Findings, drawn: Sequence[Picture]) -> str:
    """The whole page."""
    shown = sections(found, drawn)
    nav = "".join(f'<li><a href="#{one.name}">{escape(one.title)}</a></li>' for one in shown)
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
{_html(ways(found.results))}
</div></header>
<nav aria-label="Sections"><ul>{nav}</ul></nav>
<main>
{_glance(found)}
{"".join(map(_section, shown))}
<footer>Drawn from a results file by <code>bide lab report</code>; what is said here is computed from its figures. A
median or p99 is one that was measured, the nearest rank. The line between the points of a curve is only to guide the
eye.</footer>
</main>
</body>
</html>
"""


def _section(one: Section) -> str:
    return f'<section id="{one.name}"><h2>{escape(one.title)}</h2>\n{_html([one.about, *one.blocks])}</section>\n'


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


def _html(blocks: Iterable[Block]) -> str:
    """Pictures in a row stand in one grid."""
    text = []
    for drawn, some in groupby(blocks, lambda block: isinstance(block, Picture)):
        html = "\n".join(map(_block, some))
        text.append(f'<div class="pictures">{html}</div>' if drawn else html)
    return "\n".join(text)


def _block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{_prose(block)}</p>"
        case Bullets(lines):
            return f"<ul>{''.join(f'<li>{_prose(line)}</li>' for line in lines)}</ul>"
        case Drawing(text):
            return f"<pre>{escape(text)}</pre>"
        case Part(title, blocks):
            return _folded(title, _html(blocks))
        case Table():
            return _folded(block.folded, _table(block)) if block.folded else _table(block)
        case Picture():
            return f"<figure><figcaption>{escape(block.caption)}</figcaption>{block.svg()}</figure>"
    assert_never(block)


def _prose(text: str) -> str:
    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", code)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary><div>{body}</div></details>"


def _table(given: Table) -> str:
    def row(tags: str, line: Sequence[str]) -> str:
        first, *rest = line
        cells = (f"<{tags}{_kind(text, number, given)}>{escape(text)}</{tags}>" for number, text in enumerate(rest, 1))
        marked = ' class="bide"' if first in given.marked else ""
        return f"<tr{marked}><th{_kind(first, 0, given)}>{escape(first)}</th>{''.join(cells)}</tr>"

    body = "".join(row("td", line) for line in given.lines)
    return (
        f'<div class="wide" tabindex="0"><table><thead>{row("th", given.heads)}</thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _kind(text: str, number: int, given: Table) -> str:
    """The class of a cell. What the names mean, in a column without a head, is left out where there is no room."""
    title = number == 1 and not given.heads[1]
    kind = "title" if title else "right" if number in given.right else "words" if len(text) > 24 else ""
    return f' class="{kind}"' if kind else ""
