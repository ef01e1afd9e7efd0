"""The judge of `python -m bide_proofs.kill_in_transaction`."""

from __future__ import annotations

from typing import Any

import pytest

from bide import BadInput
from bide_proofs.kill_in_transaction.child import COMMITTED, KINDS, ROLLED_BACK, Tables, judge


def test_where_there_is_no_common_database_it_says_so() -> None:
    with pytest.raises(BadInput, match="postgresql:"):
        Tables("redis://localhost:6379/0", "orders")


GOOD: dict[str, Any] = {
    "said": {1: COMMITTED, 2: ROLLED_BACK, 3: "begun", 4: "begun"},
    "orders": [1, 3],
    "effects": [1, 3],
}
"""Order 3 was committed and its client died before it could say so, order 4 died with it."""


def test_a_good_history_is_not_blamed() -> None:
    assert judge(**GOOD) == {kind: [] for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("lost_order", {"orders": [3], "effects": [3]}),
        ("kept_order", {"orders": [1, 2, 3], "effects": [1, 2, 3]}),
        ("not_fired", {"effects": [1]}),
        ("fired_twice", {"effects": [1, 3, 1]}),
        ("fired_uncommitted", {"effects": [1, 2, 3]}),
        ("fired_uncommitted", {"effects": [1, 3, 4]}),
        ("left", {"left": ["1"]}),
        ("process_ended", {"ended": ["client 0 ended with 1"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_history_is_blamed_for_what_is_wrong_and_nothing_else(kind: str, change: dict[str, Any]) -> None:
    found = judge(**{**GOOD, **change})
    assert {kind for kind, cases in found.items() if cases} == {kind}
    assert len(found[kind]) == 1
