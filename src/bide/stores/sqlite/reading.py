"""The operations that only read, on a connection of their own: they wait for no writer.

Each runs in one read transaction, so that it sees one state of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.cursors import read_cursor
from bide.stores.sql.reading import Located, Reads, at_once, count_of, read_page
from bide.stores.sqlite.rows import CODES, FEW, QUERIES, STATES, by_name, by_names, read_tasks


def get(cursor: sqlite3.Cursor, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""
    known = by_names(cursor, refs) if len(refs) > FEW else {}
    found = (known.get(ref) or by_name(cursor, *ref) for ref in refs)
    return [None if one is None else one[1] for one in found]


def tally(cursor: sqlite3.Cursor, edges: Sequence[Millis] | None, upto: int, only: Collection[Topic] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNTED) at worst, and of each interval up to `upto`, whatever waits."""
    counts: dict[tuple[Topic, State], Count] = {}
    forecast: dict[Topic, list[Count]] = {}
    # all topics by a loose scan: one seek each
    named = [topic for (topic,) in cursor.execute(QUERIES["topics"])] if only is None else only
    for topic in named:
        for code, state in enumerate(STATES):
            count = _count(cursor, QUERIES["count_state"], (topic, code), COUNTED)
            if count.number:
                counts[topic, state] = count
        if edges is not None and len(edges) > 1 and (topic, State.WAITING) in counts:
            forecast[topic] = [
                _count(cursor, QUERIES["count_waiting_between"], (topic, low, high), upto)
                for low, high in pairwise(edges)
            ]
    return Tally(counts, forecast)


def _count(cursor: sqlite3.Cursor, query: str, arguments: tuple[Any, ...], upto: int) -> Count:
    (number,) = cursor.execute(query, (*arguments, upto + 1)).fetchone()
    return count_of(number, upto)


def find(cursor: sqlite3.Cursor, where: Filter, page: Page) -> Found:
    """One page, each from the index that has its order; O(log n) per task, and one seek per topic passed."""
    place = read_cursor(page.cursor, where)
    if page.limit <= 0:
        return Found([], page.cursor)
    return at_once(read_page(SqliteReads(cursor), where, place, page.limit))


class SqliteReads(Reads):
    """By a cursor, which never waits: `at_once` runs it."""

    async def next_topic(self, after: Topic, group: str | None) -> Topic | None:
        query, place = ("next_topic", (after,)) if group is None else ("next_topic_of_group", (group, after))
        topic: Topic | None = self._call.execute(QUERIES[query], place).fetchone()[0]
        return topic

    async def by_name(self, topic: Topic, after: str, group: str | None, most: int) -> list[Located]:
        if group is None:
            return read_tasks(self._call, QUERIES["page_by_name"], (topic, after, most))
        return read_tasks(self._call, QUERIES["page_by_group"], (group, topic, after, most))

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        instant, row = after
        same = read_tasks(self._call, QUERIES["page_at_instant"], (topic, CODES[state], instant, row, most))
        if len(same) == most or instant >= before:
            return same if instant < before else []
        later = (topic, CODES[state], instant, before, most - len(same))
        return same + read_tasks(self._call, QUERIES["page_after_instant"], later)
