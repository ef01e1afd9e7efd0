"""The judge of `python -m bide_proofs.culling`: a right history passes, and each kind of wrong is found out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bide.core.records import Verdict
from bide_proofs.culling.crew import LEASE
from bide_proofs.culling.judge import Judgement
from bide_proofs.culling.lines import Answered, Asked, Delivered, Ended, Journal, Killed, Left, Line, Settled, read

# One life, planned for the millisecond 100; other times are nanoseconds.
MS = 1_000_000
ASKED = Asked("schedule", "k", 0, "one")
CREATED = Answered("schedule", "k", 10 * MS, "created", "one", 5, 100)
DELIVERED = Delivered("k", "one", 20, 1, 100, 101 * MS, 1)
SETTLED = Settled("k", "one", 20, 103 * MS)
MOVED = Answered("reschedule", "k", 50 * MS, "moved", "one", 10, 200)
CANCELLED = Answered("cancel", "k", 60 * MS, "cancelled", "one", 30, 100)
CANCELLED_LATE = replace(CANCELLED, result="cancelled_while_leased", at=102 * MS)
KILLED = Killed(1, 102 * MS)
AGAIN = Delivered("k", "one", 40, 2, 100, 3_101 * MS, 2)
SETTLED_AGAIN = replace(SETTLED, token=40, at=3_103 * MS)
ANEW = [Asked("schedule", "k", 70 * MS, "two"), Answered("schedule", "k", 71 * MS, "created", "two", 50, 300)]


@pytest.mark.parametrize(
    "lines",
    [
        [ASKED, CREATED, DELIVERED, SETTLED],
        [ASKED, CREATED, DELIVERED, KILLED],  # it was settled, and nobody lived to hear so
        [ASKED, CREATED, DELIVERED, KILLED, AGAIN, SETTLED_AGAIN],
        [ASKED, CREATED, MOVED, replace(DELIVERED, planned_at=200, at=200 * MS)],
        [ASKED, CREATED, CANCELLED],
        [ASKED, CREATED, CANCELLED_LATE],  # leased, and its holder died before it began
        [ASKED, CREATED, DELIVERED, CANCELLED_LATE],
        [ASKED, CREATED, replace(CANCELLED_LATE, at=90 * MS), DELIVERED],  # leased before, and begun after the answer
        [ASKED, CREATED, CANCELLED, *ANEW, Delivered("k", "two", 60, 1, 300, 300 * MS, 1)],
        [ASKED],  # nobody was told that it is scheduled
        [ASKED, DELIVERED],
    ],
)
def test_a_right_history_passes(lines: Sequence[Line]) -> None:
    assert found(lines) == set()
    assert found(reversed(lines)) == set()  # logs are read one after the other, in any order


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("lost", [ASKED, CREATED]),
        ("lost", [ASKED, CREATED, CANCELLED, *ANEW]),
        ("early", [ASKED, CREATED, replace(DELIVERED, at=100 * MS - 1)]),
        ("early", [ASKED, CREATED, MOVED, DELIVERED]),
        ("fired_after_cancel", [ASKED, CREATED, CANCELLED, DELIVERED]),
        ("fired_after_cancel", [ASKED, CREATED, DELIVERED, CANCELLED_LATE, KILLED, AGAIN]),
        ("changed_while_held", [ASKED, CREATED, DELIVERED, replace(MOVED, token=21, at=102 * MS)]),
        ("fired_after_settle", [ASKED, CREATED, DELIVERED, SETTLED, KILLED, AGAIN]),
        ("settled_twice", [ASKED, CREATED, DELIVERED, SETTLED, replace(SETTLED, at=104 * MS)]),
        ("redelivered_unkilled", [ASKED, CREATED, DELIVERED, AGAIN]),
        ("redelivered_unkilled", [ASKED, CREATED, DELIVERED, AGAIN, Killed(1, 3_102 * MS)]),
        ("not_rising", [ASKED, CREATED, DELIVERED, KILLED, replace(AGAIN, token=20)]),
        ("not_rising", [ASKED, CREATED, DELIVERED, KILLED, replace(AGAIN, attempt=1)]),
        ("strange_id", [ASKED, CREATED, DELIVERED, KILLED, replace(AGAIN, id="two")]),
        ("not_done", [ASKED, CREATED, DELIVERED, replace(SETTLED, verdict=Verdict.RETRY)]),
        ("left", [ASKED, CREATED, DELIVERED, Left("k", "leased")]),
        ("failed_call", [ASKED, CREATED, replace(MOVED, result="failed"), DELIVERED]),
        ("worker_ended", [ASKED, CREATED, DELIVERED, Ended(1, 1)]),
    ],
)
def test_each_wrong_history_is_found_out(kind: str, lines: Sequence[Line]) -> None:
    assert kind in found(lines)
    assert kind in found(reversed(lines))


def test_a_cancel_that_failed_may_have_been_done() -> None:
    assert found([ASKED, CREATED, replace(CANCELLED, result="failed")]) == {"failed_call"}


def test_what_comes_back_a_lease_later_is_allowed_and_counted() -> None:
    """Its holder stood still for as long: so does a process on a busy machine."""
    later = replace(AGAIN, token=DELIVERED.token + int(LEASE * 1e6))
    judgement = Judgement([ASKED, CREATED, DELIVERED, later])
    assert not any(judgement.counts.values())
    assert judgement.lost_alive == 1


def test_lateness_counts_the_first_start_of_each_life() -> None:
    judgement = Judgement([ASKED, CREATED, DELIVERED, KILLED, AGAIN])
    assert judgement.redelivered == 1
    assert judgement.lateness == judgement.untouched == [1.0]
    judgement = Judgement([ASKED, CREATED, AGAIN])  # leased by one that died before it began
    assert judgement.lateness == [3001.0]
    assert judgement.untouched == []


def test_a_line_that_a_kill_cut_off_was_not_said(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    journal = Journal(path)
    for line in (DELIVERED, SETTLED):
        journal.say(line)
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read(path)) == [DELIVERED]


def found(lines: Sequence[Line] | Any) -> set[str]:
    return {kind for kind, count in Judgement(lines).counts.items() if count}
