"""The store's clock, visible to every process of a run."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from bide.core.instants import Millis

_EVERY = 0.05
_READINGS = 5
"""The number of readings, of which the quickest counts: a reading may be interrupted between its two clocks."""
_SIZE = 8
SLACK: Millis = 2
"""The most that a history's clock may differ from the store's if that is never set: both round down."""


class SharedClock:
    """A file with one number: the store's time of day minus the monotonic clock, in nanoseconds.

    The monotonic clock is the same in all processes and is never set, so a process whose own time of day is wrong still
    knows the store's. A reading costs no system call except that of the monotonic clock.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        # one word, so that other processes see the old or the new value: struct.pack_into writes zeros first
        self._word = memoryview(self._map).cast("q")

    def now(self) -> Millis:
        """The store's clock, in milliseconds, rounded down."""
        return self._now_ns() // 1_000_000

    async def follow(self, ahead: Callable[[], float], jumped: Callable[[Millis], None]) -> None:
        """Keep the clock `ahead` seconds ahead of this machine's, until cancelled.

        Each time that `ahead` has changed, `jumped` is called with the previous time of the clock.
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
        """Set the clock to `ahead` seconds ahead of this machine's."""
        _, offset = min(_offset() for _ in range(_READINGS))
        self._word[0] = offset + round(ahead * 1e9)

    def become_ours(self) -> None:
        """Make it this process's time of day in Python from now on, so that all processes that share it jump together.

        libfaketime would read a file for each reading of the clock: five processes on one SQLite file would then do a
        fifth of their work.
        """
        time.time_ns = self._now_ns
        time.time = lambda: self._now_ns() / 1e9

    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._word[0]

    def close(self) -> None:
        self._word.release()
        self._map.close()


def _offset() -> tuple[int, int]:
    """The duration of the reading, and the lead of the time of day over the monotonic clock, in nanoseconds."""
    before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after - before, now - (before + after) // 2
