"""Fixtures of the engine's tests: an app on a memory store, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bide import Bide
from bide.core.instants import Millis
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualClock, VirtualLoop, run_virtual


class World:
    """One virtual timeline: its loop, its clock, a store with faults, and apps on it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.start = self.clock.now()

    def app(self, store: Any = None, **settings: Any) -> Bide:
        return Bide(store or self.store, clock=self.clock, **settings)

    @property
    def elapsed(self) -> Millis:
        """Virtual milliseconds since the start."""
        return self.clock.now() - self.start

    async def until(self, condition: Callable[[], bool], patience: float = 86_400.0) -> None:
        """Let virtual time pass until `condition()`; fail after `patience` virtual seconds."""
        ends, step = self.loop.time() + patience, 0.001
        while not condition():
            assert self.loop.time() < ends, "it did not happen in time"
            await self.pause(step)
            step = min(step * 1.05, 60.0)

    async def until_real(self, condition: Callable[[], bool]) -> None:
        """Let real time pass until `condition()`, as a thread must do something for it."""
        ends = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < ends, "it did not happen in time"
            await asyncio.sleep(0)

    async def pause(self, seconds: float) -> None:
        done = self.loop.create_future()
        self.loop.call_later(seconds, done.set_result, None)
        await done


Story = Callable[[World], Coroutine[Any, Any, None]]
Tell = Callable[[Story], None]


@pytest.fixture
def virtual() -> Tell:
    """Runs a story in virtual time."""

    def tell(story: Story) -> None:
        run_virtual(lambda loop: story(World(loop)))

    return tell
