"""Rows of tasks: the statements that read and write them, between a row and its Record, and rows that are damaged.

SQLite stores whatever bytes it was given as text; `sqlite3` refuses the whole result when one of them is not UTF-8.
Such a row never stops the others: it is read as bytes instead, and its text escaped. Damage to the pages of the file is
another matter: SQLite reports it, and it stays an error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from bide.core.records import Record, State, Topic
from bide.stores.named_queries import read_queries, read_statements
from bide.stores.sqlite.errors import code_of

RECORD_COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""In the order of `Record`'s fields, `at` and `woke_at` in the places of `wake_at` and `finished_at`; then `row`."""

_HERE = Path(__file__).parent


def _queries() -> Mapping[str, str]:
    named = read_queries((_HERE / "queries.sql").read_text("utf-8"))
    return MappingProxyType({name: text.replace("{record}", RECORD_COLUMNS) for name, text in named.items()})


QUERIES = _queries()
"""The statements of `queries.sql` by name."""
SCHEMA = tuple(read_statements((_HERE / "schema.sql").read_text("utf-8")))

Row: TypeAlias = Sequence[Any]
"""A row of `{record}`: the fields of a Record in order, the state as its code, then the row's number."""
Found: TypeAlias = dict[tuple[Topic, str], tuple[int, Record]]
"""By name: the row's number and the record."""

ROW = 20
"""Where the row's number is."""
STATE = 4
AT = 6

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the file."""
CODES = {state: code for code, state in enumerate(STATES)}
TEXTS = (0, 1, 2, 3, 12, 16)
"""Which fields are text, and so can be damaged."""
FEW = 3
"""Up to so many tasks, reading one by one is quicker."""
UNREADABLE = (sqlite3.OperationalError, UnicodeDecodeError, IndexError, TypeError, ValueError)

_TYPES: tuple[type, ...] = (
    str, str, str, str, int, int, int, int, int, int, int, int, str, bytes, bytes, int, str, int, int, int, int,
)  # fmt: skip
_NULLABLE = frozenset({3, 12, 15, 16, 18, 19})
_NONE = type(None)
_MOST = 2**62
"""What can still be counted on from, within 64 bits."""
_ENDED = 2
"""The first code of a state in which nothing is still to happen."""

_BY_NAMES = QUERIES["tasks_by_names"]
_BY_NAME = QUERIES["task_by_name"]
_BY_ROW = QUERIES["task_by_row"]
_encode = msgspec.json.Encoder().encode


# --- between a row and its record


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


def check_types(row: Row) -> None:
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


def sound_record(row: Row) -> Record:
    """The record of a row that is what its columns declare. Raises one of UNREADABLE for any other."""
    check_types(row)
    return record_of(row)


# --- by name, many in one statement
#
# Each statement that is run, and each row that is stepped to, lets go of the interpreter's lock and takes it again,
# which is most of what a lookup costs: 3.2 us a task this way, 5.2 one by one.


def by_names(cursor: sqlite3.Cursor, names: Iterable[tuple[Topic, str]]) -> Found:
    """Those of `names` that are there and can be read in one go. Who is missing is to be looked for by `by_name`."""
    topics: dict[Topic, list[str]] = {}
    for topic, key in names:
        topics.setdefault(topic, []).append(key)
    found: Found = {}
    try:
        for topic, keys in topics.items():
            for row in cursor.execute(_BY_NAMES, (topic, _encode(keys).decode())).fetchall():
                found[topic, row[1]] = row[ROW], sound_record(row)
    except UNREADABLE as error:
        check_row_is_to_blame(error)
        return {}
    return found


def by_name(cursor: sqlite3.Cursor, topic: Topic, key: str) -> tuple[int, Record] | None:
    """One task, also a damaged one (mended)."""
    try:
        row = cursor.execute(_BY_NAME, (topic, key)).fetchone()
        return None if row is None else (row[ROW], sound_record(row))
    except UNREADABLE as error:
        check_row_is_to_blame(error)
    found = cursor.execute(QUERIES["row_by_name"], (topic, key)).fetchone()
    record = None if found is None else read_row(cursor, found[0])[0]
    return None if record is None else (found[0], record)


# --- rows that cannot be read


def check_row_is_to_blame(error: Exception) -> None:
    """Raise `error` again if it is SQLite's own (locked, full, a damaged page), or of a name that was asked for."""
    if code_of(error) or isinstance(error, UnicodeEncodeError):
        raise error


def read_row(cursor: sqlite3.Cursor, row: int) -> tuple[Record | None, str]:
    """The record of a row, mended if need be; and what was wrong with it ("" if nothing)."""
    try:
        found = cursor.execute(_BY_ROW, (row,)).fetchone()
        return (None if found is None else sound_record(found)), ""
    except UNREADABLE as error:
        check_row_is_to_blame(error)
        return read_damaged(cursor, row), str(error)


def read_page(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...]) -> list[tuple[int, Record]]:
    """The rows of a `{record}` query, each with its number; row by row when one of them cannot be read."""
    try:
        return [(row[ROW], sound_record(row)) for row in cursor.execute(query, arguments).fetchall()]
    except UNREADABLE as error:
        check_row_is_to_blame(error)
    page = []
    for (row,) in cursor.execute(numbers_only(query), arguments).fetchall():
        record, _ = read_row(cursor, row)
        if record is not None:
            page.append((row, record))
    return page


def numbers_only(query: str) -> str:
    """The same query for the numbers of its rows alone, which can be read whatever else is damaged."""
    return query.replace(RECORD_COLUMNS, "row", 1)


def read_damaged(cursor: sqlite3.Cursor, row: int) -> Record | None:
    """The record of a row, read as bytes and mended."""
    found = cursor.execute(QUERIES["damaged_row"], (row,)).fetchone()
    return None if found is None else mended(found)


def mended(row: Row) -> Record:
    """The record of a row of the query `damaged_row`, with what is not UTF-8 escaped, and with something of the right
    type in the place of nothing."""
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
