"""Mutants: applied for as long as they are wanted, refused where they do not fit. `tests/proofs` plays them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide.core import lifecycle
from bide.core.errors import BadInput
from bide_proofs.simulate.mutants import MUTANTS, Mutant, applied, trial
from bide_proofs.simulate.mutants.trial import written, wrongs

RECORD = Path(__file__).resolve().parents[2] / "docs" / "correctness" / "mutants.jsonl"


def test_there_are_mutants_of_every_promise_and_all_are_on_record() -> None:
    assert {mutant.promise for mutant in MUTANTS.values()} == {f"P{number}" for number in range(1, 13)}
    caught = written(RECORD)
    assert MUTANTS.keys() == caught.keys()
    assert all(one.seed <= 1_000 for one in caught.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mutant_changes_is_still_there(name: str) -> None:
    assert MUTANTS[name].code().co_name == MUTANTS[name].where.rpartition(".")[2].rpartition(":")[2]


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
    gone = Mutant("gone", "P1", "What it changes is not there.", "bide.core.lifecycle:may_lease", "no such words", "")
    with pytest.raises(BadInput, match="it is there 0 times"), gone.applied():
        pass


def test_a_mutant_that_stops_the_play_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(plan: object) -> None:
        raise KeyError("k1")

    monkeypatch.setattr(trial, "play", play)
    assert [str(one) for one in wrongs("keep-replaces", 1)] == ["defect: the play ended with KeyError('k1')"]
    with pytest.raises(KeyError):
        wrongs("", 1)
