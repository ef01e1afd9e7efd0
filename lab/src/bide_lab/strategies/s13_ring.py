"""Ring with lap counts: 3,600 slots, a hand that moves one a second, and tasks that count the laps left to them.

**Idea.** A task 3,610 s ahead lands 10 slots on from the hand, with one lap to go. Each second the hand moves on one
slot and looks at all its tasks: those with laps left lose one, the others are due. With a period of t seconds and n
slots a step is t/n: 300 s in 60 slots retry something every 5 minutes, 5 s apart.

**Origin.** Scheme 6 of Varghese and Lauck, 1987, with counts; published again and again as the efficient delayed
message, in these words. A: as published, slot and laps counted from where the hand is. B: counted from the hand's own
steps, rounded up.

**Cost.** O(1) to add and to cancel; one wake-up a step for ever, also when nothing waits; and every lap visits every
task, due or not.

**Flaw.** The boundary between adding and ticking: in A the step that is under way counts as a whole one, so that tasks
are up to a step early, and what is due in exactly a lap waits for a second one. Both look at tasks whose lap has not
come, both are a step late by design, and both forget all at a restart.

**Right when.** Most delays are shorter than a lap, a second more or less does not matter, and nothing need survive.

**To bide.** A slot's tasks need no slot: schedule each with its time and key in bide. Keep the ring until it has
emptied itself, which takes as long as its longest delay.

      slot   0     1     2    ...   11    ...  3599          hand: one slot a second
            [ ]   [ ]   [a0]       [b1 c0]      [ ]          met: c fires, b has one lap less
                   ^ hand              ^
                                       3,610 s from now: 10 on, 3610 // 3600 = 1 lap
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from bide.core.instants import Millis
from bide_lab.servers.memory import GONE, VISITED, GoingRound, Laps, Thing
from bide_lab.strategy import Flaw, now, when

SLOTS = 3600
_NANOSECONDS = 1_000_000
"""In a millisecond."""


def place(steps: int, slots: int, *, published: bool) -> tuple[int, int]:
    """Slots on from the hand, and laps to let pass, of a delay in steps.

    Counted, a whole lap is no lap to let pass: the hand comes to its own slot after all others.

    >>> place(3610, 3600, published=True), place(3600, 3600, published=True), place(3600, 3600, published=False)
    ((10, 1), (0, 1), (0, 0))
    """
    return steps % slots, (steps if published else steps - 1) // slots


class Ring(Laps[Thing]):
    """A timer that counts in steps of `step` seconds from `start` on; never early, up to a step late.

    With a `clock`, as published: it counts from where the hand is, as if it had only just come there.
    """

    def __init__(self, *, slots: int, step: float, start: Millis, clock: Callable[[], Millis] | None = None) -> None:
        super().__init__()
        self._slots: list[dict[Thing, int]] = [{} for _ in range(slots)]
        """In each its tasks, and the laps left to them; `waiting` has the slot of each task."""
        self._step = round(step * 1e9)
        self._start = start
        self._clock = clock
        self._hand = 0
        """Steps made, in all laps."""

    def _place(self, at: Millis) -> tuple[int, int]:
        """Slots on from the hand, and laps to let pass."""
        since, made = (self._start, self._hand) if self._clock is None else (self._clock(), 0)
        last = -((since - at) * _NANOSECONDS // self._step)  # the first step that is not before `at`
        return place(max(1, last - made), len(self._slots), published=self._clock is not None)

    def add(self, item: Thing, at: Millis) -> None:
        self.cancel(item)
        on, laps = self._place(at)
        slot = self.waiting[item] = (self._hand + on) % len(self._slots)
        self._slots[slot][item] = laps

    def cancel(self, item: Thing) -> bool:
        slot = self.waiting.pop(item, None)
        if slot is None:
            return False
        del self._slots[slot][item]
        return True

    def advance(self, now: Millis) -> list[Thing]:
        """Make the steps that are due. Each visits all tasks of its slot."""
        due: list[Thing] = []
        last = (now - self._start) * _NANOSECONDS // self._step
        while self._hand < last:
            self._hand += 1
            slot = self._slots[self._hand % len(self._slots)]
            met = []
            for item, laps in slot.items():
                if laps:
                    slot[item] = laps - 1
                else:
                    met.append(item)
            self.visited(len(slot), len(met))
            for item in met:
                self.cancel(item)
            due += met
        return due

    def next_deadline(self) -> Millis:
        """The next step, whether or not there is anything to be met."""
        return self._start - (-(self._hand + 1) * self._step // _NANOSECONDS)


class AsPublished(GoingRound):
    """Slot and laps counted from where the hand is at that moment.

    Option `lap`: seconds of strategy time of one lap, instead of an hour.
    """

    name = "S13-A"
    title = "ring with lap counts, as published"
    precision = 1.0
    shows: ClassVar[Sequence[str]] = ()
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw(
            "a task that is added in the middle of a step fires up to a step early", "steady",
            when("early", "{early} of {expected} tasks early"),
        ),
        Flaw(
            "what is due in exactly a lap waits for another", "laps",
            when("a_lap_late",
                 "{a_lap_late:.0f} of {near:.0f} tasks due in a lap came a whole lap late"),
        ),
        VISITED,
    )  # fmt: skip
    skips: ClassVar[Mapping[str, str]] = {"cost": "its operations are those of S13-B"}
    published: ClassVar[bool] = True

    def timer_of(self, start: Millis) -> Ring[Any]:
        slots = round(self.setting.asked("lap", SLOTS))
        return Ring(slots=slots, step=self.setting.span(1), start=start, clock=now if self.published else None)


class Counted(AsPublished):
    """Slot and laps counted in the hand's own steps, the one that is under way not counted."""

    name = "S13-B"
    title = "ring with lap counts, the boundary minded"
    shows = ("steady", "idle", "cost")
    flaws = (VISITED, GONE)
    skips: ClassVar[Mapping[str, str]] = {}
    published = False
