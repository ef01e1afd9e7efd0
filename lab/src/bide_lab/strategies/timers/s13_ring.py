"""S13: 3,600 slots, a hand that moves one a second, and tasks that count the laps left to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from bide.core.instants import Millis
from bide_lab.strategies.timers.in_process import VISITED, GoingRound, Laps, Thing
from bide_lab.strategy import GONE, Flaw, now, when

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
        slots = round(self.setting.options.get("lap", SLOTS))
        return Ring(slots=slots, step=self.setting.span(1), start=start, clock=now if self.published else None)


class Counted(AsPublished):
    """Slot and laps counted in the hand's own steps, the one that is under way not counted."""

    name = "S13-B"
    title = "ring with lap counts, the boundary minded"
    shows = ("steady", "idle", "cost")
    flaws = (VISITED, GONE)
    skips: ClassVar[Mapping[str, str]] = {}
    published = False
