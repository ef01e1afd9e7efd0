"""The report as a page of HTML, as a file of Markdown, and as parts of docs/strategies.md in two languages."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, assert_never

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from bide_lab.findings import Findings, findings
from bide_lab.report.charts import Picture, colours, pictures, write_pictures
from bide_lab.report.content import TITLE, Block, Bullets, Drawing, Part, Pictures, Table, sections, ways
from bide_lab.running import ResultsFile


def markdown(found: Findings, drawn: Sequence[Picture] = ()) -> str:
    """A report as a file that reads well as plain text."""
    return written([f"# {TITLE}", *ways(found.results), *sections(found, drawn)], level=2)


class Document:
    """The generated parts of docs/strategies.md, from one results file; its pictures are in `folder`."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.folder = folder
        self.found: Findings = findings(ResultsFile(results).read())
        self.pictures: Sequence[Picture] = pictures(self.found)
        self.note = f"from results {hashlib.sha256(results.read_bytes()).hexdigest()[:16]}"

    def way(self) -> str:
        """How it was measured."""
        return written(ways(self.found.results))

    def cards(self, name: str) -> str:
        """The idea of a family, and the card of each of its files."""
        about, *blocks = self._section(name).blocks
        return written([about, *(one for one in blocks if isinstance(one, Part))])

    def measured(self, name: str, *, chinese: bool = False) -> str:
        """All else of a section: tables, lists, and pictures."""
        blocks = [one for one in self._section(name).blocks[1:] if not isinstance(one, Part)]
        return written(in_chinese(blocks) if chinese else blocks, folder=f"{self.folder.name}/")

    def _section(self, name: str) -> Part:
        return next(one for one in sections(self.found, self.pictures) if one.name == name)

    def stale_pictures(self) -> list[Path]:
        """Those that are missing, are of other results, or are of none of these."""
        wanted = {self.folder / f"{one.name}.svg" for one in self.pictures}
        here = set(self.folder.glob("*.svg"))
        old = {path for path in here & wanted if f" {self.note} -->\n" not in path.read_text(encoding="utf-8")}
        return sorted((wanted - here) | (here - wanted) | old)

    def draw(self) -> list[Path]:
        """Draw all again."""
        return write_pictures(self.pictures, self.folder, self.note)


def in_chinese(blocks: Iterable[Block]) -> list[Block]:
    """The same, with the words that chinese.toml has."""
    known = tomllib.loads((files(__package__) / "chinese.toml").read_text(encoding="utf-8"))
    words, parts = known["words"], known["parts"]

    def line(text: str) -> str:
        for pattern, other in parts.items():
            text = re.sub(pattern, other, text)
        return text

    def translated(block: Block) -> Block:
        match block:
            case str():
                return str(words.get(block, block))
            case Table(heads, lines):
                heads, *lines = ([words.get(cell, cell) for cell in one] for one in [heads, *lines])
                return block._replace(heads=heads, lines=lines)
            case Bullets(lines):
                return Bullets([line(one) for one in lines])
            case Pictures(drawn):
                return Pictures([replace(one, caption=line(one.caption)) for one in drawn])
        return block

    return [translated(block) for block in blocks]


def written(blocks: Iterable[Block], *, level: int = 3, folder: str = "") -> str:
    """Markdown. `level`: that of headings; `folder`: where the pictures are."""
    return "\n\n".join(_markdown(block, level, folder) for block in blocks) + "\n"


def _markdown(block: Block, level: int, folder: str) -> str:
    match block:
        case str():
            return block
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Drawing(text):
            return f"```text\n{text}\n```"
        case Part(title, blocks):
            return written([f"{'#' * level} {title}", *blocks], level=level + 1).removesuffix("\n")
        case Table():
            return _table(block)
        case Pictures(drawn):
            return "\n".join(f"![{one.caption}]({folder}{one.name}.svg)" for one in drawn)
    assert_never(block)


def _table(given: Table) -> str:
    """The first column is bold."""
    rules = ["---:" if number in given.right else "---" for number in range(len(given.heads))]
    lines = [[f"**{line[0]}**", *line[1:]] for line in given.lines]
    body = [" | ".join(one.replace("|", "\\|") for one in line) for line in [given.heads, *lines]]
    return "\n".join([f"| {body[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in body[1:])])


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
