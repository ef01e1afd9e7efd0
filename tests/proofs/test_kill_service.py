"""A short form of `python -m bide_proofs.kill_service URL`: instances of `bide serve` die under load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def test_instances_on_redis_die_and_keep_their_word(redis_url: str, redis_namespace: str) -> None:
    served(f"{redis_url}?namespace={redis_namespace}")


def test_instances_on_a_file_die_too(tmp_path: Path) -> None:
    served(f"sqlite:///{tmp_path}/serving.db")


def served(url: str) -> None:
    report = report_of(
        "kill_service", url, "--seconds", "10", "--least", "300", "--rate", "100", "--farthest", "3", "--pace", "2"
    )
    assert not any(report["wrong"].values())
    assert report["checked"]["undecided"] == 0
    assert report["faults"]["kill -9 of a worker"] >= 1
    assert report["load"]["verbs"]["cancel"]["cancelled"] > 0
    receiver = report["receiver"]
    assert receiver["hung up"] > 0
    assert receiver["deliveries"]["applied"] > 150
    assert receiver["deliveries"]["repeated"] > 0
