"""Two thousand cases of each target, always the same: a short form of `make fuzz`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from bide_proofs.fuzz.running import Target, run
from bide_proofs.fuzz.targets import TARGETS

SEED = 20_270_115
CASES = {"config": 200, "arguments": 400, "requests": 500, "answers": 200, "files": 40, "values": 40}
"""Of the targets whose cases cost milliseconds."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_is_found(target: Target, tmp_path: Path) -> None:
    if target.needs and shutil.which(target.needs) is None:
        pytest.skip(f"there is no {target.needs} on this machine")
    outcome = asyncio.run(run(target, tmp_path, seed=SEED, cases=CASES.get(target.name, 2_000)))
    assert outcome.finds == []
    assert outcome.cases > 0
