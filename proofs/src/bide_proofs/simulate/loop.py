"""An event loop for several simulated processes: time is virtual, and a seeded random choice decides their order.

Every callback belongs to the process in whose context it was created. Within a process, callbacks run in the order in
which they became ready, as asyncio promises. Between processes no order is promised, and here it is random in every
turn. A process can be stopped at any await and continue later (like SIGSTOP, or a suspended machine), or be killed
there: it never takes another step, and none of its clean-up runs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

R = TypeVar("R")
_MOST_CANCELLED = 100
_NOT_MISSED = "_log_destroy_pending"
"""A task's attribute: true if asyncio warns when the task is destroyed while pending. It is in no type stub."""


class Process:
    """A simulated process, which can be stopped and killed as a whole. `who` names it in the history."""

    def __init__(self, loop: SimulatedLoop, who: str) -> None:
        self.loop = loop
        self.who = who
        self.alive = True
        self.stopped = False
        self.held: list[Any] = []
        """Callbacks that became ready while it was stopped."""
        self.tasks: list[tuple[asyncio.Task[Any], Context]] = []
        """All tasks that it ever started, each with its context."""
        self.context: Context = copy_context()
        self.context.run(_process.set, self)
        loop.processes.append(self)

    def start(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Start a task of this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        if self.alive:
            self.loop.ready_again(self.held)
        self.held = []

    def kill(self) -> None:
        """Kill the process: it takes no further step."""
        self.alive = False
        self.held = []


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class SimulatedLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` starts at 0 and advances only when nothing is left to do. No sockets, threads, signals."""

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self._chance = chance
        self._now = 0.0
        # attributes of the base loop, as `run_forever` and `call_at` use them; they are in no type stub
        self._ready: deque[Any]
        self._scheduled: list[Any]
        self._stopping: bool
        self._timer_cancelled_count: int
        self.processes: list[Process] = []
        """All processes that were ever started."""
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        return self._now

    def ready_again(self, handles: list[Any]) -> None:
        self._ready.extend(handles)

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> Any:
        context = copy_context() if context is None else context
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        process = context.get(_process)
        if process is not None:
            process.tasks.append((task, context))
        return task

    def _run_once(self) -> None:
        """Run one turn: let time pass if nothing is ready, then run all ready callbacks, each process in its order."""
        ready, scheduled = self._ready, self._scheduled
        if self._timer_cancelled_count > _MOST_CANCELLED and 2 * self._timer_cancelled_count > len(scheduled):
            for handle in scheduled:
                if handle._cancelled:
                    handle._scheduled = False
            scheduled[:] = [handle for handle in scheduled if not handle._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError("deadlock: every coroutine waits, and no timer is set")
            self._now = max(self._now, scheduled[0].when())
        ends = self._now + 1e-9
        while scheduled and scheduled[0].when() < ends:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for handle in self._drawn():
            if not handle._cancelled:
                process = handle._context.get(_process)
                if process is None or (process.alive and not process.stopped):
                    try:
                        handle._run()
                    except (SystemExit, KeyboardInterrupt) as error:
                        self.call_exception_handler({"message": "it would end its process", "exception": error})
                elif process.alive:
                    process.held.append(handle)

    def _drawn(self) -> list[Any]:
        """The ready callbacks, in a random order that keeps the order within each process."""
        handles = list(self._ready)
        self._ready.clear()
        if len(handles) < 2:
            return handles
        lines: dict[Process | None, deque[Any]] = {}
        for handle in handles:
            process = handle._context.get(_process)
            line = lines.get(process)
            if line is None:
                lines[process] = line = deque()
            line.append(handle)
        if len(lines) < 2:
            return handles
        drawn, waiting = [], list(lines.values())
        while waiting:
            place = int(self._chance.random() * len(waiting))
            line = waiting[place]
            drawn.append(line.popleft())
            if not line:
                waiting.pop(place)
        return drawn

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread calls."""


def run_simulated(chance: Random, main: Callable[[SimulatedLoop], Coroutine[Any, Any, R]]) -> R:
    """Run `main(loop)` to its end, then discard the processes."""
    loop = SimulatedLoop(chance)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.set_exception_handler(lambda loop, context: None)  # coroutines that are closed now may raise errors
        for process in loop.processes:
            process.kill()
            _throw_away(process.tasks)
        loop.close()


def _throw_away(tasks: list[tuple[asyncio.Task[Any], Context]]) -> None:
    """Close the coroutines that will never continue. Calls that their clean-up makes have no effect."""
    for task, context in tasks:  # clean-up may start tasks, which are appended to this list
        if not task.done():
            setattr(task, _NOT_MISSED, False)
            work = task.get_coro()
            if work is not None:
                with suppress(Exception):
                    context.run(work.close)
