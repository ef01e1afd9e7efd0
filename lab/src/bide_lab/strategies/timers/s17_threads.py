"""S17: a thread for each task that sleeps until it is due, or a scheduler with a pool of threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from bide.timers import HeapTimer
from bide_lab.strategies.timers.in_process import InMemory, Waiting
from bide_lab.strategy import GONE, Effect, Flaw, Harm, Item, Setting, Strategy, held_up, when

POOL = 10
"""APScheduler's default."""
_FIGHT = 15.0
"""Milliseconds that half of a burst may be late before it is worth a word: a heap in one thread takes 5 ms."""
_MANY = 100
"""Threads that are worth a word."""


class ThreadEach(Strategy):
    """`threading.Timer` for each task."""

    name = "S17-A"
    title = "a timer thread per task"
    in_process = True
    bears = 2_000
    shows = ("steady",)
    flaws = (
        Flaw(
            "every waiting task is a thread", "idle",
            when("threads", "{threads:,} threads for {scheduled:,} waiting tasks, {client_bytes_per_task:,.0f} bytes "
                 "each, besides what the kernel keeps", over=_MANY),
        ),
        Flaw(
            "threads that come due at once fight for the interpreter's one lock", "burst",
            when("p50", "of {fired:,} due at once half were more than {p50:,.0f} ms late", over=_FIGHT), Harm.LATE,
        ),
        GONE,
    )  # fmt: skip
    _effect: Effect

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()

    async def schedule(self, items: Sequence[Item]) -> None:
        for item in items:
            timer = threading.Timer(max(0.0, item.due / 1000 - time.time()), self._fire, item)
            timer.daemon = True
            with self._lock:
                self._timers[item.key] = timer
            timer.start()

    async def reschedule(self, item: Item) -> bool:
        there = await self.cancel(item.key)
        if there:
            await self.schedule([item])
        return there

    async def cancel(self, key: str) -> bool:
        with self._lock:
            timer = self._timers.pop(key, None)
        if timer is None:
            return False
        timer.cancel()
        return True

    def _fire(self, key: str, due: int) -> None:
        with self._lock:  # the one that takes it out has it: this thread, or a cancel that comes at the last moment
            if self._timers.get(key) is not threading.current_thread():
                return
            del self._timers[key]
        self._effect.blocking(key, due)

    async def run(self, role: str, effect: Effect) -> None:
        self._effect = effect
        await asyncio.Event().wait()

    async def close(self) -> None:
        for key in list(self._timers):
            await self.cancel(key)


class Pooled(InMemory):
    """A thread that waits for the head of a heap, and a pool that does what is due."""

    name = "S17-B"
    title = "a scheduler with a pool of threads"
    shows = ("steady", "idle")
    flaws = (Flaw("as many slow tasks as there are threads hold up all others", "crowd", held_up),)
    skips: ClassVar[Mapping[str, str]] = {"cost": "its structure is the heap of S12"}
    kind_of_timer = HeapTimer

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._pool = ThreadPoolExecutor(POOL, thread_name_prefix="pool")
        self.closing.callback(self._pool.shutdown, wait=False, cancel_futures=True)

    def fire(self, task: Waiting) -> None:
        self._pool.submit(super().fire, task)
