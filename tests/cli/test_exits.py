"""The exit codes are one table, in the code, in --help and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bide import (
    BadInput,
    BadPayload,
    BideError,
    DuplicateHandler,
    LeaseLost,
    MissingExtra,
    OutcomeUnknown,
    StoreCorrupt,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)
from bide.cli.exits import Exit, exit_of

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def test_the_documentation_has_the_table(root: Path) -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (root / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(str(code.value), code.meaning) for code in Exit]


def test_help_has_the_table(line: CommandLine) -> None:
    words = " ".join(line.run("--help").stdout.split())
    for code in Exit:
        assert f"{code.value} {code.meaning}" in words


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("field", 1, "two"), Exit.BAD_INPUT),
        (BadPayload("payload", 1, "two"), Exit.BAD_INPUT),
        (DuplicateHandler("twice"), Exit.SETUP),
        (MissingExtra("redis", "redis:"), Exit.SETUP),
        (StoreUnavailable("locked"), Exit.UNAVAILABLE),
        (StoreFull("full"), Exit.UNAVAILABLE),
        (StoreCorrupt("damaged"), Exit.DAMAGED),
        (StoreMismatch("another"), Exit.DAMAGED),
        (OutcomeUnknown("lost"), Exit.UNKNOWN),
        (LeaseLost("gone"), Exit.NOT_DONE),
        (BideError("else"), Exit.DEFECT),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else None,
)
def test_every_error_has_a_code(error: BideError, code: Exit) -> None:
    assert exit_of(error) is code


def test_what_is_no_bide_database_is_damaged(line: CommandLine) -> None:
    path = line.directory / "letter.txt"
    path.write_text("Dear SQLite, " * 400, encoding="utf-8")
    assert str(path) in line.error("ls", "--store", f"sqlite:///{path}", code=Exit.DAMAGED)


def test_a_folder_that_is_not_there_is_unavailable(line: CommandLine) -> None:
    line.error("ls", "--store", f"sqlite:///{line.directory}/nowhere/tasks.db", code=Exit.UNAVAILABLE)


def test_a_service_that_is_not_there_is_unavailable(line: CommandLine) -> None:
    assert "127.0.0.1:9" in line.error("ls", "--store", "http://127.0.0.1:9", code=Exit.UNAVAILABLE)


def test_a_defect_is_one_line_and_debug_shows_where(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("bide.cli.context.Context.open", broken)
    assert "ZeroDivisionError" in line.error("ls", code=Exit.DEFECT)
    from click.testing import CliRunner

    from bide.cli import main

    assert "Traceback" in CliRunner().invoke(main, ["ls", "--debug"]).stderr


def test_control_c_ends_cleanly(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bide.cli.context.Context.open", interrupted)
    assert line.run("ls", code=Exit.INTERRUPTED).stderr.strip() == "bide: interrupted"
