"""Puts a report into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bide.lab.report.findings import Findings
from bide.lab.report.markdown import markdown


class Written(NamedTuple):
    """The files of a report."""

    page: Path
    tables: Path
    pictures: Sequence[Path]


def write_report(found: Findings, folder: Path) -> Written:
    """Raises MissingExtra where matplotlib is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = Written(folder / "report.html", folder / "report.md", ())
    written.tables.write_text(markdown(found), encoding="utf-8")
    return written
