"""The operations that only read, on a connection of their own: they wait for no writer.

Each runs in one read transaction, so that it sees one state of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from heapq import merge
from itertools import pairwise
from typing import Any

from bide.core.instants import Millis
from bide.core.names import RESERVED_TOPICS
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.cursors import Place, place_of, read_cursor, write_cursor
from bide.stores.sqlite.rows import CODES, FEW, QUERIES, STATES, by_name, by_names, read_tasks

_LATEST: Millis = 2**62
"""After every instant that there is."""


def get(cursor: sqlite3.Cursor, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""
    known = by_names(cursor, refs) if len(refs) > FEW else {}
    found = (known.get(ref) or by_name(cursor, *ref) for ref in refs)
    return [None if one is None else one[1] for one in found]


def topics(cursor: sqlite3.Cursor) -> list[Topic]:
    """All topics, by a loose scan: one seek each."""
    return [topic for (topic,) in cursor.execute(QUERIES["topics"])]


def tally(cursor: sqlite3.Cursor, edges: Sequence[Millis] | None, upto: int, only: Collection[Topic] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNTED) at worst, and of each interval up to `upto`, whatever waits."""
    counts: dict[tuple[Topic, State], Count] = {}
    forecast: dict[Topic, list[Count]] = {}
    for topic in topics(cursor) if only is None else only:
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
    return Count(min(number, upto), number <= upto)


def find(cursor: sqlite3.Cursor, where: Filter, page: Page) -> Found:
    """One page, each from the index that has its order; O(log n) per task, and one seek per topic passed."""
    place = read_cursor(page.cursor, where)
    if page.limit <= 0:
        return Found([], page.cursor)
    tasks: list[Record] = []
    last = place
    for row, record in _walk(cursor, where, place, page.limit + 1):
        if len(tasks) == page.limit:
            return Found(tasks, write_cursor(last))
        tasks.append(record)
        last = place_of(place.order, record, row)
    return Found(tasks, None)


def _walk(cursor: sqlite3.Cursor, where: Filter, place: Place, enough: int) -> Iterator[tuple[int, Record]]:
    """Yield the tasks of `where` in order, from after `place`; at most `enough` rows are read at once."""
    for topic in _topics_from(cursor, where, place.topic):
        if where.topic is None and where.group is None and topic in RESERVED_TOPICS:
            continue
        start = place if topic == place.topic else Place(place.order, topic)
        if place.order == "live":
            yield from _live(cursor, where, start, enough)
        elif place.order == "ended":
            assert where.state is not None
            yield from _timed(cursor, topic, where.state, (start.instant, start.row), _LATEST, enough)
        else:
            yield from _named(cursor, where, start, enough)


def _topics_from(cursor: sqlite3.Cursor, where: Filter, first: Topic) -> Iterator[Topic]:
    if where.topic is not None:
        if where.topic >= first:
            yield where.topic
        return
    topic = first
    if first:
        yield first
    while True:
        if where.group is None:
            (topic,) = cursor.execute(QUERIES["next_topic"], (topic,)).fetchone()
        else:
            (topic,) = cursor.execute(QUERIES["next_topic_of_group"], (where.group, topic)).fetchone()
        if topic is None:
            return
        yield topic


def _live(cursor: sqlite3.Cursor, where: Filter, start: Place, enough: int) -> Iterator[tuple[int, Record]]:
    """Waiting and leased are two ranges of the index: merged by `wake_at`, and by row among equals."""
    after = (start.instant, start.row)
    if where.wake_from is not None:
        after = max(after, (where.wake_from, -1))
    before = _LATEST if where.wake_before is None else where.wake_before
    states = (State.WAITING, State.LEASED) if where.state is None else (where.state,)
    pages = [_timed(cursor, start.topic, state, after, before, enough) for state in states if state.live]
    return merge(*pages, key=_by_wake_at)


def _timed(
    cursor: sqlite3.Cursor, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, enough: int
) -> list[tuple[int, Record]]:
    """One state of one topic by its time, and by row among equal times, from after that place."""
    instant, row = after
    same = read_tasks(cursor, QUERIES["page_at_instant"], (topic, CODES[state], instant, row, enough))
    if len(same) == enough or instant >= before:
        return same if instant < before else []
    later = (topic, CODES[state], instant, before, enough - len(same))
    return same + read_tasks(cursor, QUERIES["page_after_instant"], later)


def _by_wake_at(found: tuple[int, Record]) -> tuple[Millis, int]:
    return found[1].wake_at, found[0]


def _named(cursor: sqlite3.Cursor, where: Filter, start: Place, enough: int) -> Iterator[tuple[int, Record]]:
    """By key, of a group or of all; what else `where` says is looked at row by row."""
    key = start.key
    while True:
        if where.group is None:
            page = read_tasks(cursor, QUERIES["page_by_name"], (start.topic, key, enough))
        else:
            page = read_tasks(cursor, QUERIES["page_by_group"], (where.group, start.topic, key, enough))
        for found in page:
            if where.admits(found[1]):
                yield found
        if len(page) < enough:
            return
        key = page[-1][1].key
