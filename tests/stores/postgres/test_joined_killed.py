"""Orders with timers, half of them rolled back, clients and workers killed: exactly the committed ones fire, once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")]


def test_exactly_the_committed_ones_fire_and_each_effect_is_there_once(url: str) -> None:
    options = ("--orders", "1500", "--clients", "2", "--workers", "2", "--every", "0.25")
    run = subprocess.run(
        [sys.executable, "-m", "bide.testing.orders", url, *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:] + run.stdout[-2000:]
    report: dict[str, Any] = json.loads(run.stdout)
    assert not any(report["wrong"].values())
    assert 0 < report["effects"] == report["committed"] < 1500
    assert sum(report["killed"].values()) >= 3
