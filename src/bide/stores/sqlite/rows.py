"""Rows of tasks: how damaged rows are read, and the operations that only read.

SQLite stores any bytes as text, but `sqlite3` refuses a whole result if one text is not UTF-8. Such a row must not
block the other rows, so its text is read as bytes and escaped. Damage to the file's pages, which SQLite reports, stays
an error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from bide.core.instants import Millis
from bide.core.payloads import fitting
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.named_queries import queries_beside, read_statements
from bide.stores.sql.operations import CODES, COLUMNS, PAYLOAD, ROW, STATE, STATES, Row, record_of
from bide.stores.sql.reading import Located, Reads, at_once, count_of, counts_in, read_page
from bide.stores.sqlite.connection import code_of

_NAMED = queries_beside(__file__, "queries.sql")
QUERIES = MappingProxyType({name: text.replace("{record}", COLUMNS) for name, text in _NAMED.items()})
"""The statements of `queries.sql` by name."""
SCHEMA = tuple(read_statements(Path(__file__).with_name("schema.sql").read_text("utf-8")))

ByName: TypeAlias = dict[tuple[Topic, str], Located]
"""By topic and key: the row's number and the record."""

FEW = 3
"""Up to this number of tasks, reading one by one is faster."""

_TYPES: tuple[type, ...] = (
    str, str, str, str, int, int, int, int, int, int, int, int, str, bytes, bytes, int, str, int, int, int, int,
)  # fmt: skip
_NULLABLE = frozenset({3, 12, 15, 16, 18, 19})
_NONE = type(None)
_MOST = 2**62
"""Counts must be below this, so that they can still rise within 64 bits."""

_encode = msgspec.json.Encoder().encode


# --- damaged rows


def flaw_in(row: Row) -> str:
    """The flaw in the values of a `{record}` row, or "". Causes are text that is not UTF-8, a damaged page, or a file
    made by an SQLite without STRICT."""
    if not _declared(tuple(map(type, row))) or not 0 <= row[STATE] < len(STATES):
        return "values of other types than the columns declare"
    return "more deliveries than there can have been" if max(row[8:11]) >= _MOST else ""


@lru_cache(maxsize=256)
def _declared(types: tuple[type, ...]) -> bool:
    """True if a row may have these types. Cached, because rows have few combinations."""
    return all(
        found is kind or (found is _NONE and place in _NULLABLE)
        for place, (found, kind) in enumerate(zip(types, _TYPES, strict=True))
    )


def mended(row: Row) -> Record:
    """The record of a row with a flaw: invalid UTF-8 is escaped, and each field gets a value of its type."""
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


def read_rows(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...], room: int | None = None) -> list[Row]:
    """The rows of a query, with bytes in place of text that is not UTF-8.

    `room`: the most bytes of their payloads, unless a single row has more. For `{record}` queries.
    """
    try:
        return _fetched(cursor.execute(query, arguments), room)
    except (sqlite3.OperationalError, UnicodeDecodeError) as error:
        if code_of(error):
            raise
    connection = cursor.connection
    text_factory = connection.text_factory
    connection.text_factory = _text_or_bytes
    try:
        return _fetched(cursor.execute(query, arguments), room)
    finally:
        connection.text_factory = text_factory


def _fetched(found: sqlite3.Cursor, room: int | None) -> list[Row]:
    if room is None:
        return found.fetchall()
    rows: list[Row] = []
    sizes: list[int] = []
    while (not rows or sum(sizes) <= room) and (more := found.fetchmany(8 + len(rows))):
        rows += more
        sizes += sizes_of(more)
    return rows[: fitting(sizes, room)]


def sizes_of(rows: Sequence[Row]) -> list[int]:
    """The bytes of the payload of each `{record}` row; 0 for a damaged row."""
    return [len(payload) if type(payload := row[PAYLOAD]) is bytes else 0 for row in rows]


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def read_tasks(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...]) -> list[Located]:
    """The tasks of a `{record}` query, each with its row's number; damaged ones are mended."""
    return [(row[ROW], _record_in(row)) for row in read_rows(cursor, query, arguments)]


def _record_in(row: Row) -> Record:
    return mended(row) if flaw_in(row) else record_of(row)


