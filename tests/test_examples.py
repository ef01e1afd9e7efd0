"""The examples are programs that work: each runs to its end by itself, in a folder of its own, and is short."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.programs import Ended, python

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = 60


def run(example: Path, directory: Path) -> Ended:
    loud = ("-W", "error::RuntimeWarning", "-W", "error::DeprecationWarning:__main__")
    return python(*loud, example, cwd=directory)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Path, Future[Ended]]]:
    """Those that were asked for, two at a time: they wait more than they work."""
    asked = [
        item.callspec.params["example"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_an_example_runs_to_its_end.__name__
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {
            example: pool.submit(run, example, tmp_path_factory.mktemp(example.stem))
            for example in asked
            if isinstance(example, Path)
        }


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_to_its_end(example: Path, runs: Mapping[Path, Future[Ended]]) -> None:
    done = runs[example].result()
    assert done.stdout, "it shows what happens"
    for complaint in ("Traceback", "never awaited", "was never retrieved"):
        assert complaint not in done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(example: Path) -> None:
    source = example.read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    assert len(lines_of_code(source)) <= LINES


def lines_of_code(source: str) -> set[int]:
    """The lines that hold more than a comment or a documentation text."""
    beside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in beside
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def test_lines_are_counted_without_comments_and_docstrings() -> None:
    assert lines_of_code('"""Doc\n\nstring."""\n\n# why\nx = [\n    1,\n]  # here\n') == {6, 7, 8}
