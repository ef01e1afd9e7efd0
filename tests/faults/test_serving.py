"""A short form of `python -m bide.testing.serving URL`, and tests of its judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bide.testing.serving.judge import Judgement
from bide.testing.serving.lines import Answered, Arrived, Killed, Line, Wrong
from bide.testing.serving.receiver import own_check

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")]


def report_of(url: str, *options: str) -> dict[str, Any]:
    """What a run reports that has found nothing wrong."""
    run = subprocess.run(
        [sys.executable, "-m", "bide.testing.serving", url, *options],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:] + run.stdout[-2000:]
    report: dict[str, Any] = json.loads(run.stdout)
    assert not any(report["wrong"].values())
    assert report["receiver"]["signatures_checked_by"] == "standardwebhooks"
    return report


def test_instances_on_redis_die_and_keep_their_word(redis_url: str, redis_namespace: str) -> None:
    """P1, P2, P3, P4, P5, P10 and P12 over HTTP, while one of two instances is killed every two seconds."""
    report = report_of(
        f"{redis_url}?namespace={redis_namespace}", "--seconds", "12", "--rate", "100", "--kill-every", "2"
    )
    assert report["kills"] >= 5
    assert report["load"]["acknowledged"] == 1_200
    answers = report["load"]["answers"]
    assert answers["cancel"]["cancelled"] > 100
    assert answers["move"]["moved"] > 100
    assert answers["replace"]["replaced"] > 20
    assert report["deliveries"]["applied"] > 900
    assert report["deliveries"]["repeated"] > 5  # the effect was applied, and the answer lost


def test_instances_on_a_file_die_too(tmp_path: Path) -> None:
    report = report_of(f"sqlite:///{tmp_path}/serving.db", "--seconds", "4", "--rate", "60", "--kill-every", "1.5")
    assert report["kills"] >= 2


def test_what_no_other_process_can_see_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bide.testing.serving", "memory:"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "no other process" in run.stderr


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
        ("lost", [CREATED, MOVED]),
        ("lost", [CREATED, FAILED]),
        ("lost", [CREATED, replace(ARRIVED, effect="stale")]),
        ("lost", [CREATED, replace(CANCELLED, result="not_found", id="")]),
        ("lost", [CREATED, replace(CANCELLED, result="finished (done)")]),
        ("lost", [CREATED, CANCELLED, REPLACED]),
        ("lost", [CREATED, ARRIVED, replace(REPLACED, unanswered=1)]),
        ("early", [CREATED, replace(ARRIVED, wall=100 * MS - 1)]),
        ("early", [CREATED, MOVED, ARRIVED]),
        ("early", [CREATED, MOVED, late(FAILED, 201), late(ARRIVED, 199)]),
        ("early", [CREATED, MOVED_UNSEEN, late(ARRIVED, 59)]),
        ("early", [CREATED, replace(MOVED_UNSEEN, unanswered=0), late(ARRIVED, 60)]),
        ("early", [CREATED, MOVED_UNSEEN, replace(MOVED, at=90 * MS), late(ARRIVED, 60)]),
        ("early", [CREATED, replace(MOVED_UNSEEN, asked_at=70 * MS, at=80 * MS), late(ARRIVED, 60)]),
        ("fired_after_cancel", [CREATED, CANCELLED, ARRIVED]),
        ("fired_after_cancel", [CREATED, CANCELLED, replace(ARRIVED, token=31)]),
        ("fired_after_cancel", [CREATED, ARRIVED, CANCELLED_LATE, KILLED, AGAIN]),
        ("fired_after_cancel", [CREATED, replace(CANCELLED_BEFORE, at=90 * MS), replace(ARRIVED, token=31)]),
        ("fired_after_move", [CREATED, replace(MOVED, token=21), ARRIVED]),
        ("fired_after_replace", [CREATED, REPLACED, replace(ARRIVED, token=51), SECOND]),
        ("applied_twice", [CREATED, ARRIVED, KILLED, replace(AGAIN, effect="applied")]),
        ("stale_applied", [CREATED, REPLACED, SECOND, late(ARRIVED, 301)]),
        ("strange_life", [CREATED, ARRIVED, replace(SECOND, token=41)]),
        ("redelivered_unkilled", [CREATED, ARRIVED, AGAIN]),
        ("redelivered_unkilled", [CREATED, ARRIVED, AGAIN, Killed(1, 3_102 * MS)]),
        ("redelivered_unkilled", [CREATED, ARRIVED, AGAIN, Killed(2, 102 * MS)]),
        ("not_rising", [CREATED, ARRIVED, KILLED, replace(AGAIN, token=20)]),
        ("not_rising", [CREATED, ARRIVED, KILLED, replace(AGAIN, attempt=1)]),
        ("failed_call", [CREATED, replace(MOVED, result="failed", id=""), ARRIVED]),
        ("left", [CREATED, ARRIVED, Wrong("left", "one is dead")]),
    ],
)
def test_each_wrong_history_is_found_out(kind: str, lines: Sequence[Line]) -> None:
    assert kind in found(lines)
    assert kind in found(lines[::-1])


def test_lateness_counts_the_first_arrival_of_each_life_and_recovery_what_the_dead_had_held() -> None:
    judgement = Judgement([CREATED, ARRIVED, KILLED, AGAIN])
    assert judgement.lateness == judgement.untouched == [1.0]
    assert judgement.recovered == [2.999]
    judgement = Judgement([CREATED, AGAIN])  # leased by one that died before it posted it
    assert judgement.lateness == [3001.0]
    assert judgement.untouched == []


def found(lines: Sequence[Line]) -> set[str]:
    return {kind for kind, count in Judgement(lines).counts.items() if count}
