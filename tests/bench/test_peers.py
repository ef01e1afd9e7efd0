"""`bench.peers` without its peers: the table of contestants, the arithmetic, and what its parts agree on."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTEST = ROOT / "bench" / "contest"


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of `bench.contest` by name. The folder is no part of the package, so it is put on the path."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.contest.{name}")


@pytest.mark.parametrize("name", ["client", "contestants", "report", "tasks"])
def test_the_examples_in_the_docstrings_hold(contest: Any, name: str) -> None:
    failed, tried = doctest.testmod(contest(name))
    assert (failed, tried > 0) == (0, True)


def test_every_peer_has_a_module_pinned_requirements_and_a_say_about_its_settings(contest: Any) -> None:
    peers = contest("contestants").PEERS
    on_redis = {"docket", "arq", "saq", "dramatiq", "celery", "huey", "bullmq"}
    assert {name for name, peer in peers.items() if peer.server == "redis"} == on_redis
    on_postgres = {name for name, peer in peers.items() if peer.server == "postgres"}
    assert on_postgres == {"procrastinate", "graphile"}
    assert all(peers[name].setup for name in on_postgres)
    for peer in peers.values():
        module = CONTEST / "peers" / (f"{peer.name}.cjs" if peer.node else f"{peer.name}.py")
        assert "Settings" in module.read_text(encoding="utf-8")
        assert re.fullmatch(r"\d+(\.\d+)+", peer.version)
        entries = [line for line in peer.requirements.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        assert len(contest("contestants").pins("\n".join(entries))) == len(entries)


def test_a_start_again_is_a_redelivery_before_the_end_and_a_duplicate_after_it(contest: Any) -> None:
    lines = [
        "start 0000001 1000 1001000000",
        "start 0000001 1000 9000000000",
        "end 0000001 1000 9000000001",
        "start 0000001 1000 9500000000",
        "start 0000002 2000 1999000000",
    ]
    missing, undone, found = contest("report").examine(3, lines, sleeping=True)
    assert (found.redelivered, found.duplicated, found.early) == (1, 1, 1)
    assert (missing, undone) == ({3}, {2, 3})
    assert found.lateness == [-1.0, 1.0, 8000.0, 8500.0]
    assert (found.first_start, found.last_start) == (1_001_000_000, 9_500_000_000)


def test_the_command_explains_itself_and_refuses_whom_it_does_not_know() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bench.peers", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    helped = run("--help")
    assert (helped.returncode, "recovered_ms" in helped.stdout) == (0, True)
    refused = run("rq")
    assert (refused.returncode, "rq is not a peer" in refused.stderr) == (2, True)
