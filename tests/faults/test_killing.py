"""The judge of `python -m bide_proofs.killing`."""

from __future__ import annotations

from typing import Any

import pytest

from bide_proofs.killing import check

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
