"""The numbers that an engine goes by. Stores know none of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from bide.core.instants import LAST_INSTANT, LONGEST, Millis
from bide.core.payloads import PAYLOAD_LIMIT
from bide.core.records import State, Topic

FOURTEEN_DAYS: Millis = 14 * 86_400_000


class Retention(Struct, frozen=True, kw_only=True):
    """How long an ended task is remembered, in milliseconds; 0 forgets it as it ends."""

    done: Millis = 0
    cancelled: Millis = 0
    dead: Millis = FOURTEEN_DAYS

    def keep_until(self, state: State, now: Millis) -> Millis:
        """The `keep_until` of a task that enters `state` now."""
        length = self.done if state is State.DONE else self.cancelled if state is State.CANCELLED else self.dead
        return min(now + length, LAST_INSTANT) if length else 0


class Terms(Struct, frozen=True, kw_only=True):
    """All durations in milliseconds."""

    lease: Millis = 10_000
    """How long a task is held; kept alive while its handler runs. What a dead worker held comes back after this."""
    cap: Millis = 1_000
    """The longest sleep: what a lost wake-up can cost in lateness, at most."""
    concurrency: int = 1_000
    """Deliveries at once in one worker, over all topics."""
    grace: Millis = 30_000
    """How long running handlers may go on when a worker stops."""
    max_past: Millis = LONGEST
    """How far in the past a time may lie that is asked for."""
    payload_limit: int = PAYLOAD_LIMIT
    history: bool = True
    """Whether what happened is written down, minute by minute; see `engine.history`."""
    traces: bool = True
    """Keep the trace of the last failure with its task."""
    retention: Retention = Retention()
    retention_by_topic: Mapping[Topic, Retention] = MappingProxyType({})

    def retention_of(self, topic: Topic) -> Retention:
        return self.retention_by_topic.get(topic, self.retention)
