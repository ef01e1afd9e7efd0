"""`python -m bide.testing.simulate`: seeds, a state to go on from, and the story of what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SHORT = ("--minutes", "1", "--processes", "1")


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bide.testing.simulate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_seeds_that_were_right_are_not_played_again(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    first = simulate("--seed", "1", "--seeds", "3", "--state", str(state), *SHORT)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["seeds"] == 3
    again = simulate("--seed", "1", "--seeds", "5", "--state", str(state), *SHORT)
    report = json.loads(again.stdout)
    assert report["seeds"] == 2
    assert report["wrong"] == report["undecided"] == 0
    assert report["virtual_hours"] == 0.0  # two minutes
    done = [seed for line in state.read_text().splitlines() for seed in json.loads(line)["done"]]
    assert sorted(done) == [1, 2, 3, 4, 5]


def test_what_is_wrong_becomes_a_story_whose_plan_can_be_played_again(tmp_path: Path) -> None:
    broken = ("--mutant", "leased-before-it-is-due", *SHORT)
    told = simulate("--seed", "1", "--seeds", "3", *broken)
    assert told.returncode == 1
    assert "seed 1: P" in told.stderr
    assert " is broken, with seed 1: " in told.stdout
    assert "went through:" in told.stdout
    plan = tmp_path / "plan.json"
    plan.write_text(told.stdout.rsplit("for --plan:\n", 1)[1])
    steps = json.loads(plan.read_text())["steps"]
    assert len(steps) < 10
    assert simulate("--plan", str(plan), *broken).returncode == 1
    well = simulate("--plan", str(plan), *SHORT)
    assert well.returncode == 0
    assert "nothing is wrong" in well.stdout


def test_bad_words_are_refused() -> None:
    refused = simulate("--minutes", "0")
    assert refused.returncode == 2
    assert "--minutes: 0.0 is not accepted; give a number above 0" in refused.stderr
    unknown = simulate("--mutant", "no-such-mutant", "--seeds", "1")
    assert unknown.returncode == 2
    assert "no-such-mutant" in unknown.stderr
