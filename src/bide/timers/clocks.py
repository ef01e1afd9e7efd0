"""The two clocks of a machine: one tells the date and may be set, the other only measures and never is."""

from __future__ import annotations

import time

from bide.core.instants import Millis
from bide.ports import SystemClock

WallClock = SystemClock


class SteadyClock(WallClock):
    """Milliseconds since some moment in the past, rounded down. Never set: for lengths of time, not for dates."""

    __slots__ = ()

    def now(self) -> Millis:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - time.monotonic()
