"""The one interface of all contestants, and what their modules share."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from bench.contest.tasks import text

URL = os.environ.get("BENCH_URL", "redis://127.0.0.1:6379/0")
LEASE = int(os.environ["BENCH_LEASE"]) if "BENCH_LEASE" in os.environ else None
"""Seconds after which a task that a dead worker held is to be delivered again, where that can be set; None: leave what
the library comes with. Set for `crash` alone."""
BATCH = 1000

Item = tuple[str, int]
"""A payload, and when it is due in milliseconds since the epoch."""


class Client(ABC):
    """An asyncio library's way to schedule."""

    callers = 256
    """Coroutines or threads that schedule at the same time."""
    bulk = False
    """True if it has a call for many."""

    async def open(self) -> None:  # noqa: B027  # most have nothing to do here
        """Connect."""

    async def close(self) -> None:  # noqa: B027
        """Disconnect."""

    @abstractmethod
    async def schedule(self, payload: str, due: int) -> None:
        """One task, as a user of the library would."""

    async def schedule_many(self, items: Sequence[Item]) -> None:
        """At most `BATCH` tasks in one call."""
        raise NotImplementedError

    async def schedule_all(self, items: Sequence[Item]) -> None:
        """Each by a call of its own, from `callers` at once."""
        ahead = iter(items)

        async def caller() -> None:
            for payload, due in ahead:
                await self.schedule(payload, due)

        await asyncio.gather(*(caller() for _ in range(self.callers)))


class BlockingClient(Client):
    """The same for a library that blocks: callers are threads."""

    callers = 1

    @abstractmethod
    def send(self, payload: str, due: int) -> None:
        """One task."""

    async def schedule(self, payload: str, due: int) -> None:
        await asyncio.to_thread(self.send, payload, due)

    async def schedule_all(self, items: Sequence[Item]) -> None:
        def caller(part: Sequence[Item]) -> None:
            for payload, due in part:
                self.send(payload, due)

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(self.callers) as threads:
            parts = [items[number :: self.callers] for number in range(self.callers)]
            await asyncio.gather(*(loop.run_in_executor(threads, caller, part) for part in parts))


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def as_time(millis: int) -> datetime:
    """Aware, in UTC."""
    return datetime.fromtimestamp(millis / 1000, UTC)


def delay_until(due: int) -> int:
    """Milliseconds from now, for a library that takes a delay; rounded up, so that it is never early."""
    return max(0, -(-(due * 1_000_000 - time.time_ns()) // 1_000_000))


def items_of(count: int, due: int, spread: int) -> list[Item]:
    """Tasks 1 ... `count`, due evenly over `spread` milliseconds from `due` on.

    >>> [(payload[:8], due) for payload, due in items_of(3, 1000, 30)]
    [('0000001:', 1000), ('0000002:', 1010), ('0000003:', 1020)]
    """
    dues = [due + number * spread // count for number in range(count)]
    return [(text(number, due), due) for number, due in enumerate(dues, start=1)]


def choose_loop() -> None:
    """Make the loop that BENCH_LOOP names the one that asyncio's policy gives."""
    if os.environ.get("BENCH_LOOP") == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


def run(main: Coroutine[Any, Any, None]) -> None:
    """On the loop that BENCH_LOOP names."""
    choose_loop()
    asyncio.run(main)
