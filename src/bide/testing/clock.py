"""A clock that stands still until a test moves it."""

from __future__ import annotations

from bide.core.instants import LAST_INSTANT, Millis

FIRST_INSTANT: Millis = 1_800_000_000_000
"""2027-01-15T08:00:00Z, the default start of a manual clock; any fixed instant would do."""


class ManualClock:
    """A `Clock` for tests: `now()` returns the same until `advance` is called. It never goes back by itself."""

    grain: Millis = 0
    """0: the clock stands at a whole millisecond, so a length from now ends exactly on one."""

    def __init__(self, now: Millis = FIRST_INSTANT) -> None:
        self._now = now

    def now(self) -> Millis:
        return self._now

    def advance(self, millis: Millis) -> Millis:
        """Let `millis` pass; return the new time. Raises ValueError for a step back: use `turn_back`."""
        if millis < 0:
            raise ValueError(f"a clock advances by 0 ms or more, not by {millis}; turn_back is for clocks that jump")
        self._now = min(self._now + millis, LAST_INSTANT)
        return self._now

    def turn_back(self, millis: Millis) -> Millis:
        """Jump back, as a clock does when it is corrected; return the new time."""
        self._now = max(self._now - millis, 0)
        return self._now

    def seconds_until(self, at: Millis) -> float:
        """The seconds until `at`, as if real time passed at its usual pace from now."""
        return (at - self._now) / 1000

    def span(self, length: Millis) -> Millis:
        return length

    def __repr__(self) -> str:
        return f"ManualClock({self._now})"
