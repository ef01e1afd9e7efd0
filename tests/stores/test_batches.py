"""How SQL stores part their batches, and what they expect of them."""

from __future__ import annotations

from bide.stores.batches import Conflicts


def test_one_key_that_was_there_makes_wary_for_so_many_batches() -> None:
    conflicts = Conflicts()
    assert not conflicts.likely
    conflicts.missed()
    conflicts.met()
    for _ in range(Conflicts.BATCHES - 1):
        conflicts.missed()
        assert conflicts.likely
    conflicts.missed()
    assert not conflicts.likely
