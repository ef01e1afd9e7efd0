"""Puts a report into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bide_lab.report.drawing import alone
from bide_lab.report.findings import Findings
from bide_lab.report.markdown import markdown
from bide_lab.report.page import page
from bide_lab.report.pictures import Picture, pictures


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


MARK = "drawn by bide lab report"
"""What the first line of a picture begins with."""


def write_pictures(drawn: Sequence[Picture], folder: Path, note: str = "") -> list[Path]:
    """A file for each; pictures that an earlier report left in the folder go. `note` is added to their first line."""
    paths = [folder / f"{one.name}.svg" for one in drawn]
    for old in folder.glob("*.svg"):
        if old not in paths and old.read_text(encoding="utf-8").startswith(f"<!-- {MARK}"):
            old.unlink()
    for one, path in zip(drawn, paths, strict=True):
        path.write_text(alone(one.svg(), f"{MARK} {note}".strip()), encoding="utf-8")
    return paths
