"""Clocks, and timers for due items in one process."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Protocol, TypeVar, runtime_checkable

from bide.core.errors import BadInput
from bide.core.instants import Millis


@runtime_checkable
class Clock(Protocol):
    """A clock."""

    @property
    def grain(self) -> Millis:
        """The most that `now` rounds down. It is added to relative delays, so that rounding never shortens one."""
        ...

    def now(self) -> Millis:
        """Whole milliseconds since the epoch, rounded down."""
        ...

    def seconds_until(self, at: Millis) -> float:
        """The unrounded seconds until `at`; negative once it has passed."""
        ...

    def span(self, length: Millis) -> Millis:
        """How far this clock advances during `length` of real time: `length`, unless it runs at another speed."""
        ...


class SystemClock:
    """The wall clock in whole milliseconds, rounded down so that `wake_at <= now()` is never true too early."""

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

    For demonstrations and examples on one machine, since all processes on a store must share the clock. Only the times
    of tasks run faster; the real lengths of leases, timeouts and the longest sleep are unchanged.
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


Item = TypeVar("Item", bound=Hashable)


class Timer(Protocol[Item]):
    """A pure data structure that holds items by their time. Never early, and late by at most its tick."""

    __slots__ = ()

    def add(self, item: Item, at: Millis) -> None:
        """Add `item` for `at`; an existing item is moved."""
        ...

    def cancel(self, item: Item) -> bool:
        """Remove `item`; False: it was absent."""
        ...

    def move(self, item: Item, at: Millis) -> bool:
        """Move `item` to another time; False: it was absent, and is not added."""
        ...

    def advance(self, now: Millis) -> list[Item]:
        """Remove and return all items with `at <= now`, in order of `at`."""
        ...

    def next_deadline(self) -> Millis | None:
        """Never later than the earliest `at`; None when empty."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, item: object) -> bool: ...
