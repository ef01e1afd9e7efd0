"""kill -9 at any moment: the short form of `python -m bide.testing.killing --runs 500`, and tests of its own judge."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bide.testing.killing import check

pytestmark = pytest.mark.faults


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_back() -> None:
    """P1, P2, P4, P10, P12 over forty files, each killed up to three times between any two statements."""
    run = subprocess.run(
        [sys.executable, "-m", "bide.testing.killing", "--runs", "40"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout)
    assert report["wrong"] == 0
    assert report["kills"] > 40
    assert {"before commit", "after commit", "from outside"} <= set(report["points"])


SCHEDULED = {"what": "scheduled", "key": "k", "id": "one"}
DELIVERED = {"what": "delivered", "key": "k", "id": "one", "token": 5, "at": 100, "planned_at": 100}
DONE = {"what": "done", "key": "k", "id": "one"}
END = {"what": "end"}


def test_a_right_history_passes() -> None:
    again = {**DELIVERED, "token": 7, "at": 180}
    assert check([SCHEDULED, DELIVERED, again, DONE, END]) == []
    assert check([SCHEDULED, {"what": "cancelling", "key": "k"}, END]) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([SCHEDULED, END], "acknowledged and lost"),
        ([SCHEDULED, DELIVERED, DONE, {**DELIVERED, "token": 9}, END], "delivered after it was acknowledged as done"),
        ([SCHEDULED, {**DONE, "what": "cancelled"}, DELIVERED, END], "acknowledged as cancelled"),
        ([SCHEDULED, {**DELIVERED, "at": 99}, END], "1 ms early"),
        ([SCHEDULED, DELIVERED, DELIVERED, END], "not above 5"),
        ([SCHEDULED, {**DELIVERED, "id": "two"}, END], "changed its id"),
        ([SCHEDULED, DELIVERED, {"what": "left", "key": "k", "state": "leased"}, END], "left behind"),
        ([SCHEDULED, DELIVERED, DONE], "did not come to its end"),
    ],
)
def test_each_wrong_history_is_found_out(lines: list[dict[str, Any]], problem: str) -> None:
    assert any(problem in found for found in check(lines)), check(lines)
