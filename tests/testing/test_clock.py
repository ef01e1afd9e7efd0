"""The clock that stands still."""

from __future__ import annotations

import pytest

from bide.core.instants import LAST_INSTANT
from bide.ports import Clock
from bide.testing import ManualClock


def test_it_is_a_clock() -> None:
    assert isinstance(ManualClock(), Clock)
    assert ManualClock().now() == ManualClock().now()


def test_it_moves_when_told_and_only_forward() -> None:
    clock = ManualClock(1_000)
    assert clock.now() == clock.now() == 1_000
    assert clock.advance(0) == 1_000
    assert clock.advance(250) == clock.now() == 1_250
    with pytest.raises(ValueError, match="turn_back"):
        clock.advance(-1)
    assert clock.now() == 1_250


def test_it_can_be_set_right_as_real_ones_are() -> None:
    clock = ManualClock(1_000)
    assert clock.turn_back(400) == 600
    assert clock.turn_back(4_000) == 0, "there is no time before the epoch"
    assert clock.advance(LAST_INSTANT * 2) == LAST_INSTANT


def test_it_says_how_long_to_sleep_and_how_far_it_goes_meanwhile() -> None:
    clock = ManualClock(1_000)
    assert (clock.seconds_until(3_500), clock.seconds_until(500)) == (2.5, -0.5)
    assert clock.span(30_000) == 30_000
