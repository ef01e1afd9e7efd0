"""Conversion between a Record and its row in the table `task` of SQLite and PostgreSQL, and the codes of states.

MySQL uses the same codes, but its own order of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from bide.core.records import Record, State

COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""The order of `Record`'s fields, with `at` and `woke_at` in place of `wake_at` and `finished_at`; then `row`."""
WIDTH = 21
STATE, AT, PAYLOAD, WOKE, ROW = 4, 6, 13, 18, 20
"""Positions in a row. While a task is leased, `woke_at` is the wake time that it was leased for."""
Row: TypeAlias = Sequence[Any]
"""A row of `COLUMNS`, with the state as its code."""

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""The states, indexed by their code in the table."""
CODES = {state: code for code, state in enumerate(STATES)}
ENDED = 2
"""The lowest code of a final state."""


def record_of(row: Row) -> Record:
    """The record in `row`."""
    (topic, key, identity, group, state, due_at, at, planned_at, attempt, failures, losses, token, holder,
     payload, options, deadline, error, created_at, woke_at, keep_until, _) = row  # fmt: skip
    ended = state >= ENDED
    wake_at = woke_at if ended and woke_at is not None else at  # a row with a damaged state may have no woke_at
    return Record(
        topic, key, identity, group, STATES[state], due_at, wake_at, planned_at, attempt, failures,
        losses, token, holder, payload, options, deadline, error, created_at, at if ended else None, keep_until,
    )  # fmt: skip


def values_of(record: Record, error: str | None) -> tuple[Any, ...]:
    """The row of `record` without the row number, and with `error` as its error text."""
    at, woke_at = record.wake_at, None
    if record.finished_at is not None:
        at, woke_at = record.finished_at, record.wake_at
    return (
        record.topic, record.key, record.id, record.group, CODES[record.state], record.due_at, at, record.planned_at,
        record.attempt, record.failures, record.losses, record.token, record.holder, record.payload, record.options,
        record.deadline, error, record.created_at, woke_at, record.keep_until,
    )  # fmt: skip
