"""Where deliveries go."""

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
    """Where a delivery goes. Whatever it raises is a failed delivery; an Outcome raised or returned is itself."""

    async def deliver(self, task: Task[Any]) -> Outcome | None: ...


class Policy(Struct, frozen=True):
    """How the failures of a topic's deliveries are judged."""

    retry: RetryPolicy
    losses: int = 10
    """Leases in a row that may end unsettled before the task is dead ("holder lost")."""


class Route(Policy, frozen=True, kw_only=True):
    """How one topic is worked on."""

    topic: Topic
    sink: Sink
    concurrency: int
    """Deliveries of this topic at once in one worker process."""
    timeout: Millis | None = None
    on_dead: Sequence[Callable[[Task[Any]], Any]] = ()
