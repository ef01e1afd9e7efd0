"""A short form of `python -m bide_proofs.soak URL`: nothing is lost or left. Only the long form tells what grows."""

from __future__ import annotations

import sys

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

RATE = 300
SECONDS = 4


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_nothing_is_lost_and_nothing_is_left(request: pytest.FixtureRequest, store: str) -> None:
    """P1, P2 and P10 after moves, cancels, retries, deaths, redrives and groups."""
    url = "sqlite:" if store == "sqlite" else str(request.getfixturevalue("redis_url"))
    report = report_of(
        "soak", url, "--minutes", f"{SECONDS / 60}", "--rate", f"{RATE}", "--soon", "1", "--measure", "0.3",
        "--every", "0.5",
    )  # fmt: skip
    assert report["judged"] is False, "so short a run still warms up: its slopes say nothing"
    assert not any(report["wrong"].values())
    assert report["lost"] == report["duplicated"] == report["early"] == report["failed"] == 0
    assert report["left"]["tasks"] == 0
    assert report["load"]["schedule"]["created"] > 0.9 * RATE * SECONDS
    assert report["load"]["cancel"]["cancelled"] > 0
    assert all(report["verdicts"][verdict] > 0 for verdict in ("done", "retry", "defer", "dead"))
    ended = report["verdicts"]["done"] + report["verdicts"]["dead"]
    assert report["deliveries"] >= sum(report["verdicts"].values()) >= ended > 0.4 * RATE * SECONDS
