"""Two clocks that are not this machine's: the server's, read off its answers, and the wall clock of a time zone.

**The server's clock.** An answer says what time it was there at some moment between sending and receiving. So each one
bounds how far the server's clock is from this machine's steady one, and the bounds of many are intersected: a few
answers, the quickest of them above all, tell it within their round trip (Cristian, 1989; Marzullo, 1984). Bounds widen
with time, as quartz drifts; an answer that contradicts them means that a clock was set, and begins anew. This machine's
wall clock is not used, so it may be wrong by hours, or be set while we run.

**Times without a zone.** A time has come once the zone's clock shows it, or a later one, for good. So one that comes
twice, in the hour that a clock is put back, means the second of the two, as PostgreSQL reads it too; and one that the
clock skips has come when it jumps. Read either way, nothing is early. That makes "has come" a plain comparison, which
an index can serve: a time has come if it is at most `cutoff(now)`. Zones say no more than their offset at an instant,
so a change of it is found by halving, within the next three hours. Nothing here is slower than 30 µs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, tzinfo

from msgspec import Struct

from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.ports import Finding

# --- the server's clock

_log = logging.getLogger("bide.stores")
_DRIFT = 200e-6
"""Seconds that two clocks may part in a second; quartz keeps well within 100 ppm."""
_READINGS, _QUICK = 3, 0.1
"""How often a clock is read until an answer comes within that many seconds."""


class ServerTime:
    """The server's time, kept by this process's steady clock. Seconds since the epoch."""

    __slots__ = ("_at", "_high", "_low", "_warned")

    def __init__(self) -> None:
        self._low = self._high = time.time() - time.monotonic()
        self._at = -1.0
        self._warned = False

    @staticmethod
    def clock() -> float:
        """The steady clock, in which `saw` takes its times."""
        return time.monotonic()

    def saw(self, micros: int, sent: float, received: float) -> None:
        """An answer to what was sent and received then said that it was so late there."""
        there = micros / 1e6
        low, high = there - received, there - sent
        if self._at >= 0:
            wider = _DRIFT * abs(received - self._at)  # answers may be noted in another order than they came in
            old_low, old_high = self._low - wider, self._high + wider
            if low <= old_high and old_low <= high:  # else a clock was set
                low, high = max(low, old_low), min(high, old_high)
        self._low, self._high, self._at = low, high, received

    async def read(self, ask: Callable[[], Awaitable[int]]) -> int:
        """`ask` what time it is there, in microseconds; again if that was slow, as when there was no connection yet.

        The last answer.
        """
        left = _READINGS
        while True:
            sent = self.clock()
            micros = await ask()
            received = self.clock()
            self.saw(micros, sent, received)
            left -= 1
            if received - sent < _QUICK or not left:
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
        advice = "bide goes by the server's; what else runs here does not: use NTP"
        return Finding(abs(self.skew) <= 1, f"this machine's clock is {self.skew:+.3f} s off the server's", advice)

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


# --- times without a zone

AHEAD: Millis = 3 * 3_600_000
"""How far ahead a change of the offset is sought; clocks are put back by less than that."""
_MILLISECOND = timedelta(milliseconds=1)
_NONE = timedelta(0)


class Stretch(Struct, frozen=True):
    """A time during which the offset of a zone stays the same."""

    offset: timedelta
    """Of the zone from UTC."""
    until: Millis
    """It holds before this instant, as far as three hours ahead are known."""
    least: datetime
    """The least that the clock shows from `until` on: naive. Times above that may come again."""


def stretch(now: Millis, zone: tzinfo) -> Stretch:
    """The stretch of constant offset around `now`."""
    offset = _offset(now, zone)
    ends = min(now + AHEAD, LAST_INSTANT)
    after = _offset(ends, zone)
    until = ends if after == offset else _change(now, ends, zone)
    return Stretch(offset, until, _naive(until, after))


def cutoff(now: Millis, zone: tzinfo) -> datetime:
    """The latest naive time of `zone` that has come."""
    held = stretch(now, zone)
    return min(_naive(now, held.offset), held.least)


def instant_of(shown: datetime, zone: tzinfo) -> Millis:
    """The instant at which `shown`, a naive time of `zone`, has come; rounded up, within the years 1970 to 9999."""
    try:
        early, late = (_instant(shown, zone, fold) for fold in (0, 1))
    except OverflowError:
        return 0 if shown.year < 1970 else LAST_INSTANT
    # a time that is skipped would be after the jump by the old offset, and before it by the new one
    found = late if early <= late else _change(max(late - 1, 0), early, zone)
    return max(0, min(found, LAST_INSTANT))


def _instant(shown: datetime, zone: tzinfo, fold: int) -> Millis:
    offset = shown.replace(tzinfo=zone, fold=fold).utcoffset() or _NONE
    return -((datetime(1970, 1, 1) + offset - shown) // _MILLISECOND)  # noqa: DTZ001 - both are naive


def _naive(at: Millis, offset: timedelta) -> datetime:
    try:
        return (as_datetime(at) + offset).replace(tzinfo=None)
    except OverflowError:
        return datetime.max  # noqa: DTZ901 - naive


def _offset(at: Millis, zone: tzinfo) -> timedelta:
    try:
        return as_datetime(at).astimezone(zone).utcoffset() or _NONE
    except OverflowError:
        return _NONE


def _change(before: Millis, after: Millis, zone: tzinfo) -> Millis:
    """The first instant after `before`, at most `after`, at which the offset is another. O(log)."""
    offset = _offset(before, zone)
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(middle, zone) == offset:
            before = middle
        else:
            after = middle
    return after
