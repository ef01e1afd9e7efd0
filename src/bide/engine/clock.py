"""What time it is: by this machine, or by a clock that runs faster."""

from __future__ import annotations

import time

from bide.core.errors import BadInput
from bide.core.instants import Millis


class SystemClock:
    """The wall clock in whole milliseconds, rounded down: so `wake_at <= now()` is never true too early."""

    __slots__ = ()
    grain: Millis = 1

    def now(self) -> Millis:
        return time.time_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - time.time()

    def span(self, length: Millis) -> Millis:
        return length


class ScaledClock:
    """A clock that starts at the wall clock's time and runs `speed` times as fast: two days within a minute.

    For demonstrations and examples on one machine: everything that shares a store must share its clock. Only the times
    of tasks run faster; leases, timeouts and the longest sleep last as long as ever.
    """

    __slots__ = ("_origin", "speed")
    grain: Millis = 1

    def __init__(self, speed: float) -> None:
        if not 0 < speed <= 1_000_000:
            raise BadInput("speed", speed, "a number above 0, at most 1,000,000")
        self.speed = speed
        self._origin = time.time()

    def _exact(self) -> float:
        return self._origin + (time.time() - self._origin) * self.speed

    def now(self) -> Millis:
        return int(self._exact() * 1000)

    def seconds_until(self, at: Millis) -> float:
        return (at / 1000 - self._exact()) / self.speed

    def span(self, length: Millis) -> Millis:
        return int(length * self.speed)
