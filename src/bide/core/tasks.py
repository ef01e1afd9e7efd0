"""A task as people see it: a view of a record, with datetimes and a decoded payload."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from bide.core.instants import Length, When, as_datetime
from bide.core.names import error_parts
from bide.core.options import decode_options
from bide.core.payloads import Decode, decode_json
from bide.core.records import Record, State

P = TypeVar("P")
_UNREAD: Any = object()
_ONLY_RUNNING = "only the task that a running handler was given can do this"


class Task(Generic[P]):
    """One thing to be done later, as it was when it was read. Read-only; `payload` is decoded when first used."""

    __slots__ = ("_payload", "record")

    def __init__(self, record: Record, payload: Any = _UNREAD) -> None:
        self.record = record
        self._payload = payload

    @property
    def topic(self) -> str:
        return self.record.topic

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def id(self) -> str:
        """One life of the key: the same over retries, so a receiver can refuse the repeated."""
        return self.record.id

    @property
    def token(self) -> int:
        """Only ever rises for a (topic, key), so a receiver can refuse the old."""
        return self.record.token

    @property
    def group(self) -> str | None:
        return self.record.group

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def attempt(self) -> int:
        """Deliveries of this life, less those deferred or released unstarted; 1 for the first."""
        return self.record.attempt

    @property
    def failures(self) -> int:
        return self.record.failures

    @property
    def error(self) -> str | None:
        """The error of the last failed delivery."""
        return None if self.record.error is None else error_parts(self.record.error)[0]

    @property
    def trace(self) -> str | None:
        """The traceback of the exception that ended the last failed delivery; None: there was none, or `traces` is
        off.
        """
        return error_parts(self.record.error)[1] or None

    @property
    def payload(self) -> P:
        """The data, of the handler's declared type; JSON values where no type was declared."""
        if self._payload is _UNREAD:
            self._payload = decode_json(self.record.payload)
        payload: P = self._payload
        return payload

    @property
    def payload_bytes(self) -> bytes:
        return self.record.payload

    @property
    def headers(self) -> Mapping[str, str]:
        return decode_options(self.record.options).headers

    @property
    def due_at(self) -> datetime:
        """The instant that the caller asked for (aware, UTC)."""
        return as_datetime(self.record.due_at)

    @property
    def wake_at(self) -> datetime:
        """The next instant at which the task needs attention (aware, UTC)."""
        return as_datetime(self.record.wake_at)

    @property
    def planned_at(self) -> datetime | None:
        """While leased: the wake_at that it was leased for (with lost leases, the first one's). Else None."""
        return as_datetime(self.record.planned_at) if self.record.state is State.LEASED else None

    @property
    def started_at(self) -> datetime | None:
        """When the running delivery began, or the one in which the task ended; None: it is or was not leased then."""
        started = self.record.started_at
        return None if started is None else as_datetime(started)

    @property
    def created_at(self) -> datetime:
        return as_datetime(self.record.created_at)

    @property
    def deadline(self) -> datetime | None:
        return None if self.record.deadline is None else as_datetime(self.record.deadline)

    @property
    def finished_at(self) -> datetime | None:
        return None if self.record.finished_at is None else as_datetime(self.record.finished_at)

    def read_payload(self, decode: Decode) -> None:
        """Decode the payload now, by `decode`. Raises BadPayload."""
        self._payload = decode(self.record.payload)

    def now_as(self, record: Record) -> Task[P]:
        """The same task in a later record of it; a payload that was decoded is not decoded again."""
        return Task(record, self._payload)

    @property
    def lateness(self) -> timedelta:
        """In a running handler: how long after the planned time its delivery began."""
        raise RuntimeError(_ONLY_RUNNING)

    def transaction(
        self, *, again_at: When | None = None, again_in: Length | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """In a running handler: its own database transaction, in which this task completes: exactly-once.

        `async with task.transaction() as conn:` gives a connection to the store's own database; leaving the block
        without an error settles the task Done and commits both, or neither. Verbs awaited inside join it. With
        `again_at` or `again_in` the task starts its next life then, under the same key; scheduling its own key inside
        would replace the life that is to be completed. Raises LeaseLost (and rolls back) if the task is no longer ours,
        SetupError on a store that shares no database with handlers.
        """
        raise RuntimeError(_ONLY_RUNNING)

    async def extend(self, by: Length) -> bool:
        """In a running handler: extend the lease to a length from now; False if it was lost.

        Rarely needed: the worker extends it anyway. Raises BadInput, StoreError.
        """
        raise RuntimeError(_ONLY_RUNNING)

    def __repr__(self) -> str:
        record = self.record
        return f"<Task {record.topic}/{record.key} {record.state.value} wake_at={self.wake_at.isoformat()}>"
