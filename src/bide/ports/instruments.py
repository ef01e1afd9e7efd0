"""Hooks for metrics and traces. An instrument observes and must not change anything."""

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
    """Counts of how the sleeps of one loop ended. A sleep that a free slot cut short is not counted."""

    notifications: int = 0
    """Notifications received, including those that were no earlier than the known wake time."""
    heard_at: float | None = None
    """When the last notification arrived, by `time.monotonic()`; None: none yet."""
    by_notification: int = 0
    """Sleeps that ended at the time given by a notification."""
    by_alarm: int = 0
    """Sleeps that ended at the time given by the last lease."""
    by_cap: int = 0
    """Sleeps of the greatest length."""
    missed: int = 0
    """Sleeps in `by_cap` after which a task was already overdue: its notification was lost."""


class TableStats(Struct):
    """Counts of a loop over a watched table."""

    fired: int = 0
    failed: int = 0
    looks: int = 0
    dead: int = 0
    """Given-up rows."""


class Instrument:
    """An observer, attached to an app before it is opened (`app.instruments`). It must not raise or change anything."""

    def store(self, store: Store) -> Store:
        """The store that the app uses for `store`: the same, or a `StoreFacade` that observes its calls."""
        return store

    def route(self, route: Route) -> Route:
        """The route that the worker uses for `route`: the same, or one with an observed sink."""
        return route

    def working(self, wakes: Wakes) -> None:
        """Called when a worker starts; `wakes` goes on counting."""

    def watching(self, table: str, stats: TableStats) -> None:
        """Called when a worker starts to watch `table`; `stats` goes on counting."""

    def observe(self, record: Record, told: Settlement) -> None:
        """Called when a store has accepted the outcome of a delivery."""

    def dropped(self, topic: Topic, why: str, count: int) -> None:
        """Called for occurrences of a recurring task that did not run; `why` is one word."""


class TracePropagator(Protocol):
    """Adds the current trace to new tasks."""

    def scheduling(self, topic: Topic) -> AbstractContextManager[Callable[[Answer], Answer]]:
        """A context for one `schedule`; its answer is passed through the function that the context yields."""
        ...

    def headers(self, topic: Topic) -> Mapping[str, str] | None:
        """The headers for a task made now."""
        ...

    def received(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """A context for handling a request with these headers (names in lower case); it continues their trace."""
        ...
