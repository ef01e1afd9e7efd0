"""A short form of `python -m bide_proofs.serving URL`: instances of `bide serve` die under load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

SECONDS = 8
RATE = 80


def test_instances_on_redis_die_and_keep_their_word(redis_url: str, redis_namespace: str) -> None:
    """P1, P2, P3, P4, P5, P10 and P12 over HTTP, while one of two instances is killed again and again."""
    served(f"{redis_url}?namespace={redis_namespace}")


def test_instances_on_a_file_die_too(tmp_path: Path) -> None:
    served(f"sqlite:///{tmp_path}/serving.db")


def served(url: str) -> None:
    report = report_of("serving", url, "--seconds", f"{SECONDS}", "--rate", f"{RATE}", "--kill-every", "1.5")
    assert not any(report["wrong"].values())
    assert report["receiver"]["signatures_checked_by"] == "standardwebhooks"
    assert report["kills"] >= 1
    assert report["load"]["acknowledged"] == SECONDS * RATE
    answers = report["load"]["answers"]
    assert answers["cancel"]["cancelled"] > 0
    assert answers["move"]["moved"] > 0
    assert answers["replace"]["replaced"] > 0
    assert report["deliveries"]["applied"] > 0.5 * SECONDS * RATE
