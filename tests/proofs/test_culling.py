"""A short form of `python -m bide_proofs.culling URL`: workers die under load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

SECONDS = 6
RATE = 300


@pytest.mark.parametrize("deployment", ["redis_url", "redis_sentinel_url", "redis_cluster_url"])
def test_workers_on_redis_die_and_nothing_acknowledged_is_lost(request: pytest.FixtureRequest, deployment: str) -> None:
    """P1, P2, P3, P4, P10 and P12, while one of two workers is killed every second."""
    culled(request.getfixturevalue(deployment))


def test_a_file_has_its_workers_killed_too(tmp_path: Path) -> None:
    culled(f"sqlite:///{tmp_path}/cull.db")


def culled(url: str) -> None:
    """All that is to be asked for is asked for, however long it takes: the counts say nothing about speed."""
    report = report_of("culling", url, "--seconds", f"{SECONDS}", "--rate", f"{RATE}", "--every", "1")
    assert not any(report["wrong"].values())
    assert report["kills"] >= 1
    load = report["load"]
    assert load["scheduled"] > 0.9 * SECONDS * RATE
    assert load["answers"]["cancel"]["cancelled"] > 0
    assert load["answers"]["reschedule"]["moved"] + load["answers"]["fire_now"]["moved"] > 0
    assert report["deliveries"] > 0.6 * SECONDS * RATE
