"""The server's clock, read off its answers.

An answer says what time it was there at some moment between sending and receiving. So each one bounds how far the
server's clock is from this machine's steady one, and the bounds of many are intersected: a few answers, the quickest of
them above all, tell it within their round trip (Cristian, 1989; Marzullo, 1984). Bounds widen with time, as quartz
drifts; an answer that contradicts them means that a clock was set, and begins anew. This machine's wall clock is not
used, so it may be wrong by hours, or be set while we run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from bide.core.instants import Millis
from bide.ports import Finding

_log = logging.getLogger("bide.stores")
_DRIFT = 200e-6
"""Seconds that two clocks may part in a second; quartz keeps well within 100 ppm."""
_LOOKS, _QUICK = 3, 0.1
"""How often a clock is looked at until an answer comes within that many seconds."""


class ServerTime:
    """The server's time, kept by this process's steady clock. Seconds since the epoch."""

    __slots__ = ("_at", "_high", "_low", "_warned")

    def __init__(self) -> None:
        self._low = self._high = time.time() - time.monotonic()
        self._at = -1.0
        self._warned = False

    @staticmethod
    def clock() -> float:
        """The steady clock that `saw` is told in."""
        return time.monotonic()

    def saw(self, micros: int, sent: float, received: float) -> None:
        """An answer to what was sent and received then said that it was so late there."""
        there = micros / 1e6
        low, high = there - received, there - sent
        if self._at >= 0:
            wider = _DRIFT * abs(received - self._at)  # answers may be noted in another order than they came in
            old_low, old_high = self._low - wider, self._high + wider
            if low <= old_high and old_low <= high:  # else somebody set a clock
                low, high = max(low, old_low), min(high, old_high)
        self._low, self._high, self._at = low, high, received

    async def look(self, ask: Callable[[], Awaitable[int]]) -> int:
        """`ask` what time it is there, in microseconds; again if that was slow, as when there was no connection yet.

        The last answer.
        """
        looks = _LOOKS
        while True:
            sent = self.clock()
            micros = await ask()
            received = self.clock()
            self.saw(micros, sent, received)
            looks -= 1
            if received - sent < _QUICK or not looks:
                return micros

    def seconds(self) -> float:
        return time.monotonic() + (self._low + self._high) / 2

    def warn_of_skew(self, where: str) -> None:
        """Once, if this machine's clock is more than a second off."""
        if abs(self.skew) > 1 and not self._warned:
            self._warned = True
            _log.warning("this machine's clock is %+.1f s off that of %s; bide goes by the server's", self.skew, where)

    def finding(self) -> Finding:
        """The finding of `doctor` on this machine's clock."""
        off = abs(self.skew) > 1
        advice = "bide goes by the server's; what else runs here does not: use NTP" if off else ""
        return Finding(ok=not off, what=f"this machine's clock is {self.skew:+.3f} s off the server's", advice=advice)

    @property
    def skew(self) -> float:
        """Seconds by which this machine's wall clock is ahead of the server's."""
        return time.time() - self.seconds()


class StoreClock:
    """The clock of the engine on a store that has one of its own."""

    __slots__ = ("_time",)
    grain: Millis = 1

    def __init__(self, server: ServerTime) -> None:
        self._time = server

    def now(self) -> Millis:
        return int(self._time.seconds() * 1000)

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - self._time.seconds()

    def span(self, length: Millis) -> Millis:
        return length
