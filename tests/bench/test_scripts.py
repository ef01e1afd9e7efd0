"""`bench.http` and `bench.peers` without their figures and peers: what their parts agree on, and what they refuse."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.bench.conftest import Script


@pytest.mark.parametrize(
    "name", ["command", "http_actors", *(f"contest.{name}" for name in ("client", "contestants", "report", "tasks"))]
)
def test_the_examples_in_the_docstrings_hold(part: Any, name: str) -> None:
    failed, tried = doctest.testmod(part(name))
    assert (failed, tried > 0) == (0, True)


# --- http


def test_it_says_when_wrk_is_missing(script: Script) -> None:
    refused = script("bench.http", "--only", "single", PATH="/nowhere")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "wrk is not installed; on Debian: apt-get install wrk" in refused.stderr


def test_each_figure_is_a_line_of_json(script: Script) -> None:
    few = ("--n", "50", "--seconds", "0.5", "--rate", "20")
    ran = script("bench.http", "--only", "webhooks", "--only", "long_poll", *few)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {line["workload"] for line in lines} == {"webhooks", "long_poll"}, ran.stderr
    early = [line["value"] for line in lines if line["figure"] == "early"]
    assert early == [0, 0]


# --- peers


def test_every_peer_has_a_module_pinned_requirements_and_a_say_about_its_settings(part: Any, root: Path) -> None:
    contestants = part("contest.contestants")
    peers = contestants.PEERS
    on_redis = {"docket", "arq", "saq", "dramatiq", "celery", "huey", "bullmq"}
    assert {name for name, peer in peers.items() if peer.server == "redis"} == on_redis
    on_postgres = {name for name, peer in peers.items() if peer.server == "postgres"}
    assert on_postgres == {"procrastinate", "graphile"}
    assert all(peers[name].setup for name in on_postgres)
    for peer in peers.values():
        module = root / "bench" / "contest" / "peers" / (f"{peer.name}.cjs" if peer.node else f"{peer.name}.py")
        assert "Settings" in module.read_text(encoding="utf-8")
        assert re.fullmatch(r"\d+(\.\d+)+", peer.version)
        entries = [line for line in peer.requirements.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        assert len(contestants.pins("\n".join(entries))) == len(entries)


def test_a_start_again_is_a_redelivery_before_the_end_and_a_duplicate_after_it(part: Any) -> None:
    lines = [
        "start 0000001 1000 1001000000",
        "start 0000001 1000 9000000000",
        "end 0000001 1000 9000000001",
        "start 0000001 1000 9500000000",
        "start 0000002 2000 1999000000",
    ]
    missing, undone, found = part("contest.report").examine(3, lines, sleeping=True)
    assert (found.redelivered, found.duplicated, found.early) == (1, 1, 1)
    assert (missing, undone) == ({3}, {2, 3})
    assert found.lateness == [-1.0, 1.0, 8000.0, 8500.0]
    assert (found.first_start, found.last_start) == (1_001_000_000, 9_500_000_000)


def test_the_command_explains_itself_and_refuses_whom_it_does_not_know(script: Script) -> None:
    helped = script("bench.peers", "--help")
    assert (helped.returncode, "recovered_ms" in helped.stdout) == (0, True)
    refused = script("bench.peers", "rq")
    assert (refused.returncode, "rq is not a peer" in refused.stderr) == (2, True)
