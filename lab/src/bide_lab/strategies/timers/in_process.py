"""Strategies without a server: a timer in a thread of the one process, and tasks as objects in its memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from bide.core.instants import Millis
from bide.ports import Timer
from bide.timers import drive
from bide_lab.strategy import GONE, Effect, Flaw, Item, Setting, Strategy, now, when

Thing = TypeVar("Thing", bound=Hashable)


@dataclass(slots=True, eq=False)
class Waiting:
    """A task as such a process has it: an object with its body, found by its key."""

    key: str
    due: int


class Counting:
    """A timer that counts how often it is asked what is due, and how often for nothing."""

    def __init__(self, timer: Timer[Waiting]) -> None:
        self._timer = timer
        self.looks = 0
        self.vain_looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def advance(self, now: Millis) -> list[Waiting]:
        due = self._timer.advance(now)
        self.looks += 1
        self.vain_looks += not due
        return due


class InMemory(Strategy):
    """A timer, a lock around it, and a thread that sleeps until the timer has something, or is woken.

    A subclass says which timer. The thread is the one of `bide.timers.drive`: it waits on a condition variable for as
    long as `next_deadline` says, without any limit, and an addition for an earlier time wakes it. Effects are done in
    that thread, one after another.
    """

    in_process = True
    shows: ClassVar[Sequence[str]] = ("steady", "cost")
    flaws: ClassVar[Sequence[Flaw]] = (GONE,)
    kind_of_timer: ClassVar[Callable[..., Timer[Any]]]
    """Makes one whose present is `start`."""
    effect: Effect

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tasks: dict[str, Waiting] = {}
        self.timer: Any = self.timer_of(now())
        self._counting: Any = Counting(self.timer)
        self._drive = drive(self._counting, self.fire, longest_sleep=threading.TIMEOUT_MAX)

    def timer_of(self, start: Millis) -> Timer[Any]:
        """A new one, whose present is `start`."""
        return self.kind_of_timer(start=start)

    async def schedule(self, items: Sequence[Item]) -> None:
        for key, due in items:
            task = self._tasks[key] = Waiting(key, due)
            self._drive.add(task, due)

    async def reschedule(self, item: Item) -> bool:
        task = self._tasks.get(item.key)
        if task is None:
            return False
        task.due = item.due
        return self._drive.move(task, item.due)

    async def cancel(self, key: str) -> bool:
        task = self._tasks.get(key)
        if task is None or not self._drive.cancel(task):
            return False
        self._tasks.pop(key, None)
        return True

    async def run(self, role: str, effect: Effect) -> None:
        self.effect = effect
        with self._drive:
            await asyncio.Event().wait()

    def fire(self, task: Waiting) -> None:
        """In the timer's thread."""
        self._tasks.pop(task.key, None)
        self.effect.blocking(task.key, task.due)

    def counts(self) -> Mapping[str, float]:
        return {"looks": self._counting.looks, "vain_looks": self._counting.vain_looks}


class Laps(Generic[Thing]):
    """The common part of timers that go round and meet tasks whose lap has not come: what waits, and the visits."""

    def __init__(self) -> None:
        self.waiting: dict[Thing, Any] = {}
        self.visits = 0
        self.vain_visits = 0

    def add(self, item: Thing, at: Millis) -> None:
        raise NotImplementedError

    def move(self, item: Thing, at: Millis) -> bool:
        if item not in self.waiting:
            return False
        self.add(item, at)
        return True

    def visited(self, tasks: int, due: int) -> None:
        self.visits += tasks
        self.vain_visits += tasks - due

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, item: object) -> bool:
        return item in self.waiting


VISITED = Flaw(
    "every lap visits every task whose lap has not come", "laps",
    when("vain_visits", "{vain_visits:,.0f} visits in vain to {far:,.0f} tasks in {laps:.1f} laps"),
)  # fmt: skip


class GoingRound(InMemory):
    """A strategy whose timer is such a one."""

    has_laps = True
    """See the workload `laps`."""

    def counts(self) -> Mapping[str, float]:
        return {**super().counts(), "visits": self.timer.visits, "vain_visits": self.timer.vain_visits}
