"""The store's clock, for every process of a run to see."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from bide.core.instants import Millis

_EVERY = 0.05
_READINGS = 5
"""Of which the quickest counts: one may be interrupted between its two clocks."""
_SIZE = 8
SLACK: Millis = 2
"""By how much the clock of a history may differ from the store's where it is not set: both round down."""


class SharedClock:
    """A file of one number: the store's time of day less the monotonic clock, in nanoseconds.

    The monotonic clock is the same in all processes and is never set, so that a process whose own time of day is
    wrong still knows that of the store. Reading costs no system call beyond that of the monotonic clock.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        # as one word, whose old or new value others see: struct.pack_into writes zeros first
        self._word = memoryview(self._map).cast("q")

    def now(self) -> Millis:
        """The store's clock, in milliseconds, rounded down."""
        return self._now_ns() // 1_000_000

    async def follow(self, ahead: Callable[[], float], jumped: Callable[[Millis], None]) -> None:
        """Keep it at this machine's clock and `ahead` seconds more, until cancelled.

        `jumped` is told, each time that this has changed, what the clock was before.
        """
        last = ahead()
        while True:
            seconds, before = ahead(), self.now()
            self.set(seconds)
            if seconds != last:
                last = seconds
                jumped(before)
            await asyncio.sleep(_EVERY)

    def set(self, ahead: float) -> None:
        """To this machine's clock and so many seconds more."""
        _, offset = min(_offset() for _ in range(_READINGS))
        self._word[0] = offset + round(ahead * 1e9)

    def become_ours(self) -> None:
        """From now on it is this process's time of day, as Python tells it, so that all who share it jump together.

        With libfaketime the same costs the reading of a file for each reading of the clock: five processes on one file
        of SQLite then do a fifth of their work.
        """
        time.time_ns = self._now_ns
        time.time = lambda: self._now_ns() / 1e9

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._word[0]

    def close(self) -> None:
        self._word.release()
        self._map.close()


def _offset() -> tuple[int, int]:
    """How long the reading took, and by how much the time of day is ahead of the monotonic clock, in nanoseconds."""
    before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after - before, now - (before + after) // 2
