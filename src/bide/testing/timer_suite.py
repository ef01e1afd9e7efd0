"""The contract of a timer, as tests: subclass `TimerSuite`, make your timer in it, and pytest runs all tests.

    class TestMyTimer(TimerSuite):
        def make_timer(self, start=0):
            return MyTimer(start=start)

A timer that fires to the millisecond passes (so do bide's own with any tick, for they compare the time itself).
"""

from __future__ import annotations

import random
import weakref
from abc import ABC, abstractmethod
from typing import Any

import pytest

from bide.core.instants import LAST_INSTANT, Millis
from bide.ports import Timer

NOW: Millis = 1_700_000_000_000
"""An arbitrary present, in 2023."""


def deadline_of(timer: Timer[Any]) -> Millis:
    """The timer's next deadline; fails if the timer is empty."""
    deadline = timer.next_deadline()
    assert deadline is not None
    return deadline


class TimerSuite(ABC):
    """The rules of every timer, whatever its implementation."""

    @abstractmethod
    def make_timer(self, start: Millis = 0) -> Timer[Any]:
        """Make an empty timer whose present is `start`."""

    @pytest.fixture
    def timer(self) -> Timer[Any]:
        return self.make_timer(NOW)

    # ---- one item

    @pytest.mark.parametrize("item", [0, "", None, (1, "a"), frozenset({1}), b"\0", -1])
    def test_any_hashable_is_an_item(self, timer: Timer[Any], item: Any) -> None:
        timer.add(item, NOW + 1)
        assert item in timer
        assert timer.move(item, NOW + 2)
        assert timer.advance(NOW + 2) == [item]

    def test_items_of_one_instant_that_cannot_be_compared(self, timer: Timer[Any]) -> None:
        items = [object(), "text", 3, None, (1,)]
        for item in items:
            timer.add(item, NOW + 9)
        assert set(timer.advance(NOW + 9)) == set(items)

    # ---- when

    @pytest.mark.parametrize(
        "delay",
        [1, 2, 63, 64, 255, 256, 257, 999, 4095, 4096, 4097, 65_535, 65_536, 3_600_000, 86_400_000]
        + [2**bits + off for bits in (24, 31, 32, 33, 40) for off in (-1, 0, 1)],
    )
    def test_exact_at_every_distance(self, timer: Timer[Any], delay: Millis) -> None:
        timer.add("a", NOW + delay)
        assert timer.advance(NOW + delay - 1) == []
        assert timer.advance(NOW + delay) == ["a"]

    @pytest.mark.parametrize("delay", [1, 255, 256, 4096, 100_000])
    @pytest.mark.parametrize("step", [1, 7, 256, 5000])
    def test_exact_in_small_steps(self, timer: Timer[Any], delay: Millis, step: Millis) -> None:
        timer.add("a", NOW + delay)
        now = NOW
        while now + step < NOW + delay:
            now += step
            assert timer.advance(now) == []
        assert timer.advance(NOW + delay - 1) == []
        assert timer.advance(NOW + delay) == ["a"]

    @pytest.mark.parametrize("start", [0, 1, 255, 256, 65_535, 2**32 - 1, NOW])
    def test_exact_from_every_start(self, start: Millis) -> None:
        timer = self.make_timer(start)
        for delay in (0, 1, 3, 256, 70_000):
            timer.add(delay, start + delay)
        assert [timer.advance(start + delay) for delay in (0, 1, 3, 256, 70_000)] == [[0], [1], [3], [256], [70_000]]

    def test_the_past_is_due_at_the_next_advance(self, timer: Timer[Any]) -> None:
        timer.advance(NOW + 50)
        for at in (NOW + 50, NOW + 49, NOW, NOW - 10**9, 0, -5):
            timer.add(at, at)
        assert deadline_of(timer) <= 0
        assert timer.advance(NOW + 50) == [-5, 0, NOW - 10**9, NOW, NOW + 49, NOW + 50]

    def test_year_9999(self, timer: Timer[Any]) -> None:
        timer.add("far", LAST_INSTANT)
        timer.add("near", NOW + 1)
        assert timer.advance(NOW + 1) == ["near"]
        assert timer.advance(LAST_INSTANT - 1) == []
        assert timer.advance(LAST_INSTANT) == ["far"]

    @pytest.mark.parametrize("empty", [False, True])
    def test_without_a_start_the_first_advance_does_not_count_ticks(self, *, empty: bool) -> None:
        timer = self.make_timer()
        if not empty:
            timer.add("a", NOW + 3)
        assert timer.advance(NOW) == []
        timer.add("a", NOW + 3)
        timer.add("b", NOW + 1)
        assert timer.advance(NOW + 3) == ["b", "a"]

    # ---- move

    @pytest.mark.parametrize("verb", ["add", "move"])
    @pytest.mark.parametrize(
        ("old", "new"), [(10, 20), (20, 10), (10, 10), (5, 10**6), (10**6, 5), (4100, 4), (4, 4100)]
    )
    def test_moved_fires_at_the_new_time_only(self, timer: Timer[Any], verb: str, old: int, new: int) -> None:
        timer.add("a", NOW + old)
        getattr(timer, verb)("a", NOW + new)
        assert len(timer) == 1
        assert timer.advance(NOW + new - 1) == []
        assert timer.advance(NOW + new) == ["a"]
        assert timer.advance(NOW + old + new) == []

    # ---- the next deadline

    def test_next_deadline_is_never_late_and_leads_there_quickly(self, timer: Timer[Any]) -> None:
        ats = sorted(NOW + random.Random(2).randrange(10**7) for _ in range(300))
        for number, at in enumerate(ats):
            timer.add(number, at)
        fired: list[int] = []
        wakes = 0
        while (deadline := timer.next_deadline()) is not None:
            assert deadline <= ats[len(fired)]
            fired += timer.advance(deadline)
            wakes += 1
        assert fired == list(range(300))
        assert wakes <= 3 * len(ats)

    def test_one_far_item_takes_few_wake_ups(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 30 * 86_400_000)
        wakes = 0
        while (deadline := timer.next_deadline()) is not None:
            timer.advance(deadline)
            wakes += 1
        assert wakes <= 8

    # ---- many

    def test_ten_thousand_of_one_instant(self, timer: Timer[Any]) -> None:
        for item in range(10_000):
            timer.add(item, NOW + 3_600_000)
        assert len(timer) == 10_000
        assert timer.advance(NOW + 3_599_999) == []
        assert sorted(timer.advance(NOW + 3_600_000)) == list(range(10_000))

    @pytest.mark.parametrize("items", [1, 4, 500])
    @pytest.mark.parametrize("seed", range(4))
    def test_any_calls_against_a_dictionary(self, timer: Timer[Any], seed: int, items: int) -> None:
        """Items of the past, cancelled and moved items, and jumps in both directions: the latest time seen counts."""
        choose = random.Random(seed)
        model: dict[int, Millis] = {}
        now = latest = NOW
        assert timer.next_deadline() is None
        for _ in range(3_000):
            item, what = choose.randrange(items), choose.randrange(10)
            at = now + choose.choice((1, 10, 1000, 4096, 10**5, 10**7, 10**10)) * choose.randrange(100) - 20
            if what < 4:
                timer.add(item, at)
                model[item] = at
            elif what < 6:
                assert timer.cancel(item) is (model.pop(item, None) is not None)
            elif what < 8:
                assert timer.move(item, at) is (item in model)
                if item in model:
                    model[item] = at
            else:
                now += choose.choice((0, 1, 30, 5000, 10**6, 10**8, -(10**6)))
                latest = max(latest, now)
                due = sorted(at for at in model.values() if at <= latest)
                assert [model.pop(item) for item in timer.advance(now)] == due
                assert not model or deadline_of(timer) > latest
            assert len(timer) == len(model)
            assert (item in timer) is (item in model)
            deadline = timer.next_deadline()
            assert deadline is None if not model else deadline is not None and deadline <= min(model.values())

    def test_cancelling_leaves_nothing_behind(self, timer: Timer[Any]) -> None:
        """Timers that are continually set and cancelled, like time-outs of answered requests, do not accumulate."""

        class Request:
            pass

        alive: weakref.WeakSet[Request] = weakref.WeakSet()
        keep = Request()
        timer.add(keep, NOW + 10**9)

        def set_and_cancel(at: Millis) -> None:
            request = Request()
            alive.add(request)
            timer.add(request, at)
            assert timer.cancel(request)

        for number in range(20_000):
            set_and_cancel(NOW + 30_000 + number)
        assert len(timer) == 1
        assert len(alive) < 5_000
        timer.cancel(keep)
        assert not alive
