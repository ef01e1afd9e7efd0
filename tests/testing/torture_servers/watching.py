"""A tiny load on a server under test, what is seen of the server meanwhile, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bide import Bide, Task
from bide.core.errors import StoreError
from bide.core.names import new_id
from bide.testing.torture.server import Server

TOPIC = "watched"
_PAUSE = 0.01
_AGAIN = 40.0
"""Seconds within which an app works again: its own patience is 10, and a server may have to be started first."""


class Brief(random.Random):
    """Chance that lets everything last for as short as it may."""

    def uniform(self, a: float, b: float) -> float:
        return a + 0.1 * (b - a)

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Load:
    """Schedules a task every now and then, and works on them."""

    def __init__(self, server: Server) -> None:
        self.app = Bide(server.urls[0])
        self.acknowledged: set[str] = set()
        self.delivered: set[str] = set()
        self.errors: list[StoreError] = []
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []

        @self.app.handler(TOPIC)
        async def work(task: Task[None]) -> None:
            self.delivered.add(task.key)

    async def __aenter__(self) -> Self:
        await self.app.__aenter__()
        self._worker = self.app.worker()
        await self._worker.__aenter__()
        self._tasks = [asyncio.create_task(self._schedule()) for _ in range(3)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        await self._worker.__aexit__(None, None, None)
        await self.app.__aexit__(None, None, None)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drained(self) -> None:
        """Nothing more is scheduled, and all that was taken is delivered."""
        await self._stop()
        await self.works()
        assert self.acknowledged <= self.delivered

    async def _schedule(self) -> None:
        while True:
            with suppress(StoreError):
                await self.one()
            await asyncio.sleep(_PAUSE)

    async def one(self, payload: Any = None) -> str:
        """Schedule one task for now; its key. Raises StoreError."""
        key = new_id()
        try:
            await self.app.schedule(TOPIC, payload, key=key, delay="0s")
        except StoreError as error:
            self.errors.append(error)
            raise
        self.acknowledged.add(key)
        return key

    async def works(self) -> float:
        """Seconds until a task is taken and delivered, and so is everything that was taken before."""
        began = time.monotonic()
        async with asyncio.timeout(_AGAIN):
            while True:
                with suppress(StoreError):
                    wanted = self.acknowledged | {await self.one()}
                    break
            while not wanted <= self.delivered:  # noqa: ASYNC110 - nobody tells when the last one is
                await asyncio.sleep(_PAUSE)
        return time.monotonic() - began


def descendants(of: int | None = None) -> set[int]:
    """The pids of all processes below this one."""
    found: set[int] = set()
    for children in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                found |= {pid} | descendants(pid)
    return found


def left_of(pids: set[int], *folders: Path, since: float) -> list[str]:
    """What is left of these processes, and what is mounted in these folders.

    Shared memory is named by the number of its process, and so only what was made `since` then can be theirs.
    """
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    numbers = set(map(str, pids))
    shared = [
        one
        for one in Path("/dev/shm").iterdir()
        if one.name.rpartition("_")[2] in numbers and one.exists() and one.stat().st_mtime >= since
    ]
    return [
        *(f"process {pid}" for pid in pids & descendants()),
        *(f"mounted {place}" for place in mounted if any(Path(place).is_relative_to(one) for one in folders)),
        *(f"shared memory {one}" for one in shared),
    ]
