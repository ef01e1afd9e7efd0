"""What a violation looks like to whoever reads it."""

from __future__ import annotations

from bide.core.records import State
from bide.testing.history.events import Held, Leased, Leasing, Seen
from bide.testing.history.report import Violation


def held(key: str) -> Held:
    return Held("t", key, Seen(f"id-{key}", State.LEASED, 5, 9, 5, 1, 0, 0, 7_000, 1))


def test_of_a_lease_of_many_tasks_only_its_own_is_told() -> None:
    leasing = Leasing(1, "worker-1", 1_000_000, 5, {"t": 10}, 9)
    leased = Leased(1, 3_000_000, 5, [held("a"), held("b"), held("c")], None)
    told = str(Violation("P1", "t", "b", "leased 3 ms before its wake", [leasing, leased]))
    first, second, third = told.splitlines()
    assert first == "P1 t/b: leased 3 ms before its wake"
    assert "+0.000 ms  leasing" in second
    assert "+2.000 ms  leased" in third
    assert "key=b" in third
    assert "key=a" not in third
    assert "key=c" not in third
