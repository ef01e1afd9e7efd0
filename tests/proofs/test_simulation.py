"""Two hundred seeds of six virtual minutes; and what makes a seed worth having: it replays, and shrinks to a story."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from tests.proofs.running import HANGS

from bide.testing.history.events import Began, Failed, Leased, encode
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.plan import Ask, plan_from, plan_of
from bide_proofs.simulate.world import Played, play

_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def digest(played: Played) -> str:
    """The same for two plays of one plan. Ids are drawn by the system, so they count by their order alone."""
    ids: dict[bytes, bytes] = {}
    sha = sha256()
    for event in played.history:
        sha.update(_ID.sub(lambda found: ids.setdefault(found[0], b"%d" % len(ids)), encode(event)))
    return sha.hexdigest()


@pytest.mark.parametrize("first", range(1, 201, 10))
def test_ten_seeds_break_no_promise(first: int) -> None:
    for seed in range(first, first + 10):
        plan = plan_of(seed)
        judgement = judged(plan, play(plan))
        assert not judgement.wrong, f"seed {seed}: {judgement.wrong[0]}"
        assert not judgement.report.undecided
        assert judgement.report.deliveries > 10


@pytest.mark.parametrize("seed", [2344, 2380, 2986, 3340, 4821, 4837, 5583, 8749])
def test_what_was_called_wrong_and_was_right_still_is(seed: int) -> None:
    """In each the store's clock is set back while a lease, an extension or a first answer is on its way."""
    plan = plan_of(seed)
    assert not judged(plan, play(plan)).wrong


def test_a_plan_plays_the_same_each_time_also_from_its_text() -> None:
    plan = plan_of(3, minutes=2)
    digests = {digest(play(plan)), digest(play(plan)), digest(play(plan_from(plan.text())))}
    assert len(digests) == 1
    assert digest(play(plan_of(4, minutes=2))) not in digests


def test_the_plans_meet_what_they_are_to_meet() -> None:
    """Every kind of step, and every way for a call to fail, occurs somewhere within a few seeds."""
    steps: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(1, 13):
        plan = plan_of(seed, minutes=4)
        steps.update(type(step).__name__ for step in plan.steps)
        steps.update(step.verb for step in plan.steps if isinstance(step, Ask))
        for event in play(plan).history:
            if isinstance(event, Failed):
                errors[event.error.split("(")[0]] += 1
            elif isinstance(event, Leased):
                happened["lost lease"] += any(held.task.losses for held in event.tasks)
            elif isinstance(event, Began):
                happened["retry"] += event.attempt > 1
    assert {"Ask", "Kill", "Stop", "Drain", "Storm", "Down", "Full", "Jump"} <= steps.keys()
    assert {"schedule", "many", "move", "fire", "cancel", "redrive", "get", "shift", "cancel_group"} <= steps.keys()
    assert {"OutcomeUnknown", "StoreUnavailable", "StoreFull"} <= errors.keys()
    assert happened["lost lease"] > 5
    assert happened["retry"] > 20


SHORT = ("--minutes", "1", "--processes", "1")


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bide_proofs.simulate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)


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
    assert [json.loads(line)["seed"] for line in state.read_text().splitlines()] == [1, 2, 3, 4, 5]


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
