"""No run of more than twelve equal lines stands in two files: two stores, two servers, two scenarios or two tests."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "bench", "proofs/src", "lab/src", "examples", "scripts", "tests")
MOST = 12
"""Equal lines in a row, blank lines and imports left out."""


class Line(NamedTuple):
    number: int
    text: str


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in this one, at any depth."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def lines_of(path: Path) -> list[Line]:
    """The lines of a module that say something: neither blank nor of an import."""
    source = path.read_text(encoding="utf-8")
    imports = {
        number
        for node in statements(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    stripped = enumerate((line.strip() for line in source.splitlines()), 1)
    return [Line(number, text) for number, text in stripped if text and number not in imports]


def repeats(files: Iterable[Path]) -> list[str]:
    """The first run that a file shares with one before it. O(lines)."""
    known: dict[str, int] = {}
    seen: dict[Sequence[int], tuple[Path, int]] = {}
    found: dict[tuple[Path, Path], str] = {}
    for path in files:
        lines = lines_of(path)
        texts = [known.setdefault(line.text, len(known)) for line in lines]
        for begin in range(len(lines) - MOST):
            number = lines[begin].number
            one, at = seen.setdefault(tuple(texts[begin : begin + MOST + 1]), (path, number))
            if one != path:
                found.setdefault((one, path), f"{one}:{at} ~ {path}:{number}")
    return list(found.values())


def test_nothing_is_said_twice() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    assert repeats(files) == []


def test_a_run_of_thirteen_equal_lines_is_found(tmp_path: Path) -> None:
    body = [f"x = {number}" for number in range(MOST + 1)]
    (tmp_path / "a.py").write_text("import os\n" + "\n".join(body))
    (tmp_path / "b.py").write_text("y = 1\n\nif y:\n    " + "\n\n    ".join(body))
    (tmp_path / "c.py").write_text("\n".join(body[:MOST]))
    one, other, short = (tmp_path / f"{name}.py" for name in "abc")
    assert repeats([one, other, short]) == [f"{one}:2 ~ {other}:4"]
