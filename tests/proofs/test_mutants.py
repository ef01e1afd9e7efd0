"""Every mutant of bide is caught by the seed on record; bide itself is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide_proofs.simulate.mutants import MUTANTS
from bide_proofs.simulate.mutants.trial import written, wrongs

RECORD = Path(__file__).resolve().parents[2] / "docs" / "correctness" / "mutants.jsonl"
"""Written by `python -m bide_proofs.simulate.mutants --results docs/correctness/mutants.jsonl`."""
CAUGHT = written(RECORD)
PLAYED_ANYWAY = 200
"""So many seeds of bide as it is are played by test_simulation.py, each for six minutes."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_seed_on_record_catches_it(name: str) -> None:
    assert wrongs(name, CAUGHT[name].seed), f"{name} is not caught by seed {CAUGHT[name].seed} any more: record it anew"


def test_bide_as_it_is_passes_the_plays_that_catch_mutants() -> None:
    plays = {(CAUGHT[name].seed, mutant.minutes) for name, mutant in MUTANTS.items()}
    for seed, minutes in sorted(plays):
        if seed > PLAYED_ANYWAY or minutes != 6:
            assert not wrongs("", seed, minutes), f"seed {seed}, {minutes} minutes"
