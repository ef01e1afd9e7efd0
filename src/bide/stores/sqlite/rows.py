"""Between a Record and its row: by position, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from bide.core.records import Record, State

Row: TypeAlias = Sequence[Any]
"""A row of `{record}`: the fields of a Record in order, the state as its code, then the row's number."""

ROW = 20
"""Where the row's number is."""
STATE = 4
WAKE_AT = 6

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the file."""
CODES = {state: code for code, state in enumerate(STATES)}
LEASED = CODES[State.LEASED]
TEXTS = (0, 1, 2, 3, 12, 16)
"""Which fields are text, and so can be damaged."""


def record_of(row: Row) -> Record:
    """The record in `row`."""
    (topic, key, identity, group, state, due_at, wake_at, planned_at, attempt, failures, losses, token, holder,
     payload, options, deadline, error, created_at, finished_at, keep_until, _) = row  # fmt: skip
    return Record(
        topic, key, identity, group, STATES[state], due_at, wake_at, planned_at, attempt, failures, losses, token,
        holder, payload, options, deadline, error, created_at, finished_at, keep_until,
    )  # fmt: skip


def values_of(record: Record, row: int) -> tuple[Any, ...]:
    """The values for the query `put_task`: everything but the name."""
    return (
        record.id, record.group, CODES[record.state], record.due_at, record.wake_at, record.planned_at, record.attempt,
        record.failures, record.losses, record.token, record.holder, record.payload, record.options, record.deadline,
        record.error, record.created_at, record.finished_at, record.keep_until, row,
    )  # fmt: skip


def mended(row: Row) -> Record:
    """The record of a row whose text was read as bytes (query `damaged_row`), with what is not UTF-8 escaped."""
    fields = list(row[:ROW])
    for position in TEXTS:
        if fields[position] is not None:
            fields[position] = bytes(fields[position]).decode("utf-8", "backslashreplace")
    state = fields[STATE]
    fields[STATE] = STATES[state] if isinstance(state, int) and 0 <= state < len(STATES) else State.DEAD
    return Record(*fields)
