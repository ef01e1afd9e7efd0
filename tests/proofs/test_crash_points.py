"""A short form of `python -m bide_proofs.crash_points`: kill -9 between any two statements of a SQLite store."""

from __future__ import annotations

import sys

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_back() -> None:
    """P1, P2, P4, P10, P12 over a hundred files, each killed up to three times."""
    report = report_of("crash_points", "--runs", "100")
    assert not any(report["wrong"].values())
    assert report["undecided"] == 0
    assert report["kills"] > 50
    assert {"before commit", "after commit"} <= set(report["points"])
