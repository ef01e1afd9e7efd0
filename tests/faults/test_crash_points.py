"""What `python -m bide_proofs.crash_points` says of a store that is broken: the checker sees it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.stores.sqlite import SqliteStore
from bide.testing.history.check import check
from bide_proofs import crash_points

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


class Twice(SqliteStore):
    """Gives out each lease twice, with one token."""

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        leased = await super().lease(wants, now=now, until=until, holder=holder)
        return replace(leased, tasks=[*leased.tasks, *leased.tasks])


def test_what_a_broken_store_does_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_points, "SqliteStore", Twice)
    assert "P12" in {violation.promise for violation in check(crash_points.run(1, tmp_path)).violations}
