"""Between a Record and its row: by position, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from bide.core.records import Record, State

Row: TypeAlias = Sequence[Any]
"""A row of `{record}`: the fields of a Record in order, the state as its code, then the row's number."""

ROW = 20
"""Where the row's number is."""
STATE = 4
AT = 6

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the file."""
CODES = {state: code for code, state in enumerate(STATES)}
LEASED = CODES[State.LEASED]
TEXTS = (0, 1, 2, 3, 12, 16)
"""Which fields are text, and so can be damaged."""
_TYPES: tuple[type, ...] = (
    str, str, str, str, int, int, int, int, int, int, int, int, str, bytes, bytes, int, str, int, int, int, int,
)  # fmt: skip
_NULLABLE = frozenset({3, 12, 15, 16, 18, 19})
_NONE = type(None)
_MOST = 2**62
"""What can still be counted on from, within 64 bits."""
_ENDED = 2
"""The first code of a state in which nothing is still to happen."""


def record_of(row: Row) -> Record:
    """The record in `row`."""
    (topic, key, identity, group, state, due_at, at, planned_at, attempt, failures, losses, token, holder,
     payload, options, deadline, error, created_at, woke_at, keep_until, _) = row  # fmt: skip
    ended = state >= _ENDED
    wake_at = woke_at if ended and woke_at is not None else at  # a row whose state was damaged has no other
    return Record(
        topic, key, identity, group, STATES[state], due_at, wake_at, planned_at, attempt, failures,
        losses, token, holder, payload, options, deadline, error, created_at, at if ended else None, keep_until,
    )  # fmt: skip


def values_of(record: Record, row: int) -> tuple[Any, ...]:
    """The values for the query `put_task`: everything but the name."""
    at, woke_at = record.wake_at, None
    if record.finished_at is not None:
        at, woke_at = record.finished_at, record.wake_at
    return (
        record.id, record.group, CODES[record.state], record.due_at, at, record.planned_at, record.attempt,
        record.failures, record.losses, record.token, record.holder, record.payload, record.options, record.deadline,
        record.error, record.created_at, woke_at, record.keep_until, row,
    )  # fmt: skip


def check(row: Row) -> None:
    """Raises ValueError for a row of `{record}` whose values are of other types than its columns declare, as a damaged
    page, or a file of an SQLite without STRICT, may have them."""
    if not _declared(tuple(map(type, row))) or not 0 <= row[STATE] < len(STATES):
        raise ValueError("values of other types than the columns declare")
    if max(row[8:11]) >= _MOST:
        raise ValueError("more deliveries than there can have been")


@lru_cache(maxsize=256)
def _declared(types: tuple[type, ...]) -> bool:
    """Whether a row may be of these types; cached, since there are few that rows are of."""
    return all(
        found is kind or (found is _NONE and place in _NULLABLE)
        for place, (found, kind) in enumerate(zip(types, _TYPES, strict=True))
    )


def mended(row: Row) -> Record:
    """The record of a row whose text was read as bytes (query `damaged_row`), with what is not UTF-8 escaped, and with
    something of the right type in the place of nothing."""
    fields = list(row)
    for position, value in enumerate(fields):
        if value is None and position not in _NULLABLE:
            fields[position] = b"" if _TYPES[position] is not int else 0
        if position in TEXTS and value is not None:
            fields[position] = bytes(value).decode("utf-8", "backslashreplace")
        elif position in TEXTS and position not in _NULLABLE:
            fields[position] = ""
    for position in (8, 9, 10):
        fields[position] = min(fields[position], _MOST - 1)
    if fields[STATE] not in range(len(STATES)) or row[STATE] is None:
        fields[STATE] = CODES[State.DEAD]
    return record_of(fields)
