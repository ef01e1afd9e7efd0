"""What to do about a row that cannot be read, so that it never stops the others.

SQLite stores whatever bytes it was given as text; `sqlite3` refuses the whole result when one of them is not UTF-8.
Such a row is read as bytes instead and its text escaped; a lease sets it aside as dead, so that somebody looks at it.
Damage to the pages of the file is another matter: SQLite reports it, and it stays an error.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from bide.core.instants import Millis
from bide.core.lifecycle import next_token
from bide.core.records import Record, State, Topic
from bide.stores.sqlite.errors import code_of
from bide.stores.sqlite.queries import QUERIES, RECORD_COLUMNS
from bide.stores.sqlite.rows import ROW, Row, mended, record_of, values_of
from bide.stores.sqlite.rows import check as check_row
from bide.stores.sqlite.work import Work

UNREADABLE = (sqlite3.OperationalError, UnicodeDecodeError, IndexError, TypeError, ValueError)

KEEP_DAMAGED: Millis = 14 * 86_400_000
"""How long a task that was set aside is kept: as long as dead ones are by default."""

_BY_ROW = QUERIES["task_by_row"]
_DAMAGED = QUERIES["damaged_row"]
_DUE = (QUERIES["waiting_due"], QUERIES["leased_due"])
_PUT = QUERIES["put_task"]
_RENAME = QUERIES["rename_task"]
_ROW_BY_NAME = QUERIES["row_by_name"]


def check(error: Exception) -> None:
    """Raise `error` again if it is SQLite's own (locked, full, a damaged page): not a matter of one row."""
    if code_of(error):
        raise error


def sound_record(row: Row) -> Record:
    """The record of a row that is what its columns declare. Raises one of UNREADABLE for any other."""
    check_row(row)
    return record_of(row)


def read_row(cursor: sqlite3.Cursor, row: int) -> tuple[Record | None, str]:
    """The record of a row, mended if need be; and what was wrong with it ("" if nothing)."""
    try:
        found = cursor.execute(_BY_ROW, (row,)).fetchone()
        return (None if found is None else sound_record(found)), ""
    except UNREADABLE as error:
        check(error)
        found = cursor.execute(_DAMAGED, (row,)).fetchone()
        return (None if found is None else mended(found)), str(error)


def read_mended(cursor: sqlite3.Cursor, topic: Topic, key: str) -> tuple[int, Record] | None:
    """A task by its name, mended if need be."""
    found = cursor.execute(_ROW_BY_NAME, (topic, key)).fetchone()
    if found is None:
        return None
    record, _ = read_row(cursor, found[0])
    return None if record is None else (found[0], record)


def readable_due(work: Work, topic: Topic, want: int, now: Millis) -> tuple[list[Row], list[Row]]:
    """What is due and waiting, and due and lost, one row at a time; what cannot be read is set aside as dead."""
    waiting, lost = (_readable(work, query, topic, want, now) for query in _DUE)
    return waiting, lost


def read_page(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...]) -> list[tuple[int, Record]]:
    """The rows of a `{record}` query, each with its number; row by row when one of them cannot be read."""
    try:
        return [(row[ROW], sound_record(row)) for row in cursor.execute(query, arguments).fetchall()]
    except UNREADABLE as error:
        check(error)
    page = []
    for (row,) in cursor.execute(numbers_only(query), arguments).fetchall():
        record, _ = read_row(cursor, row)
        if record is not None:
            page.append((row, record))
    return page


def numbers_only(query: str) -> str:
    """The same query for the numbers of its rows alone, which can be read whatever else is damaged."""
    return query.replace(RECORD_COLUMNS, "row", 1)


def _readable(work: Work, query: str, topic: Topic, want: int, now: Millis) -> list[Row]:
    rows: list[Row] = []
    query = numbers_only(query)
    while True:
        damaged = False
        rows.clear()
        for (row,) in work.cursor.execute(query, (topic, now, want)).fetchall():
            try:
                found = work.cursor.execute(_BY_ROW, (row,)).fetchone()
                check_row(found)
                rows.append(found)
            except UNREADABLE as error:
                check(error)
                _set_aside(work, row, str(error), now)
                damaged = True
        if not damaged:
            return rows


def _set_aside(work: Work, row: int, why: str, now: Millis) -> None:
    old = mended(work.one(_DAMAGED, (row,)))
    token = next_token(work.last_token(), now)
    work.used_token(token)
    dead = Record(
        old.topic, old.key, old.id, old.group, State.DEAD, old.due_at, old.wake_at, old.planned_at, old.attempt,
        old.failures, old.losses, token, old.holder, old.payload, old.options, old.deadline, f"damaged row: {why}",
        old.created_at, now, now + KEEP_DAMAGED,
    )  # fmt: skip
    work.cursor.execute(_PUT, values_of(dead, row))
    work.cursor.execute(_RENAME, (old.key, row))
