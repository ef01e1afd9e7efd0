"""Strategies without a server: a timer in a thread of the one process, and tasks as objects in its memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bide.core.instants import Millis
from bide.ports import Timer
from bide.timers import drive
from bide_lab.figures import Figures
from bide_lab.strategy import Effect, Flaw, Item, Setting, Strategy, now

if TYPE_CHECKING:
    from bide.cli.bench.timers import Contestant

Thing = TypeVar("Thing", bound=Hashable)


@dataclass(slots=True, eq=False)
class Waiting:
    """A task as such a process has it: an object with its body, found by its key."""

    key: str
    due: int


class Looked(Generic[Thing]):
    """A timer that counts how often it is asked what is due, and how often for nothing."""

    def __init__(self, timer: Timer[Thing]) -> None:
        self._timer = timer
        self.add = timer.add
        self.cancel = timer.cancel
        self.move = timer.move
        self.next_deadline = timer.next_deadline
        self.looks = 0
        self.vain_looks = 0

    def advance(self, now: Millis) -> list[Thing]:
        due = self._timer.advance(now)
        self.looks += 1
        self.vain_looks += not due
        return due

    def __len__(self) -> int:
        return len(self._timer)

    def __contains__(self, item: object) -> bool:
        return item in self._timer


def _gone(seen: Figures) -> str:
    return f"{seen.lost} of {seen.expected} tasks gone with the process" if seen.lost else ""


GONE = Flaw("what waits in memory is gone when the process ends, however it does", "restarted", _gone)
"""What all of them are known for; each file shows it with one of its variants."""


def _visited(seen: Figures) -> str:
    vain, waiting = seen.counts.get("vain_visits", 0), seen.counts.get("far", 0)
    return f"{vain:,.0f} visits in vain to {waiting:,.0f} tasks in {seen.counts['laps']:.1f} laps" if vain else ""


VISITED = Flaw("every lap visits every task whose lap has not come", "laps", _visited)
"""What those are known for that go round."""


class InMemory(Strategy):
    """A timer, a lock around it, and a thread that sleeps until the timer has something, or is woken.

    A subclass says which timer. The thread is the one of `bide.timers.drive`: it waits on a condition variable for as
    long as `next_deadline` says, without any limit, and an addition for an earlier time wakes it. Effects are done in
    that thread, one after another.
    """

    in_process = True
    shows: ClassVar[Sequence[str]] = ("steady", "cost")
    flaws: ClassVar[Sequence[Flaw]] = (GONE,)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tasks: dict[str, Waiting] = {}
        self.timer: Any = self.timer_of(now())
        self._looked = Looked[Waiting](self.timer)
        self._drive = drive(self._looked, self.fire, longest_sleep=threading.TIMEOUT_MAX)
        self.effect: Effect | None = None

    def timer_of(self, start: Millis) -> Timer[Any]:
        """One whose present is `start`."""
        raise NotImplementedError

    def structure(self) -> Contestant:
        """The bare timer at its real scale, at time 0: what the workload `cost` measures."""
        from bide.cli.bench.timers import Ours

        return Ours(self.timer_of(0))

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

    async def fire_now(self, key: str) -> bool:
        return await self.reschedule(Item(key, now()))

    async def run(self, role: str, effect: Effect) -> None:
        self.effect = effect
        with self._drive:
            await asyncio.Event().wait()

    def fire(self, task: Waiting) -> None:
        """In the timer's thread."""
        self._tasks.pop(task.key, None)
        assert self.effect is not None
        self.effect.blocking(task.key, task.due)

    def counts(self) -> Mapping[str, float]:
        return {"looks": self._looked.looks, "vain_looks": self._looked.vain_looks}
