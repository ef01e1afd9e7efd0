"""A short form of `python -m bide_proofs.kill_in_transaction URL`: orders with timers, and everybody dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of
from tests.servers.fixtures import Borrowed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def test_exactly_the_committed_ones_fire_on_sqlite(tmp_path: Path) -> None:
    ordered(f"sqlite:///{tmp_path}/shop.db")


def test_exactly_the_committed_ones_fire_on_postgres(postgres_schemas: Borrowed) -> None:
    ordered(postgres_schemas.url())


def test_exactly_the_committed_ones_fire_on_mysql(mysql_schemas: Borrowed) -> None:
    ordered(mysql_schemas.url())


def ordered(url: str) -> None:
    report = report_of("kill_in_transaction", url, "--orders", "400", "--clients", "2", "--every", "0.3")
    assert not any(report["wrong"].values())
    assert report["orders"] == 400
    assert 0 < report["effects"] == report["committed"] < 400
    assert sum(report["killed"].values()) >= 1
