"""The public form of a task: a view of a record, with datetimes and a decoded payload."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from bide.core.instants import Length, Millis, When, as_datetime
from bide.core.names import error_parts
from bide.core.options import decode_options, known_options, recurrence_of
from bide.core.payloads import Decode, decode_json
from bide.core.records import Record, State
from bide.core.recurrence.plan import Recurrence

P = TypeVar("P")
_UNREAD: Any = object()
_ONLY_RUNNING = "only the task that a running handler was given can do this"


def occurrence_of(record: Record) -> Millis | None:
    """The nominal instant of an occurrence; None: the task does not recur. Raises BadInput for an unknown zone."""
    options = known_options(record.options)
    rule = None if options.recurrence is None else options.recurrence.rule
    return options.occurrence if rule is None else rule.nominal(record.due_at, record.key)


class Task(Generic[P]):
    """A task as it was when it was read. Read-only; `payload` is decoded on first use.

    `record` is the same as the store has it, with times in milliseconds since the epoch.
    """

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
        """The id of one life of the key. It stays the same across retries, so a receiver can reject duplicates."""
        return self.record.id

    @property
    def token(self) -> int:
        """A number that only rises for a (topic, key), so a receiver can reject stale deliveries."""
        return self.record.token

    @property
    def group(self) -> str | None:
        return self.record.group

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def attempt(self) -> int:
        """The number of deliveries in this life, without deferred or unstarted ones; 1 for the first."""
        return self.record.attempt

    @property
    def failures(self) -> int:
        """The number of deliveries in this life that ended with an error or `Retry`."""
        return self.record.failures

    @property
    def losses(self) -> int:
        """The number of leases in a row that ended without an outcome."""
        return self.record.losses

    @property
    def error(self) -> str | None:
        """The error of the last failed delivery."""
        return None if self.record.error is None else error_parts(self.record.error)[0]

    @property
    def trace(self) -> str | None:
        """The traceback of the last failed delivery; None: it failed without an exception, or `traces` is off."""
        return error_parts(self.record.error)[1] or None

    @property
    def payload(self) -> P:
        """The data, in the handler's declared type; JSON values if no type was declared."""
        if self._payload is _UNREAD:
            self._payload = decode_json(self.record.payload)
        payload: P = self._payload
        return payload

    @property
    def payload_bytes(self) -> bytes:
        """The data as they are stored: JSON, or the bytes of the caller."""
        return self.record.payload

    @property
    def headers(self) -> Mapping[str, str]:
        """The short texts that travel with the task, such as `traceparent`."""
        return decode_options(self.record.options).headers

    @property
    def recurrence(self) -> Recurrence | None:
        """The rule and the policies of a recurring task; None for any other task."""
        return recurrence_of(self.record.options)

    @property
    def occurrence(self) -> datetime | None:
        """The instant of the rule for which this delivery stands (aware, UTC); None: the task does not recur.

        It is the due time without the jitter; for an occurrence that was moved, the time to which it was moved.
        """
        occurrence = occurrence_of(self.record)
        return None if occurrence is None else as_datetime(occurrence)

    @property
    def due_at(self) -> datetime:
        """The instant that the caller asked for (aware, UTC)."""
        return as_datetime(self.record.due_at)

    @property
    def wake_at(self) -> datetime:
        """When it is due or retried, or its lease ends; after its end: when its last delivery began (aware, UTC)."""
        return as_datetime(self.record.wake_at)

    @property
    def planned_at(self) -> datetime | None:
        """While leased, the wake_at for which it was leased (after lost leases, the first one); else None."""
        return as_datetime(self.record.planned_at) if self.record.state is State.LEASED else None

    @property
    def started_at(self) -> datetime | None:
        """When the current delivery began, or the one that ended the task; None: it is or was not leased then."""
        started = self.record.started_at
        return None if started is None else as_datetime(started)

    @property
    def created_at(self) -> datetime:
        """When this life was scheduled (aware, UTC)."""
        return as_datetime(self.record.created_at)

    @property
    def deadline(self) -> datetime | None:
        """The last instant for the start of a delivery (aware, UTC)."""
        return None if self.record.deadline is None else as_datetime(self.record.deadline)

    @property
    def finished_at(self) -> datetime | None:
        """When it was done, cancelled or dead (aware, UTC); None while it is live."""
        return None if self.record.finished_at is None else as_datetime(self.record.finished_at)

    def read_payload(self, decode: Decode) -> None:
        """Decode the payload now, with `decode`. Raises BadPayload."""
        self._payload = decode(self.record.payload)

    def now_as(self, record: Record) -> Task[P]:
        """The same task with a later record; a decoded payload is not decoded again."""
        return Task(record, self._payload)

    @property
    def lateness(self) -> timedelta:
        """In a running handler: the time from the planned time to the start of the delivery."""
        raise RuntimeError(_ONLY_RUNNING)

    def transaction(
        self, *, again_at: When | None = None, again_in: Length | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """In a running handler: a database transaction in which this task completes exactly once.

        `async with task.transaction() as conn:` gives a connection to the store's own database. Leaving the block
        without an error settles the task Done and commits it with the handler's writes: both or neither. Verbs awaited
        inside join the transaction. With `again_at` or `again_in` the task starts its next life then, under the same
        key; do not schedule its own key inside, which would replace the life in progress. Raises LeaseLost (and rolls
        back) if the lease was lost, SetupError on a store that shares no database with handlers.
        """
        raise RuntimeError(_ONLY_RUNNING)

    async def extend(self, by: Length) -> bool:
        """In a running handler: extend the lease to a length from now; False if it was lost.

        Rarely needed, since the worker extends leases itself. Raises BadInput, StoreError.
        """
        raise RuntimeError(_ONLY_RUNNING)

    def __repr__(self) -> str:
        record = self.record
        return f"<Task {record.topic}/{record.key} {record.state.value} wake_at={self.wake_at.isoformat()}>"
