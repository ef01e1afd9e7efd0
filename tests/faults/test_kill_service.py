"""What `python -m bide_proofs.kill_service` compares: what the receiver saw, and the history of the instances."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bide.core.records import OutcomeKind
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide_proofs.kill_service.receiver import NONE, REPEATED, STALE, Arrived, judge

MS = 1_000_000
BEGAN = ev.Began("worker-0.1", 101 * MS, 101, "steady", "k", "one", 20, 1, 100)
ARRIVED = Arrived("steady", "k", "one", 20, 1, 102 * MS)
SETTLING = ev.Settling(1, "worker-0.1", 103 * MS, 103, "steady", "k", 20, OutcomeKind.DONE)
TOLD = ev.Told(1, 104 * MS, 104, True)
DONE: list[Event] = [BEGAN, SETTLING, TOLD]
RETRY: list[Event] = [BEGAN, replace(SETTLING, verdict=OutcomeKind.RETRY), TOLD]
AGAIN: list[Event] = [
    replace(BEGAN, at=3_101 * MS, token=40, attempt=2), replace(SETTLING, call=2, at=3_103 * MS, token=40),
    replace(TOLD, call=2, at=3_104 * MS),
]  # fmt: skip
ARRIVED_AGAIN = replace(ARRIVED, token=40, attempt=2, at=3_102 * MS, effect=REPEATED)
FAILED = replace(ARRIVED, effect=NONE, acknowledged=False)
HUNG_UP = replace(ARRIVED, acknowledged=False)


@pytest.mark.parametrize(
    ("arrivals", "events"),
    [
        ([ARRIVED], DONE),
        ([ARRIVED, ARRIVED_AGAIN], [BEGAN, *AGAIN]),  # it was killed before it could settle
        ([FAILED, replace(ARRIVED_AGAIN, effect="applied")], [*RETRY, *AGAIN]),
        ([HUNG_UP, ARRIVED_AGAIN], [*RETRY, *AGAIN]),  # the reply was lost after the effect
        ([HUNG_UP, replace(ARRIVED, at=103 * MS, effect=REPEATED)], DONE),  # sent once more, on another connection
        ([FAILED], RETRY),
        ([replace(ARRIVED, effect=STALE)], DONE),  # a later life had come before
        ([ARRIVED], [BEGAN, replace(SETTLING, verdict=OutcomeKind.RETRY, at=9_000 * MS), TOLD]),  # it was given up
        ([ARRIVED], [BEGAN, SETTLING, replace(TOLD, ok=False)]),
        ([], [BEGAN]),
    ],
)
def test_what_may_be_is_not_blamed(arrivals: Sequence[Arrived], events: Sequence[Event]) -> None:
    assert {kind: cases for kind, cases in judge(arrivals, events).items() if cases} == {}


@pytest.mark.parametrize(
    ("kind", "arrivals", "events"),
    [
        ("unknown_delivery", [ARRIVED], []),
        ("unknown_delivery", [replace(ARRIVED, id="two")], RETRY),
        ("unknown_delivery", [replace(FAILED, attempt=2)], RETRY),
        ("unknown_delivery", [replace(FAILED, at=100 * MS)], RETRY),
        ("not_applied", [replace(ARRIVED, effect=REPEATED)], DONE),
        ("unacknowledged", [], DONE),
        ("unacknowledged", [HUNG_UP], DONE),
        ("unheard", [ARRIVED], RETRY),
        ("applied_twice", [ARRIVED, replace(ARRIVED_AGAIN, effect="applied")], [BEGAN, *AGAIN]),
        ("stale_applied", [ARRIVED_AGAIN, replace(ARRIVED, at=3_200 * MS)], [BEGAN, *AGAIN]),
    ],
)
def test_each_wrong_delivery_is_found(kind: str, arrivals: Sequence[Arrived], events: Sequence[Event]) -> None:
    assert len(judge(arrivals, events)[kind]) == 1
