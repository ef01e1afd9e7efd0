"""Workers are killed under load, and so is the server: nothing that was acknowledged is lost, or done after its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def begun(what: str, url: str, *options: str) -> subprocess.Popen[str]:
    """A run of `python -m bide_proofs.{what}`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"bide_proofs.{what}", url, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def culling(url: str) -> subprocess.Popen[str]:
    return begun("culling", url, "--seconds", "3", "--rate", "150", "--every", "1", "--workers", "2")


def report_of(run: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What it reports, and what it shows of what was wrong."""
    try:
        out, said = run.communicate(timeout=5 * PATIENCE)
    finally:
        run.kill()
    assert out, said[-2000:]
    report: dict[str, Any] = json.loads(out)
    return report, said


def test_workers_die_and_nothing_acknowledged_is_lost(url: str) -> None:
    report, _ = report_of(culling(url))
    assert not any(report["wrong"].values()), report["wrong"]
    assert report["kills"] >= 1
    assert report["deliveries"] >= 300


async def test_the_server_dies_too_and_nothing_acknowledged_is_lost(
    database: Database, own_server: Any, own_url: str
) -> None:
    database.migrate(own_url)
    run = culling(own_url)

    def many_calls() -> bool:
        [(most,)] = database.ask(own_url, "SELECT MAX(number) FROM {caller}")
        return run.poll() is not None or (most or 0) >= 60

    await until(many_calls, "a load")
    own_server.kill()
    own_server.start()
    report, said = report_of(run)
    # a crash may take the newest leases: somebody else gets a task whose worker still lives, as the same attempt, and
    # yet with a token that rises; or a client moves or cancels it before that
    allowed = {"redelivered_unkilled", "not_rising", "changed_while_held"}
    assert not {what: number for what, number in report["wrong"].items() if number and what not in allowed}
    assert report["deliveries"] >= 300
    for case in said.splitlines():
        if "not_rising" in case or "not rising" in case:
            tokens = [int(token) for token in re.findall(r"\btoken=(\d+)", case)]
            assert len(tokens) == 2
            assert tokens[0] < tokens[1]


def test_of_orders_of_which_half_are_rolled_back_the_committed_ones_fire_once(url: str) -> None:
    """Clients and workers are killed meanwhile."""
    run = begun("orders", url, "--orders", "600", "--clients", "2", "--workers", "2", "--every", "0.25")
    report, said = report_of(run)
    assert not any(report["wrong"].values()), said[-2000:]
    assert 0 < report["effects"] == report["committed"] < 600
    assert sum(report["killed"].values()) >= 1
