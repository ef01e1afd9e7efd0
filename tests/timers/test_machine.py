"""Every timer against a dictionary that is sorted when asked: any sequence of calls, the same answers."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bide.core.instants import LAST_INSTANT, Millis
from bide.ports import Timer
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel, wheel
from bide.timers.wheel import Wheel

ITEMS = st.integers(0, 12)
DISTANCES = st.one_of(
    st.integers(-300, 300),
    st.integers(0, 20_000),
    st.sampled_from([255, 256, 4096, 16_384, 65_536, 2**24, 2**31, 2**32 + 1, 2**40]),
)


class TimerMachine(RuleBasedStateMachine):
    """Plays one timer of each kind against the model at once."""

    @initialize(start=st.one_of(st.just(0), st.integers(0, 2**41)))
    def begin(self, start: Millis) -> None:
        self.timers: list[Timer[int]] = [
            HeapTimer(start=start),
            HashedWheel(start=start),
            HashedWheel(slots=1, start=start),
            HashedWheel(tick=3, slots=5, start=start),
            HashedWheel(tick=1000, slots=3600, start=start),
            HashedWheel(tick=50, slots=40, start=start),
            HierarchicalWheel(start=start),
        ]
        self.model: dict[int, Millis] = {}
        self.now = start

    @rule(item=ITEMS, distance=DISTANCES)
    def add(self, item: int, distance: Millis) -> None:
        for timer in self.timers:
            timer.add(item, self.now + distance)
        self.model[item] = self.now + distance

    @rule(item=ITEMS)
    def add_at_the_end_of_time(self, item: int) -> None:
        for timer in self.timers:
            timer.add(item, LAST_INSTANT)
        self.model[item] = LAST_INSTANT

    @rule(item=ITEMS)
    def cancel(self, item: int) -> None:
        there = self.model.pop(item, None) is not None
        assert [timer.cancel(item) for timer in self.timers] == [there] * len(self.timers)

    @rule(item=ITEMS, distance=DISTANCES)
    def move(self, item: int, distance: Millis) -> None:
        there = item in self.model
        assert [timer.move(item, self.now + distance) for timer in self.timers] == [there] * len(self.timers)
        if there:
            self.model[item] = self.now + distance

    @rule(distance=DISTANCES)
    def advance(self, distance: Millis) -> None:
        self._advance(self.now + distance)

    @rule()
    def advance_to_the_next(self) -> None:
        if self.model:
            self._advance(min(self.model.values()))

    @rule()
    def advance_to_just_before_the_next(self) -> None:
        if self.model:
            self._advance(min(self.model.values()) - 1)

    @rule(which=st.integers(0, 6))
    def advance_to_what_one_of_them_says(self, which: int) -> None:
        deadline = self.timers[which].next_deadline()
        if deadline is not None:
            self._advance(deadline)

    def _advance(self, now: Millis) -> None:
        self.now = max(self.now, now)
        due = {item: at for item, at in self.model.items() if at <= self.now}
        for item in due:
            del self.model[item]
        for timer in self.timers:
            fired = timer.advance(now)
            assert len(fired) == len(due)
            assert [due[item] for item in fired] == sorted(due.values())
            assert set(fired) == set(due)

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "timers"):
            return
        for timer in self.timers:
            assert len(timer) == len(self.model)
            assert all((item in timer) == (item in self.model) for item in range(13))

    @rule()
    def next_deadlines(self) -> None:
        for timer in self.timers:
            deadline = timer.next_deadline()
            if not self.model:
                assert deadline is None
            else:
                assert deadline is not None
                assert deadline <= min(self.model.values())

    @rule()
    def wheels_count_their_entries(self) -> None:
        for timer in self.timers:
            if isinstance(timer, Wheel):
                assert timer._filed == sum(map(len, timer._buckets.values()))
                assert timer._filed <= 3 * (len(timer) + 50) + wheel.SLACK


class TidyTimerMachine(TimerMachine):
    """The same where wheels sweep at once, so that sweeping happens between all the rest."""

    @initialize()
    def sweep_early(self) -> None:
        self._patch = pytest.MonkeyPatch()
        for module in ("wheel", "hashed", "hierarchical"):
            self._patch.setattr(f"bide.timers.{module}.SLACK", 0)

    def teardown(self) -> None:
        if hasattr(self, "_patch"):
            self._patch.undo()


TestTimers = TimerMachine.TestCase
TestTimers.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestTidyTimers = TidyTimerMachine.TestCase
TestTidyTimers.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
