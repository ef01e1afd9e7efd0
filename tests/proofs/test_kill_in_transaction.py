"""A short form of `python -m bide_proofs.kill_in_transaction URL`: orders with timers, and everybody dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mysql"])
def test_exactly_the_committed_ones_fire(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db" if store == "sqlite" else request.getfixturevalue(f"{store}_schemas").url()
    report = report_of("kill_in_transaction", url, "--orders", "400", "--clients", "2", "--every", "0.3")
    assert not any(report["wrong"].values())
    assert report["orders"] == 400
    assert 0 < report["effects"] == report["committed"] < 400
    assert sum(report["killed"].values()) >= 1
