"""Tasks by their names, many in one statement.

Each statement that is run, and each row that is stepped to, lets go of the interpreter's lock and takes it again, which
is most of what a lookup costs: 3.2 us a task this way, 5.2 one by one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from bide.core.records import Record, Topic
from bide.stores.sqlite import damage
from bide.stores.sqlite.queries import QUERIES
from bide.stores.sqlite.rows import ROW

FEW = 3
"""Up to so many, one by one is quicker."""

_BY_NAMES = QUERIES["tasks_by_names"]
_BY_NAME = QUERIES["task_by_name"]
_encode = msgspec.json.Encoder().encode

Found = dict[tuple[Topic, str], tuple[int, Record]]
"""By name: the row's number and the record."""


def by_names(cursor: sqlite3.Cursor, names: Iterable[tuple[Topic, str]]) -> Found:
    """Those of `names` that are there and can be read in one go. Who is missing is to be looked for by `by_name`."""
    topics: dict[Topic, list[str]] = {}
    for topic, key in names:
        topics.setdefault(topic, []).append(key)
    found: Found = {}
    try:
        for topic, keys in topics.items():
            for row in cursor.execute(_BY_NAMES, (topic, _encode(keys).decode())).fetchall():
                found[topic, row[1]] = row[ROW], damage.sound_record(row)
    except damage.UNREADABLE as error:
        damage.check(error)
        if isinstance(error, UnicodeEncodeError):
            raise
        return {}
    return found


def by_name(cursor: sqlite3.Cursor, topic: Topic, key: str) -> tuple[int, Record] | None:
    """One task, also a damaged one (mended)."""
    try:
        row = cursor.execute(_BY_NAME, (topic, key)).fetchone()
        return None if row is None else (row[ROW], damage.sound_record(row))
    except damage.UNREADABLE as error:
        damage.check(error)
        if isinstance(error, UnicodeEncodeError):
            raise
        return damage.read_mended(cursor, topic, key)
