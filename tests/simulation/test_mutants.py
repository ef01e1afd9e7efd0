"""Every mutant is caught by the seed on record; bide itself is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide.core import lifecycle
from bide.core.errors import BadInput
from bide.testing.simulate.mutants import MUTANTS, Mutant, applied, trial
from bide.testing.simulate.mutants.trial import written, wrongs

RECORD = Path(__file__).resolve().parents[2] / "docs" / "correctness" / "mutants.jsonl"
"""Written by `python -m bide.testing.simulate.mutants --results docs/correctness/mutants.jsonl`."""
CAUGHT = written(RECORD)
PLAYED_ANYWAY = 50
"""So many seeds of bide as it is are played by another test."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_seed_on_record_catches_it(name: str) -> None:
    assert CAUGHT[name].seed <= 1_000
    assert wrongs(name, CAUGHT[name].seed), f"{name} is not caught by seed {CAUGHT[name].seed} any more: record it anew"


@pytest.mark.parametrize("seed", sorted({one.seed for one in CAUGHT.values() if one.seed > PLAYED_ANYWAY}))
def test_bide_as_it_is_passes_the_seeds_that_catch_mutants(seed: int) -> None:
    assert not wrongs("", seed)


@pytest.mark.parametrize("minutes", sorted({mutant.minutes for mutant in MUTANTS.values()} - {6}))
def test_bide_as_it_is_passes_the_shorter_plays_too(minutes: float) -> None:
    for seed in {CAUGHT[name].seed for name, mutant in MUTANTS.items() if mutant.minutes == minutes}:
        assert not wrongs("", seed, minutes)


def test_there_are_mutants_of_every_promise() -> None:
    assert {mutant.promise for mutant in MUTANTS.values()} == {f"P{number}" for number in range(1, 13)}
    assert MUTANTS.keys() == CAUGHT.keys()


def test_a_mutant_lasts_as_long_as_it_is_applied() -> None:
    code = lifecycle.may_lease.__code__
    with applied("leased-before-it-is-due"):
        assert lifecycle.may_lease.__code__ is not code
        assert 5 in lifecycle.may_lease.__code__.co_consts
    assert lifecycle.may_lease.__code__ is code


def test_a_mutant_that_there_is_not() -> None:
    with pytest.raises(BadInput, match="keep-replaces"), applied("no-such"):
        pass


def test_a_mutant_whose_words_are_not_in_the_source() -> None:
    gone = Mutant("gone", "P1", "What it changes is not there.", lifecycle.may_lease, "no such words", "")
    with pytest.raises(BadInput, match="it is there 0 times"), gone.applied():
        pass


def test_a_mutant_that_stops_the_play_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(plan: object) -> None:
        raise KeyError("k1")

    monkeypatch.setattr(trial, "play", play)
    assert [str(one) for one in wrongs("keep-replaces", 1)] == ["defect: the play ended with KeyError('k1')"]
    with pytest.raises(KeyError):
        wrongs("", 1)
