"""What time it is, and when something in one process is due."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar, runtime_checkable

from bide.core.instants import Millis


@runtime_checkable
class Clock(Protocol):
    """What time it is."""

    @property
    def grain(self) -> Millis:
        """What `now` may have rounded off. A length from now begins so much later, lest it be cut short."""
        ...

    def now(self) -> Millis:
        """Whole milliseconds since the epoch, rounded down."""
        ...

    def seconds_until(self, at: Millis) -> float:
        """How long to sleep until `at`, not rounded; negative once it has passed."""
        ...

    def span(self, length: Millis) -> Millis:
        """How far this clock goes while `length` of real time passes: `length`, unless it runs at a pace of its own."""
        ...


Item = TypeVar("Item", bound=Hashable)


class Timer(Protocol[Item]):
    """When, in one process: a pure data structure. Never early; not later than its tick."""

    def add(self, item: Item, at: Millis) -> None:
        """Remember `item` for `at`; one that is there already is moved."""
        ...

    def cancel(self, item: Item) -> bool:
        """Forget it; false: it was not there."""
        ...

    def move(self, item: Item, at: Millis) -> bool:
        """Another time for it; false: it was not there, and is not added."""
        ...

    def advance(self, now: Millis) -> list[Item]:
        """Take out every item with `at <= now`, in order of `at`."""
        ...

    def next_deadline(self) -> Millis | None:
        """Never later than the earliest `at`; None when empty."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, item: object) -> bool: ...
