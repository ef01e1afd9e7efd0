"""Histories at random: those of a store that is right are accepted."""

from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testing.history.games import Game

from bide.testing.history.check import check
from bide.testing.history.events import Event


def game(seed: int, steps: int, *, lossy: float, slow: int) -> list[Event]:
    return asyncio.run(Game(Random(seed), lossy=lossy, slow=slow).play(steps))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32), steps=st.integers(1, 120), lossy=st.sampled_from([0.0, 0.1, 0.3]),
    slow=st.sampled_from([0, 3, 40, 200]),
)  # fmt: skip
def test_whatever_a_right_store_does_is_accepted(seed: int, steps: int, lossy: float, slow: int) -> None:
    report = check(game(seed, steps, lossy=lossy, slow=slow))
    assert [str(one) for one in report.violations] == []
    assert report.undecided == []
