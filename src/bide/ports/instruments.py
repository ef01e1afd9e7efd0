"""Hooks for metrics and traces: an instrument observes, and must not change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from bide.core.answers import Answer
from bide.core.records import Record, Settlement, Topic
from bide.ports.sinks import Route
from bide.ports.store import Store


class Wakes(Struct):
    """Counts of how the sleeps of one loop ended. A sleep that was cut short for a free slot is in none."""

    notifications: int = 0
    """Wake-ups heard, also those that were no earlier than what was known."""
    heard_at: float | None = None
    """When the last one was heard, by `time.monotonic()`; None: none yet."""
    by_notification: int = 0
    """Sleeps that ended at a time that a wake-up told."""
    by_alarm: int = 0
    """Sleeps that ended at a time that the last lease told."""
    by_cap: int = 0
    """Sleeps that lasted as long as a sleep may."""
    missed: int = 0
    """Those of `by_cap` after which something was found that had been due for a while: its wake-up was lost."""


class TableStats(Struct):
    """Counts of a loop over a watched table."""

    fired: int = 0
    failed: int = 0
    looks: int = 0
    dead: int = 0
    """Rows that were given up."""


class Instrument:
    """Attached to an app before it is opened (`app.instruments`). Nothing it is told of may be changed, or fail."""

    def store(self, store: Store) -> Store:
        """The store for an app in place of `store`: the same, or a `StoreFacade` that observes its calls."""
        return store

    def route(self, route: Route) -> Route:
        """The route for a worker in place of `route`: the same, its sink observed."""
        return route

    def working(self, wakes: Wakes) -> None:
        """A worker has started; `wakes` goes on counting."""

    def watching(self, table: str, stats: TableStats) -> None:
        """A worker watches this table; `stats` goes on counting."""

    def observe(self, record: Record, told: Settlement) -> None:
        """A store has accepted this outcome of a delivery."""


class TracePropagator(Protocol):
    """Gives new tasks the trace that they are part of."""

    def scheduling(self, topic: Topic) -> AbstractContextManager[Callable[[Answer], Answer]]:
        """Around one `schedule`; its answer is passed through what this gives."""
        ...

    def headers(self, topic: Topic) -> Mapping[str, str] | None:
        """The headers for a task that is made now."""
        ...

    def received(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Around what is done for a request with these headers (names in lower case): its trace goes on."""
        ...
