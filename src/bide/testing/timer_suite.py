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

    # ---- empty, and one item

    def test_empty(self, timer: Timer[Any]) -> None:
        assert len(timer) == 0
        assert "a" not in timer
        assert timer.next_deadline() is None
        assert timer.advance(NOW) == []
        assert timer.advance(LAST_INSTANT) == []
        assert timer.next_deadline() is None

    def test_what_has_fired_is_gone(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 5)
        assert timer.advance(NOW + 5) == ["a"]
        assert "a" not in timer
        assert len(timer) == 0
        assert timer.next_deadline() is None
        assert not timer.cancel("a")
        assert timer.advance(NOW + 10_000) == []

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
        for at in (NOW + 50, NOW + 49, NOW, NOW - 10**9, 0):
            timer.add(at, at)
        assert deadline_of(timer) <= 0
        assert timer.advance(NOW + 50) == [0, NOW - 10**9, NOW, NOW + 49, NOW + 50]

    def test_before_1970(self, timer: Timer[Any]) -> None:
        timer.add("a", -5)
        assert timer.advance(NOW) == ["a"]

    def test_year_9999(self, timer: Timer[Any]) -> None:
        timer.add("far", LAST_INSTANT)
        timer.add("near", NOW + 1)
        assert timer.advance(NOW + 1) == ["near"]
        assert timer.advance(LAST_INSTANT - 1) == []
        assert timer.advance(LAST_INSTANT) == ["far"]

    def test_without_a_start_the_first_advance_does_not_count_ticks(self) -> None:
        timer = self.make_timer()
        timer.add("a", NOW + 3)
        assert timer.advance(NOW) == []
        timer.add("b", NOW + 1)
        assert timer.advance(NOW + 3) == ["b", "a"]

    def test_a_first_advance_of_an_empty_timer_does_not_count_ticks(self) -> None:
        timer = self.make_timer()
        assert timer.advance(NOW) == []
        timer.add("a", NOW + 3)
        assert timer.advance(NOW + 3) == ["a"]

    # ---- time jumps

    def test_a_jump_forward_takes_all_in_order(self, timer: Timer[Any]) -> None:
        delays = [1, 5, 300, 4096, 4097, 70_000, 10**6, 10**8, 10**10]
        for delay in random.Random(1).sample(delays, len(delays)):
            timer.add(delay, NOW + delay)
        assert timer.advance(NOW + 2 * 10**10) == delays

    def test_a_jump_that_ends_between_items(self, timer: Timer[Any]) -> None:
        for delay in range(0, 200_000, 1009):
            timer.add(delay, NOW + delay)
        assert timer.advance(NOW + 100_000) == [delay for delay in range(0, 200_000, 1009) if delay <= 100_000]
        assert timer.advance(NOW + 200_000) == [delay for delay in range(0, 200_000, 1009) if delay > 100_000]

    def test_a_jump_backward_counts_as_the_latest_seen(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 100)
        timer.advance(NOW + 50)
        assert timer.advance(NOW - 10**9) == []
        timer.add("b", NOW + 20)
        assert timer.advance(0) == ["b"]
        assert timer.advance(NOW + 99) == []
        assert timer.advance(NOW + 100) == ["a"]

    # ---- cancel and move

    def test_cancel(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 5)
        timer.add("b", NOW + 5)
        assert timer.cancel("a")
        assert not timer.cancel("a")
        assert "a" not in timer
        assert len(timer) == 1
        assert timer.advance(NOW + 5) == ["b"]

    def test_cancelling_the_last_empties(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 5)
        timer.cancel("a")
        assert len(timer) == 0
        assert timer.next_deadline() is None
        assert timer.advance(NOW + 10) == []

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

    def test_moved_between_items_keeps_the_order(self, timer: Timer[Any]) -> None:
        for delay in (10, 20, 30, 40):
            timer.add(delay, NOW + delay)
        timer.move(10, NOW + 35)
        assert timer.advance(NOW + 40) == [20, 30, 10, 40]

    def test_moved_into_the_past_is_due_at_the_next_advance(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 10)
        assert timer.move("a", NOW - 10)
        assert timer.advance(NOW) == ["a"]

    def test_moved_out_of_the_past_is_not_due(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW - 10)
        timer.add("b", NOW - 5)
        assert timer.move("a", NOW + 300)
        assert timer.advance(NOW) == ["b"]
        assert timer.advance(NOW + 299) == []
        assert timer.advance(NOW + 300) == ["a"]

    def test_move_of_the_unknown_adds_nothing(self, timer: Timer[Any]) -> None:
        assert not timer.move("a", NOW + 5)
        assert len(timer) == 0
        assert timer.advance(NOW + 5) == []

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

    def test_next_deadline_always_lies_ahead_after_an_advance(self, timer: Timer[Any]) -> None:
        for delay in (3, 500, 5000, 10**5, 10**9):
            timer.add(delay, NOW + delay)
        now = NOW
        for step in (1, 1, 1, 100, 1000, 10**4, 10**5, 10**8):
            now += step
            timer.advance(now)
            assert deadline_of(timer) > now

    def test_next_deadline_sees_an_earlier_one_added_later(self, timer: Timer[Any]) -> None:
        for delay in (10**7, 10**5, 5000, 300, 3):
            timer.add(delay, NOW + delay)
            assert deadline_of(timer) <= NOW + delay
        assert timer.advance(NOW + 3) == [3]

    def test_next_deadline_forgets_what_was_cancelled(self, timer: Timer[Any]) -> None:
        timer.add("a", NOW + 5)
        timer.add("b", NOW + 10**6)
        timer.cancel("a")
        timer.advance(NOW + 5)
        assert NOW + 5 < deadline_of(timer) <= NOW + 10**6

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

    def test_many_added_moved_and_cancelled_against_a_sorted_list(self, timer: Timer[Any]) -> None:
        choose = random.Random(3)
        model: dict[int, Millis] = {}
        now = NOW
        for _ in range(20_000):
            item = choose.randrange(500)
            what = choose.random()
            at = now + choose.choice((1, 10, 1000, 10**5, 10**7)) * choose.randrange(100) - 20
            if what < 0.5:
                timer.add(item, at)
                model[item] = at
            elif what < 0.7:
                assert timer.cancel(item) == (model.pop(item, None) is not None)
            elif what < 0.9:
                assert timer.move(item, at) == (item in model)
                if item in model:
                    model[item] = at
            else:
                now += choose.choice((0, 1, 30, 5000, 10**6))
                due = sorted(at for at in model.values() if at <= now)
                fired = timer.advance(now)
                assert [model.pop(item) for item in fired] == due
        assert len(timer) == len(model)

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
