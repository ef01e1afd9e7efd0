"""A short form of `python -m bide.testing.culling URL`, and tests of its judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bide.core.records import Verdict
from bide.testing.culling.judge import Judgement
from bide.testing.culling.lines import Answered, Asked, Delivered, Ended, Journal, Killed, Left, Line, Settled, read

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")]


def culling(url: str, *options: str) -> subprocess.Popen[str]:
    """A run that has begun."""
    return subprocess.Popen(
        [sys.executable, "-m", "bide.testing.culling", url, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def report_of(run: subprocess.Popen[str]) -> dict[str, Any]:
    """What it reports when it ends, having found nothing wrong."""
    try:
        out, said = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 0, said[-2000:] + out[-2000:]
    report: dict[str, Any] = json.loads(out)
    assert not any(report["wrong"].values())
    return report


SECONDS = 4
URLS = {"single": "redis_url", "sentinel": "redis_sentinel_url", "cluster": "redis_cluster_url"}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Mapping[str, subprocess.Popen[str]]]:
    """On every deployment at the same time, since each spends most of it waiting."""
    urls = {deployment: request.getfixturevalue(fixture) for deployment, fixture in URLS.items()}
    options = ("--seconds", f"{SECONDS}", "--rate", "300", "--every", "1")
    begun = {deployment: culling(url, *options) for deployment, url in urls.items()}
    yield begun
    for run in begun.values():
        run.kill()
        run.communicate()


@pytest.mark.parametrize("deployment", URLS)
def test_workers_on_redis_die_and_nothing_acknowledged_is_lost(
    runs: Mapping[str, subprocess.Popen[str]], deployment: str
) -> None:
    """P1, P2, P3, P4, P10 and P12, while one of two workers is killed every second."""
    report = report_of(runs[deployment])
    assert report["kills"] >= SECONDS - 1
    assert report["load"]["scheduled"] > 250 * SECONDS
    answers = report["load"]["answers"]
    assert answers["cancel"]["cancelled"] > 15 * SECONDS
    assert answers["reschedule"]["moved"] + answers["fire_now"]["moved"] > 15 * SECONDS
    assert report["deliveries"] > 180 * SECONDS


def test_a_file_has_its_workers_killed_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/cull.db"
    report = report_of(culling(url, "--seconds", "2", "--rate", "200", "--every", "0.7", "--workers", "3"))
    assert report["kills"] >= 2


def test_what_no_other_process_can_see_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bide.testing.culling", "memory:"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "no other process" in run.stderr


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
        ("lost", [ASKED, CREATED, MOVED]),
        ("lost", [ASKED, CREATED, replace(CANCELLED, result="not_found", id="")]),
        ("lost", [ASKED, CREATED, CANCELLED, *ANEW]),
        ("early", [ASKED, CREATED, replace(DELIVERED, at=100 * MS - 1)]),
        ("early", [ASKED, CREATED, replace(DELIVERED, planned_at=99)]),
        ("early", [ASKED, CREATED, MOVED, DELIVERED]),
        ("early", [ASKED, CREATED, MOVED, DELIVERED, KILLED, AGAIN]),
        ("fired_after_cancel", [ASKED, CREATED, CANCELLED, replace(DELIVERED, token=31)]),
        ("fired_after_cancel", [ASKED, CREATED, CANCELLED, DELIVERED]),
        ("fired_after_cancel", [ASKED, CREATED, DELIVERED, CANCELLED_LATE, KILLED, AGAIN]),
        ("fired_after_cancel", [ASKED, CREATED, CANCELLED, *ANEW, replace(DELIVERED, token=60)]),
        ("changed_while_held", [ASKED, CREATED, DELIVERED, replace(MOVED, token=21, at=102 * MS)]),
        ("changed_while_held", [ASKED, CREATED, DELIVERED, replace(CANCELLED, at=102 * MS)]),
        ("fired_after_settle", [ASKED, CREATED, DELIVERED, SETTLED, KILLED, AGAIN]),
        ("fired_after_settle", [ASKED, CREATED, SETTLED, replace(DELIVERED, token=19, at=104 * MS)]),
        ("settled_twice", [ASKED, CREATED, DELIVERED, SETTLED, replace(SETTLED, at=104 * MS)]),
        ("redelivered_unkilled", [ASKED, CREATED, DELIVERED, AGAIN]),
        ("redelivered_unkilled", [ASKED, CREATED, DELIVERED, AGAIN, Killed(1, 3_102 * MS)]),
        ("redelivered_unkilled", [ASKED, CREATED, DELIVERED, AGAIN, Killed(2, 102 * MS)]),
        ("not_rising", [ASKED, CREATED, DELIVERED, KILLED, replace(AGAIN, token=20)]),
        ("not_rising", [ASKED, CREATED, DELIVERED, KILLED, replace(AGAIN, attempt=1)]),
        ("not_rising", [ASKED, CREATED, DELIVERED, *ANEW, Delivered("k", "two", 20, 1, 300, 300 * MS, 1)]),
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
