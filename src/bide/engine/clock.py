"""What time it is, by this machine."""

from __future__ import annotations

import time

from bide.core.instants import Millis


class SystemClock:
    """The wall clock in whole milliseconds, rounded down: so `wake_at <= now()` is never true too early."""

    __slots__ = ()

    def now(self) -> Millis:
        return time.time_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        """How long until `at`, not rounded; negative once it has passed."""
        return at / 1000 - time.time()
