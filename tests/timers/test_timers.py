"""The arithmetic of the wheel, and every timer by one set of rules."""

import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.instants import LAST_INSTANT, Millis
from bide.ports import Timer
from bide.testing.timer_suite import TimerSuite
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel, hierarchical
from bide.timers.hashed import passed
from bide.timers.idle import slot_after


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


TIMES = st.integers(0, LAST_INSTANT)


@pytest.mark.parametrize("name", ["hashed", "heap", "hierarchical", "idle"])
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"bide.timers.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("elapsed", "at", "level"),
    [
        (0, 0, 0), (0, 1, 0), (0, 255, 0), (0, 256, 1), (0, 65_535, 1), (0, 65_536, 2), (255, 256, 1), (256, 511, 0),
        (7, 3, 0), (0, 2**24, 3), (0, 2**32, 4), (2**40 - 1, 2**40, 5), (0, LAST_INSTANT, 5),
    ],
)  # fmt: skip
def test_level_for(elapsed: int, at: int, level: int) -> None:
    assert hierarchical.level_for(elapsed, at) == level


@given(elapsed=TIMES, at=TIMES)
def test_a_time_lies_in_the_span_of_its_bucket(elapsed: int, at: int) -> None:
    bucket = hierarchical.bucket_for(elapsed, at)
    assert max(elapsed, at) in hierarchical.span_of(elapsed, bucket)


@given(elapsed=TIMES, first=TIMES, second=TIMES)
def test_later_buckets_have_higher_numbers(elapsed: int, first: int, second: int) -> None:
    first, second = sorted((first, second))
    assert hierarchical.bucket_for(elapsed, first) <= hierarchical.bucket_for(elapsed, second)


@given(times=st.lists(TIMES, min_size=3, max_size=3).map(sorted))
def test_a_bucket_keeps_its_number_until_it_begins(times: list[int]) -> None:
    elapsed, later, at = times
    bucket = hierarchical.bucket_for(elapsed, at)
    span = hierarchical.span_of(elapsed, bucket)
    if later < span.start:
        assert hierarchical.bucket_for(later, at) == bucket
        assert hierarchical.span_of(later, bucket) == span


@given(elapsed=TIMES, at=TIMES)
def test_the_wheel_files_where_the_functions_say(elapsed: int, at: int) -> None:
    wheel = hierarchical.HierarchicalWheel[str](start=elapsed)
    wheel.add("a", at)
    assert list(wheel._buckets) == [hierarchical.bucket_for(elapsed, at)]


@given(occupied=st.lists(st.booleans(), min_size=1, max_size=20), first=st.integers(0, 200), length=st.integers(1, 60))
def test_the_hand_passes_what_a_walk_would(occupied: list[bool], first: int, length: int) -> None:
    slots = len(occupied)
    walked = [number % slots for number in range(first, first + min(length, slots)) if occupied[number % slots]]
    assert list(passed(bytearray(occupied), first, first + length - 1)) == walked


@given(at=TIMES, tick=st.integers(1, 100_000))
def test_an_idle_slot_is_less_than_a_tick_late(at: int, tick: int) -> None:
    assert 0 <= slot_after(at, tick) * tick - at < tick
