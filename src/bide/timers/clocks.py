"""The clock of a machine that only measures and is never set; `ports.SystemClock` tells the date, and may be set."""

from __future__ import annotations

import time

from bide.core.instants import Millis
from bide.ports import SystemClock


class SteadyClock(SystemClock):
    """Milliseconds since some moment in the past, rounded down. Never set: for lengths of time, not for dates."""

    __slots__ = ()

    def now(self) -> Millis:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - time.monotonic()
