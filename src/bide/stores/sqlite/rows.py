"""Rows of tasks: the statements that read and write them, between a row and its Record, and rows that are damaged.

SQLite stores whatever bytes it was given as text; `sqlite3` refuses the whole result when one of them is not UTF-8.
Such a row never stops the others: its text is read as bytes instead, and escaped. Damage to the pages of the file is
another matter: SQLite reports it, and it stays an error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
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
_NAMED = read_queries((_HERE / "queries.sql").read_text("utf-8"))
QUERIES = MappingProxyType({name: text.replace("{record}", RECORD_COLUMNS) for name, text in _NAMED.items()})
"""The statements of `queries.sql` by name."""
SCHEMA = tuple(read_statements((_HERE / "schema.sql").read_text("utf-8")))

Row: TypeAlias = Sequence[Any]
"""A row of `{record}`: the fields of a Record in order, the state as its code, then the row's number."""
ByName: TypeAlias = dict[tuple[Topic, str], tuple[int, Record]]
"""By name: the row's number and the record."""

ROW = 20
"""Where the row's number is."""
STATE = 4
AT = 6

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""By code, as in the file."""
CODES = {state: code for code, state in enumerate(STATES)}
FEW = 3
"""Up to so many tasks, reading one by one is quicker."""

_TYPES: tuple[type, ...] = (
    str, str, str, str, int, int, int, int, int, int, int, int, str, bytes, bytes, int, str, int, int, int, int,
)  # fmt: skip
_NULLABLE = frozenset({3, 12, 15, 16, 18, 19})
_NONE = type(None)
_MOST = 2**62
"""A count can still rise from here, within 64 bits."""
_ENDED = 2
"""The first code of a state in which nothing is still to happen."""

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


def flaw_in(row: Row) -> str:
    """Say what is wrong with the values of a row of `{record}`, as text that is not UTF-8, a damaged page, or a file of
    an SQLite without STRICT may have them; "" if nothing."""
    if not _declared(tuple(map(type, row))) or not 0 <= row[STATE] < len(STATES):
        return "values of other types than the columns declare"
    return "more deliveries than there can have been" if max(row[8:11]) >= _MOST else ""


@lru_cache(maxsize=256)
def _declared(types: tuple[type, ...]) -> bool:
    """True if a row may be of these types; cached, since there are few that rows are of."""
    return all(
        found is kind or (found is _NONE and place in _NULLABLE)
        for place, (found, kind) in enumerate(zip(types, _TYPES, strict=True))
    )


def mended(row: Row) -> Record:
    """The record of a row with a flaw: what is not UTF-8 escaped, and something of the right type in each place."""
    fields = [_mended(place, value) for place, value in enumerate(row)]
    for place in (8, 9, 10):
        fields[place] = min(fields[place], _MOST - 1)
    if row[STATE] not in range(len(STATES)):
        fields[STATE] = CODES[State.DEAD]
    return record_of(fields)


def _mended(place: int, value: Any) -> Any:
    kind = _TYPES[place]
    if type(value) is kind or (value is None and place in _NULLABLE):
        return value
    if kind is int:
        try:
            return max(-_MOST, min(int(value), _MOST))
        except (TypeError, ValueError, OverflowError):
            return 0
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = "" if value is None else str(value)
    return text if kind is str else text.encode()


# --- reading


def read_rows(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...]) -> list[Row]:
    """The rows of a query; if there is text that is not UTF-8, with bytes in its place."""
    try:
        return cursor.execute(query, arguments).fetchall()
    except (sqlite3.OperationalError, UnicodeDecodeError) as error:
        if code_of(error):
            raise
    connection = cursor.connection
    text_factory = connection.text_factory
    connection.text_factory = _text_or_bytes
    try:
        return cursor.execute(query, arguments).fetchall()
    finally:
        connection.text_factory = text_factory


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def read_tasks(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...]) -> list[tuple[int, Record]]:
    """The tasks of a `{record}` query, each with its row's number; mended if need be."""
    rows = read_rows(cursor, query, arguments)
    return [(row[ROW], mended(row) if flaw_in(row) else record_of(row)) for row in rows]


def by_names(cursor: sqlite3.Cursor, names: Iterable[tuple[Topic, str]]) -> ByName:
    """Those of `names` that are there, all of a topic in one statement.

    Each statement that is run, and each row that is stepped to, lets go of the interpreter's lock and takes it again,
    which is most of what a lookup costs: 3.2 us a task this way, 5.2 one by one.
    """
    topics: dict[Topic, list[str]] = {}
    for topic, key in names:
        topics.setdefault(topic, []).append(key)
    return {
        (topic, found[1].key): found
        for topic, keys in topics.items()
        for found in read_tasks(cursor, QUERIES["tasks_by_names"], (topic, _encode(keys).decode()))
    }


def by_name(cursor: sqlite3.Cursor, topic: Topic, key: str) -> tuple[int, Record] | None:
    """One task and its row's number."""
    found = read_tasks(cursor, QUERIES["task_by_name"], (topic, key))
    return found[0] if found else None
