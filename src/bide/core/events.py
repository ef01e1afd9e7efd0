"""Unusual events in a task's life, so that an operator can find out later why something happened.

Recorded: failed deliveries, deaths, lost leases, and every change by a person or an API caller. Not recorded: the happy
path. The log is capped, written in batches, and never in the path of a delivery.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Record


class EventKind(StrEnum):
    """A failed delivery, a death, a lost lease, occurrences of a recurring task that did not run, a caller's change."""

    RETRY = "retry"
    DEAD = "dead"
    LOSS = "loss"
    DROPPED = "dropped"
    CHANGE = "change"


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """One line of the log. Its times are milliseconds since the epoch.

    - `who`: the person, API caller or worker.
    - `what`: the verb and its answer, or the error.
    - `was`: for a change the previous `wake_at`, for a delivery when it began.
    - `wake_at`: that of the task after the event, if any.
    """

    at: Millis
    topic: str
    key: str
    id: str
    kind: EventKind
    attempt: int = 0
    who: str | None = None
    what: str = ""
    was: Millis | None = None
    wake_at: Millis | None = None


def event_of(
    record: Record, kind: EventKind, at: Millis, who: str, what: str, *, was: Millis | None, wake_at: Millis | None
) -> Event:
    return Event(
        at=at, topic=record.topic, key=record.key, id=record.id, kind=kind, attempt=record.attempt, who=who, what=what,
        was=was, wake_at=wake_at,
    )  # fmt: skip
