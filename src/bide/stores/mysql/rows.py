"""Between a Record and its row: by position, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bide.core.records import Record, State, Topic
from bide.core.texts import storable

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the table."""
CODES = {state: code for code, state in enumerate(STATES)}
ROW, AT, TOKEN, STATE, WAKE = 0, 5, 9, 16, 19
"""Places in a row: what waits wakes `at`, and what is leased woke then and is lost at its `wake_at`."""
_WIDTH = 48
"""Bytes of a holder in its row, if it has no more."""
_FILLER = b"\0"
_ENDED = 2
"""The first code of a state in which nothing is still to happen."""


def record_of(row: Sequence[Any]) -> Record:
    """The record in `row`. What is no UTF-8, by another program's doing, is shown so that it still names the task."""
    (_, key, identity, group, due_at, at, attempt, failures, losses, token, payload, options, deadline, error,
     created_at, topic, state, planned_at, holder, wake_at, keep_until) = row  # fmt: skip
    return Record(
        topic.decode("utf-8", "surrogateescape"), key.decode("utf-8", "surrogateescape"),
        identity.decode("utf-8", "replace"), None if group is None else group.decode("utf-8", "replace"),
        STATES[state], due_at, wake_at if state else at, planned_at, attempt, failures,
        losses, token, holder.rstrip(_FILLER).decode("utf-8", "replace") or None, payload, options, deadline,
        None if error is None else error.decode("utf-8", "replace"), created_at, at if state >= _ENDED else None,
        keep_until,
    )  # fmt: skip


def rest_of_waiting(topic: Topic) -> tuple[Any, ...]:
    """The columns that are not read of a task that waits: its topic is known, and the others mean nothing."""
    return topic.encode("utf-8", "surrogateescape"), CODES[State.WAITING], 0, b"", 0, None


def settled_values(row: int, record: Record) -> tuple[Any, ...]:
    """The values of a row for the query `put_tasks`, in its order, but for what a transition leaves as it is.

    Of what waits or has ended: leases are not written task by task.
    """
    at, wake_at, ended = record.wake_at, 0, 0
    if record.finished_at is not None:
        at, wake_at, ended = record.finished_at, record.wake_at, CODES[record.state]
    return (
        row, record.topic, record.key, record.id, CODES[record.state], ended, record.due_at, at, record.planned_at,
        record.attempt, record.failures, record.losses, record.token, filled(record.holder), record.deadline,
        record.error and storable(record.error), record.created_at, wake_at, record.keep_until,
    )  # fmt: skip


def filled(holder: str | None) -> bytes:
    """A holder as wide as most are, so that its row stays as long as it is."""
    return (holder or "").encode("utf-8", "surrogateescape").ljust(_WIDTH, _FILLER)
