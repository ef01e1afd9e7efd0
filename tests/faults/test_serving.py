"""The judge of `python -m bide_proofs.serving`: a right history passes, and each kind of wrong is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bide_proofs.serving.instances import LEASE
from bide_proofs.serving.judge import Judgement
from bide_proofs.serving.lines import Answered, Arrived, Killed, Line, Wrong
from bide_proofs.serving.receiver import own_check


def test_where_the_library_is_missing_signatures_are_checked_all_the_same() -> None:
    """The example that standardwebhooks.com gives, of a time that is long over, and with another payload."""
    check = own_check("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    payload = b'{"test": 2432232314}'
    with pytest.raises(ValueError, match="not of now"):
        check(payload, headers)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.time", lambda: 1614265330.0)
        check(payload, headers)
        with pytest.raises(ValueError, match="no signature"):
            check(payload + b" ", headers)


# One life, planned for the millisecond 100; other times are nanoseconds, and both clocks began together.
MS = 1_000_000
CREATED = Answered("schedule", "k", 9 * MS, 10 * MS, "created", 0, "one", 5, 100, True)
ARRIVED = Arrived("k", "one", 20, 1, 1, 101 * MS, 101 * MS)
MOVED = Answered("move", "k", 49 * MS, 50 * MS, "moved", 0, "one", 10, 200, True)
MOVED_UNSEEN = replace(MOVED, result="finished (done)", unanswered=1, waiting=False, token=21, asked_for=60)
CANCELLED = Answered("cancel", "k", 59 * MS, 60 * MS, "cancelled", 0, "one", 30, 100)
CANCELLED_LATE = replace(CANCELLED, result="cancelled_while_leased", at=102 * MS)
CANCELLED_BEFORE = replace(CANCELLED, result="finished (cancelled)", unanswered=1)
KILLED = Killed(1, 102 * MS)
AGAIN = replace(ARRIVED, token=40, attempt=2, instance=2, at=3_101 * MS, wall=3_101 * MS, effect="repeated")
FAILED = replace(ARRIVED, effect="none", acknowledged=False)
REPLACED = Answered("replace", "k", 69 * MS, 70 * MS, "replaced", 0, "two", 50, 300, True)
SECOND = Arrived("k", "two", 60, 1, 1, 300 * MS, 300 * MS)


def late(arrived: Arrived, millisecond: int) -> Arrived:
    return replace(arrived, at=millisecond * MS, wall=millisecond * MS)


@pytest.mark.parametrize(
    "lines",
    [
        [CREATED, ARRIVED],
        [CREATED, ARRIVED, KILLED, AGAIN],
        [CREATED, replace(KILLED, at=100 * MS), ARRIVED, AGAIN],  # sent before the kill, and read after it
        [CREATED, FAILED, replace(AGAIN, effect="applied")],
        [CREATED, replace(ARRIVED, acknowledged=False), AGAIN],  # the answer of the receiver was lost
        [CREATED, MOVED, late(ARRIVED, 200)],
        [CREATED, late(FAILED, 101), replace(MOVED, at=103 * MS, token=25), replace(AGAIN, effect="applied")],
        [CREATED, CANCELLED],
        [CREATED, CANCELLED_LATE],  # leased, and its holder died before it posted it
        [CREATED, ARRIVED, CANCELLED_LATE],
        [CREATED, replace(CANCELLED_LATE, at=90 * MS), ARRIVED],  # leased before, and posted after the answer
        [CREATED, CANCELLED_BEFORE],  # the first answer was lost
        [CREATED, CANCELLED, REPLACED, SECOND],
        [CREATED, ARRIVED, replace(REPLACED, at=150 * MS), SECOND],
        [replace(CREATED, result="failed", id="", token=0, wake_at=0, waiting=False), ARRIVED],
        [CREATED, replace(REPLACED, unanswered=1), replace(SECOND, id="three")],  # the first sending was the later one
        [replace(CREATED, result="kept", unanswered=1, waiting=False, token=30, at=110 * MS), ARRIVED],
        [CREATED, MOVED_UNSEEN, late(ARRIVED, 60)],  # the answer that said so was lost
        [CREATED, MOVED_UNSEEN, late(ARRIVED, 100)],  # it had not been done
        [
            CREATED,
            replace(MOVED_UNSEEN, waiting=True, wake_at=99),
            late(FAILED, 60),
            replace(late(AGAIN, 99), effect="applied"),
        ],
    ],
)
def test_a_right_history_passes(lines: Sequence[Line]) -> None:
    assert found(lines) - {"failed_call"} == set()
    assert found(lines[::-1]) - {"failed_call"} == set()


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("lost", [CREATED]),
        ("lost", [CREATED, FAILED]),
        ("lost", [CREATED, CANCELLED, REPLACED]),
        ("early", [CREATED, replace(ARRIVED, wall=100 * MS - 1)]),
        ("early", [CREATED, MOVED, ARRIVED]),
        ("early", [CREATED, replace(MOVED_UNSEEN, unanswered=0), late(ARRIVED, 60)]),
        ("fired_after_cancel", [CREATED, CANCELLED, ARRIVED]),
        ("fired_after_cancel", [CREATED, ARRIVED, CANCELLED_LATE, KILLED, AGAIN]),
        ("fired_after_move", [CREATED, replace(MOVED, token=21), ARRIVED]),
        ("fired_after_replace", [CREATED, REPLACED, replace(ARRIVED, token=51), SECOND]),
        ("applied_twice", [CREATED, ARRIVED, KILLED, replace(AGAIN, effect="applied")]),
        ("stale_applied", [CREATED, REPLACED, SECOND, late(ARRIVED, 301)]),
        ("strange_life", [CREATED, ARRIVED, replace(SECOND, token=41)]),
        ("redelivered_unkilled", [CREATED, ARRIVED, AGAIN]),
        ("redelivered_unkilled", [CREATED, ARRIVED, AGAIN, Killed(1, 3_102 * MS)]),
        ("not_rising", [CREATED, ARRIVED, KILLED, replace(AGAIN, token=20)]),
        ("failed_call", [CREATED, replace(MOVED, result="failed", id=""), ARRIVED]),
        ("left", [CREATED, ARRIVED, Wrong("left", "one is dead")]),
    ],
)
def test_each_wrong_history_is_found_out(kind: str, lines: Sequence[Line]) -> None:
    assert kind in found(lines)
    assert kind in found(lines[::-1])


def test_what_comes_back_a_lease_later_is_allowed_and_counted() -> None:
    judgement = Judgement([CREATED, ARRIVED, replace(AGAIN, token=ARRIVED.token + int(LEASE * 1e6))])
    assert not any(judgement.counts.values())
    assert judgement.lost_alive == 1


def test_lateness_counts_the_first_arrival_of_each_life_and_recovery_what_the_dead_had_held() -> None:
    judgement = Judgement([CREATED, ARRIVED, KILLED, AGAIN])
    assert judgement.lateness == judgement.untouched == [1.0]
    assert judgement.recovered == [2.999]
    judgement = Judgement([CREATED, AGAIN])  # leased by one that died before it posted it
    assert judgement.lateness == [3001.0]
    assert judgement.untouched == []


def found(lines: Sequence[Line]) -> set[str]:
    return {kind for kind, count in Judgement(lines).counts.items() if count}
