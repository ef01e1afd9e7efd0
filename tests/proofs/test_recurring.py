"""Short forms of the proofs of recurring tasks: 200 seeds in virtual time, and deploys with real processes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.proofs.running import report_of

from bide_proofs.simulate.recurring import wrongs


@pytest.mark.parametrize("first", range(1, 201, 20))
def test_twenty_seeds_give_each_instant_exactly_one_task(first: int) -> None:
    for seed in range(first, first + 20):
        assert not wrongs(seed), f"seed {seed}"


@pytest.mark.parametrize("seed", [1048, 4588, 2565])
def test_what_comes_while_an_occurrence_stands_still_overlaps_with_it(seed: int) -> None:
    """Queued, it may be late by a minute with catch_up none, and is not dropped with latest; skipped, none is left."""
    assert not wrongs(seed)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("store", ["sqlite", "redis", "postgres", "mysql"])
def test_a_deploy_at_the_instant_neither_loses_nor_doubles_it(store: str, request: pytest.FixtureRequest) -> None:
    url: Any = "sqlite:" if store == "sqlite" else request.getfixturevalue(f"{store}_url")
    report = report_of("deploys", url, "--deploys", "6")
    assert report["kill -9"] + report["SIGTERM"] == 6
