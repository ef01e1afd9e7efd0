"""The report as one HTML page that asks nothing of any server: style and pictures are in it, scripts it has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from bide_lab.findings import Findings
from bide_lab.report.charts import Picture, colours, pictures, write_pictures
from bide_lab.report.content import TITLE, Bullets, Drawing, Part, Pictures, Table, sections, ways
from bide_lab.report.document import markdown


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
    return _template().render(
        title=TITLE, colours=colours(":root"), ways=ways(found.results), sections=sections(found, drawn), found=found,
        measured=[row for row in found.rows if row.measured], flaws=[one for row in found.rows for one in row.flaws],
        cells=[one for one in found.results if one.figures is not None],
    )  # fmt: skip


@cache
def _template() -> Template:
    """Each kind of block is a test of its name there."""
    made = Environment(
        loader=PackageLoader("bide_lab.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["prose"] = _prose
    for kind in (Bullets, Drawing, Part, Pictures, Table):
        made.tests[kind.__name__] = lambda block, kind=kind: isinstance(block, kind)
    return made.get_template("page.html")


def _prose(text: str) -> Markup:
    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", code))
