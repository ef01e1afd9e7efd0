"""Sinks, the destinations of deliveries, and the routes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.outcomes import Outcome
from bide.core.records import Topic
from bide.core.retry import RetryPolicy
from bide.core.tasks import Task


class Sink(Protocol):
    """The destination of deliveries. An Outcome that it raises or returns counts as such; any other exception is a
    failed delivery."""

    async def deliver(self, task: Task[Any]) -> Outcome | None: ...


class Policy(Struct, frozen=True):
    """The treatment of a topic's failed deliveries."""

    retry: RetryPolicy
    losses: int = 10
    """The number of successive leases that may end unsettled before the task is dead ("holder lost")."""


class Route(Policy, frozen=True, kw_only=True):
    """The delivery of one topic: its sink and its policy."""

    topic: Topic
    sink: Sink
    concurrency: int
    """Concurrent deliveries of this topic in one worker process."""
    timeout: Millis | None = None
    on_dead: Sequence[Callable[[Task[Any]], Any]] = ()
