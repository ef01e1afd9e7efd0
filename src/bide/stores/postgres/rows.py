"""Between a Record and its row: by position, both ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bide.core.records import Record, State

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the table."""
CODES = {state: code for code, state in enumerate(STATES)}
WIDTH = 21
"""The columns of `{record}`: the fields of a Record, then the row's number."""
BYTES = (13, 14)
"""Payload and options."""
WOKE = 18
"""While leased: the wake that it was leased for."""
ROW = 20
_ENDED = 2
"""The first code of a state in which nothing is still to happen."""


def record_of(row: Sequence[Any], start: int = 0) -> Record:
    """The record in `row` from position `start` on."""
    (topic, key, identity, group, state, due_at, at, planned_at, attempt, failures, losses, token, holder,
     payload, options, deadline, error, created_at, woke_at, keep_until, _) = row[start : start + WIDTH]  # fmt: skip
    ended = state >= _ENDED
    return Record(
        topic, key, identity, group, STATES[state], due_at, woke_at if ended else at, planned_at, attempt, failures,
        losses, token, holder, payload, options, deadline, error, created_at, at if ended else None, keep_until,
    )  # fmt: skip


def values_of(record: Record) -> tuple[Any, ...]:
    """The values of a row for the query `write_tasks`, in its order."""
    at, woke_at = record.wake_at, None
    if record.finished_at is not None:
        at, woke_at = record.finished_at, record.wake_at
    return (
        record.topic, record.key, record.id, record.group, CODES[record.state], record.due_at, at, record.planned_at,
        record.attempt, record.failures, record.losses, record.token, record.holder, record.payload, record.options,
        record.deadline, record.error, record.created_at, woke_at, record.keep_until,
    )  # fmt: skip


def columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """One list for each column, as `unnest` takes them."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def packed(rows: Sequence[Sequence[Any]], alike: Collection[int]) -> list[list[Any]]:
    """The columns of one row or more, for a statement that fills them up: none of what is null throughout, and one of
    what is the same throughout, of those that are often `alike`."""
    given: list[list[Any]] = [
        [] if column.count(None) == len(rows) else list(column) for column in zip(*rows, strict=True)
    ]
    for number in alike:
        given[number] = once(given[number])
    return given


def once(column: list[Any]) -> list[Any]:
    """One element of a column that is the same throughout: the driver looks at each, and the statement fills it up."""
    return column[:1] if column and column.count(column[0]) == len(column) else column