def by_names(cursor: sqlite3.Cursor, names: Iterable[tuple[Topic, str]]) -> ByName:
    """Read the tasks of `names` that exist, in one statement per topic.

    Each statement and each row step releases the interpreter's lock and takes it again, which is most of the cost of a
    lookup: 3.2 us a task this way, 5.2 one by one.
    """
    topics: dict[Topic, list[str]] = {}
    for topic, key in names:
        topics.setdefault(topic, []).append(key)
    return {
        (topic, found[1].key): found
        for topic, keys in topics.items()
        for found in read_tasks(cursor, QUERIES["tasks_by_names"], (topic, _encode(keys).decode()))
    }


def by_name(cursor: sqlite3.Cursor, topic: Topic, key: str) -> Located | None:
    """One task and its row's number."""
    found = read_tasks(cursor, QUERIES["task_by_name"], (topic, key))
    return found[0] if found else None


def heads(cursor: sqlite3.Cursor, topics: Iterable[Topic]) -> dict[Topic, Millis]:
    """The earliest `wake_at` in each of these topics where a task waits or is leased."""
    found: dict[Topic, Millis] = {}
    for topic in topics:
        wakes = [wake for wake in cursor.execute(QUERIES["heads"], (topic,)).fetchone() if wake is not None]
        if wakes:
            found[topic] = min(wakes)
    return found


# --- operations that only read: each runs in one transaction of the reader, so that it sees one state of the file


def get_tasks(cursor: sqlite3.Cursor, refs: Sequence[Ref]) -> list[Record | None]:
    """Read each task by topic and key. O(log n) per task."""
    known = by_names(cursor, refs) if len(refs) > FEW else {}
    found = (known.get(ref) or by_name(cursor, *ref) for ref in refs)
    return [None if one is None else one[1] for one in found]


def tally_some(
    cursor: sqlite3.Cursor, edges: Sequence[Millis] | None, upto: int, only: Collection[Topic] | None, after: Topic,
    most: int,
) -> tuple[Tally, Topic | None]:  # fmt: skip
    """Counts by topic and state: at most O(topics x COUNTED), plus `upto` per interval. See `tally_all`."""
    forecast: dict[Topic, list[Count]] = {}
    names = None if only is None else _encode(list(only)).decode()
    rows = cursor.execute(QUERIES["counts"], (after, COUNTED + 1, most if only is None else -1, names)).fetchall()
    counts = counts_in(rows)
    for topic, *_ in rows:
        if edges is not None and len(edges) > 1 and (topic, State.WAITING) in counts:
            spans = [(topic, low, high, upto + 1) for low, high in pairwise(edges)]
            found = [cursor.execute(QUERIES["count_waiting_between"], span).fetchone() for span in spans]
            forecast[topic] = [count_of(number, upto) for (number,) in found]
    return Tally(counts, forecast), rows[-1][0] if rows and only is None else None


def find_tasks(cursor: sqlite3.Cursor, where: Filter, page: Page) -> Found:
    """See `read_page`."""
    return at_once(read_page(where, page, lambda read: read(SqliteReads(_Call(cursor)))))


class _Call:
    """The queries of a cursor, which never waits."""

    name = str

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    async def ask(self, query: str, **values: Any) -> list[Row]:
        """The rows of a named query. The values must be in the order of the query's parameters."""
        if "{record}" in _NAMED[query]:
            return read_rows(self._cursor, QUERIES[query], tuple(values.values()))
        return self._cursor.execute(QUERIES[query], tuple(values.values())).fetchall()


class SqliteReads(Reads):
    """See `Reads`; `at_once` runs it."""

    _record_of, _row = _record_in, ROW

    async def _of_state(self, state: State, after: Topic) -> Any:
        return await self._call.ask("next_topic_of_state", state=CODES[state], topic=after)

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        instant, row = after
        if instant >= before:
            return []
        ask = partial(self._call.ask, topic=topic, state=CODES[state], instant=instant)
        found = await ask("page_at_instant", row=row, most=most)
        if len(found) < most:
            found += await ask("page_after_instant", before=before, most=most - len(found))
        return self._located(found)
