"""Workers are killed under load, and so is the server: nothing that was acknowledged is lost, or done after its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.servers.fixtures import StartsMariaDb

from bide.stores.mysql import schema

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")]


def culling(url: str) -> subprocess.Popen[str]:
    """A run of `python -m bide.testing.culling` that has begun."""
    options = ("--seconds", "3", "--rate", "150", "--every", "1", "--workers", "2")
    return subprocess.Popen(
        [sys.executable, "-m", "bide.testing.culling", url, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def report_of(run: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What it reports, and what it shows of what was wrong."""
    try:
        out, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert out, said[-2000:]
    report: dict[str, Any] = json.loads(out)
    return report, said


async def test_workers_die_and_nothing_acknowledged_is_lost(url: str) -> None:
    await schema.migrate(url)
    report, _ = report_of(culling(url))
    assert not any(report["wrong"].values()), report["wrong"]
    assert report["kills"] >= 2
    assert report["deliveries"] >= 300


async def test_the_server_dies_too_and_nothing_acknowledged_is_lost(mariadb_server: StartsMariaDb) -> None:
    server = mariadb_server()
    await schema.migrate(server.url)
    run = culling(server.url)
    time.sleep(3.5)  # noqa: ASYNC251 - nobody else is on this loop
    server.kill()
    server.start()
    report, said = report_of(run)
    # a crash may take the newest leases: somebody else gets a task whose worker still lives, as the same attempt, and
    # yet with a token that rises
    allowed = {"redelivered_unkilled", "not_rising"}
    assert not {what: number for what, number in report["wrong"].items() if number and what not in allowed}
    assert report["deliveries"] >= 300
    for case in said.splitlines():
        if "not_rising" in case or "not rising" in case:
            tokens = [int(token) for token in re.findall(r"\btoken=(\d+)", case)]
            assert len(tokens) == 2
            assert tokens[0] < tokens[1]
