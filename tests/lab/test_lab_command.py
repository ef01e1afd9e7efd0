"""`bide lab list`, `explain`, `report` and `choose`, as a person and as a program uses them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.lab.playing import named
from tests.lab.reported import some_results

from bide.cli import main
from bide_lab.running import ResultsFile
from bide_lab.strategies import catalogue
from bide_lab.strategy import Strategy
from bide_lab.workloads import WORKLOADS

EVERY = catalogue()


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of its own, without settings, in a terminal of 80 columns."""
    for name in [name for name in os.environ if name.startswith("BIDE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def results(tmp_path: Path) -> ResultsFile:
    file = ResultsFile(tmp_path / "lab-results.jsonl")
    for one in some_results():
        file.add(one)
    return file


def run(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["lab", *words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def shapes(*words: str) -> list[Any]:
    return [json.loads(line) for line in run(*words, "--json").stdout.splitlines()]


def error(*words: str) -> str:
    done = run(*words, code=2)
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_list_names_all_strategies_and_workloads() -> None:
    told = shapes("list")
    assert [one["strategy"] for one in told if "strategy" in one] == list(EVERY)
    assert [one["workload"] for one in told if "workload" in one] == list(WORKLOADS)
    words = run("list").stdout.split()
    assert {*EVERY, *WORKLOADS} <= set(words)


@pytest.mark.parametrize("strategy", EVERY.values(), ids=named)
def test_explain_fits_into_80_columns_but_for_wide_drawings(strategy: type[Strategy]) -> None:
    text = run("explain", strategy.name).stdout
    [told, *_] = shapes("explain", strategy.name)
    drawing = {line.strip() for line in told["drawing"].splitlines()}
    wide = [line for line in text.splitlines()[1:] if len(line) > 80 and line.strip() not in drawing]
    assert not wide
    assert all(part in text for part in told["parts"])
    assert told["drawing"].splitlines()[0].strip() in text


def test_report_writes_the_page_the_tables_and_the_pictures(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "few.jsonl")
    for one in some_results()[:5:4]:
        file.add(one)
    [told] = shapes("report", "--results", "few.jsonl", "--out", "elsewhere")
    assert told["measured"] == 2
    assert told["strategies"] == len(EVERY)
    assert (tmp_path / told["page"]).samefile("elsewhere/report.html")
    assert told["pictures"]
    for path in (told["page"], told["tables"], *told["pictures"]):
        assert (tmp_path / path).stat().st_size > 500


def test_report_of_nothing_says_what_would_be_accepted() -> None:
    assert "bide lab run" in error("report", "--results", "none.jsonl")


@pytest.mark.parametrize("text", ['{"strategy": 1}\n', "lateness,p50\n"], ids=["another shape", "no JSON"])
@pytest.mark.parametrize("command", ["report", "choose"])
def test_a_file_of_something_else_is_refused(command: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(text)
    assert "other.jsonl" in error(command, "--results", "other.jsonl")


def test_report_of_an_empty_file_lists_all_as_not_measured(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    [told] = shapes("report", "--results", "empty.jsonl")
    assert (told["measured"], told["pictures"]) == (0, [])
    assert "0 of" in run("report", "--results", "empty.jsonl").stdout
    text = Path(told["tables"]).read_text(encoding="utf-8")
    assert "not in this run" in text
    assert "bide was not measured" in Path(told["page"]).read_text(encoding="utf-8")


def test_choose_answers_with_reasons_on_both_sides(results: ResultsFile) -> None:
    [told] = shapes("choose", "--servers", "redis,postgres", "--tasks", "1000", "--late", "100ms")
    assert told["measured"] is True
    assert told["fitting"][0]["strategy"] == "bide-redis"
    assert told["fitting"][0]["why"]
    excluded = {one["strategy"]: one["why"] for one in told["excluded"]}
    assert {"reason": "99 of 100 were late by up to 109 ms (steady)", "measured": True} in excluded["S4-A"]
    assert not excluded["S9"][0]["measured"]
    assert len(told["fitting"]) + len(excluded) == len(EVERY)


def test_choose_goes_by_our_figures_where_there_are_none_of_this_machine() -> None:
    [told] = shapes("choose", "--servers", "redis")
    assert (told["measured"], told["measured_here"]) == (True, False)
    excluded = {one["strategy"]: one["why"] for one in told["excluded"]}
    assert any(why["measured"] and "lost" in why["reason"] for why in excluded["S5-B"])
    assert "these are those of docs/strategies.md" in " ".join(run("choose", "--servers", "redis").stdout.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--servers", "oracle"), "oracle"), (("--late", "soon"), "soon"), (("--tasks", "many"), "many"),
        (("--twice", "perhaps"), "perhaps"),
    ],
)  # fmt: skip
def test_choose_says_what_it_would_accept(words: tuple[str, ...], named: str) -> None:
    assert named in error("choose", *words)


def test_choose_asks_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "bide", "lab", "choose", "--twice", "yes"],
            stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as asked:  # fmt: skip
            os.write(ours, b"5000\n50ms\nnone\nn\ny\ny\nn\n")
            text, _ = asked.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert asked.returncode == 0, text
    assert text.index("How many tasks") < text.index("By how much") < text.index("Which servers")
    assert text.index("Which servers") < text.index("several machines") < text.index("cancelled until its time")
    assert "May it be done twice" not in text, "an option has answered that"
    assert "needs no server" in text
    assert "gone with it" not in text
