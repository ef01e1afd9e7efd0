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


def test_what_was_queued_while_a_process_stood_still_may_be_late_by_a_minute() -> None:
    assert not wrongs(1048), "with catch_up none"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("store", ["sqlite", "redis", "postgres", "mysql"])
def test_a_deploy_at_the_instant_neither_loses_nor_doubles_it(store: str, request: pytest.FixtureRequest) -> None:
    url: Any = "sqlite:" if store == "sqlite" else request.getfixturevalue(f"{store}_url")
    report = report_of("deploys", url, "--deploys", "6")
    assert report["kill -9"] + report["SIGTERM"] == 6
