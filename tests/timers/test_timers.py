"""The shipped suite, bound to each timer in several shapes."""

from typing import Any

import pytest

from bide.core.instants import Millis
from bide.ports import Timer
from bide.testing.timer_suite import TimerSuite
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel


class TestHeapTimer(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HeapTimer(start=start)


class TestHashedWheel(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(start=start)


class TestHashedWheelOfFewSlots(TimerSuite):
    """Nearly everything is laps away."""

    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(slots=7, start=start)


class TestHashedWheelOfOneSlot(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(slots=1, start=start)


class TestHashedWheelOfSeconds(TimerSuite):
    """A coarse tick changes the cost, not the answers."""

    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(tick=1000, slots=3600, start=start)


class TestHierarchicalWheel(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HierarchicalWheel(start=start)


@pytest.mark.parametrize(("tick", "slots"), [(0, 8), (1, 0), (-1, 8)])
def test_a_hashed_wheel_has_slots_and_a_tick(tick: int, slots: int) -> None:
    with pytest.raises(ValueError, match="tick and slots must be 1 or more"):
        HashedWheel[str](tick=tick, slots=slots)


def test_a_hierarchical_wheel_starts_at_zero_or_later() -> None:
    with pytest.raises(ValueError, match="start must be 0 or later"):
        HierarchicalWheel[str](start=-1)
