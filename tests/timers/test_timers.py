"""Every timer by one set of rules, its examples, and the arithmetic of its slots."""

import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.instants import LAST_INSTANT, Millis
from bide.ports import Timer
from bide.testing.timer_suite import TimerSuite
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel
from bide.timers.hashed import passed
from bide.timers.idle import slot_after


class TestHeapTimer(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HeapTimer(start=start)


def test_a_heap_refuses_what_is_no_time() -> None:
    timer = HeapTimer[str]()
    with pytest.raises(TypeError):
        timer.add("a", "text")  # type: ignore[arg-type]
    timer.add("b", 1)
    assert timer.advance(1) == ["b"]


class TestHashedWheel(TimerSuite):
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(start=start)


class TestHashedWheelOfFewSlots(TimerSuite):
    """Nearly everything is laps away."""

    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        return HashedWheel(slots=7, start=start)


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


@pytest.mark.parametrize("name", ["hashed", "heap", "hierarchical", "idle"])
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"bide.timers.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@given(occupied=st.lists(st.booleans(), min_size=1, max_size=20), first=st.integers(0, 200), length=st.integers(1, 60))
def test_the_hand_passes_what_a_walk_would(occupied: list[bool], first: int, length: int) -> None:
    slots = len(occupied)
    walked = [number % slots for number in range(first, first + min(length, slots)) if occupied[number % slots]]
    assert list(passed(bytearray(occupied), first, first + length - 1)) == walked


@given(at=st.integers(0, LAST_INSTANT), tick=st.integers(1, 100_000))
def test_an_idle_slot_is_less_than_a_tick_late(at: int, tick: int) -> None:
    assert 0 <= slot_after(at, tick) * tick - at < tick
