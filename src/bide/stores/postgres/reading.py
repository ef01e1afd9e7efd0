"""The operations that only read. A page and a tally are read in one snapshot: what moves meanwhile is seen once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from heapq import merge
from itertools import pairwise

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.stores.cursors import Place, order_of, place_of, read_cursor, write_cursor
from bide.stores.postgres.lane import Call, Runs
from bide.stores.postgres.rows import CODES, ROW, STATES, record_of

COUNT_LIMIT = 10_000
"""Where counting stops: about a millisecond's worth of index entries."""
_LATEST: Millis = 2**62
"""After every instant that there is."""
_SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"

_Located = tuple[int, Record]
"""The row's number and the record."""


async def get(lane: Runs, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""

    async def work(call: Call) -> list[Record | None]:
        found: list[Record | None] = [None] * len(refs)
        rows = await call.fetch("tasks_by_names", [ref.topic for ref in refs], [ref.key for ref in refs])
        for row in rows:
            found[row[0] - 1] = record_of(row, 1)
        return found

    return await lane.read(work)


async def tally(lane: Runs, edges: Sequence[Millis] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNT_LIMIT) at worst, whatever waits."""

    async def work(call: Call) -> Tally:
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        await call.begin(_SNAPSHOT)
        for topic, *numbers in await call.fetch("counts", COUNT_LIMIT + 1):
            for state, number in zip(STATES, numbers, strict=True):
                if number:
                    counts[topic, state] = _count(number)
        spans = [] if edges is None else list(pairwise(edges))
        waiting = [topic for topic, state in counts if state is State.WAITING]
        if spans and waiting:
            asked = [(topic, low, high) for topic in waiting for low, high in spans]
            rows = await call.fetch("forecast", COUNT_LIMIT + 1, *(list(one) for one in zip(*asked, strict=True)))
            for topic, number in rows:
                forecast.setdefault(topic, []).append(_count(number))
        await call.commit()
        return Tally(counts, forecast)

    return await lane.read(work)


def _count(number: int) -> Count:
    return Count(min(number, COUNT_LIMIT), number <= COUNT_LIMIT)


async def find(lane: Runs, where: Filter, page: Page) -> Found:
    """One page, each from the index that has its order; O(log n) per task, and one seek per topic passed."""
    order = order_of(where)
    place = read_cursor(page.cursor, order)

    async def work(call: Call) -> Found:
        if page.limit <= 0:
            return Found([], page.cursor)
        await call.begin(_SNAPSHOT)
        found = await _page(call, where, place, page.limit)
        await call.commit()
        return found

    return await lane.read(work)


async def _page(call: Call, where: Filter, place: Place, limit: int) -> Found:
    tasks: list[Record] = []
    last = place
    async for row, record in _walk(call, where, place, limit + 1):
        if len(tasks) == limit:
            return Found(tasks, write_cursor(last))
        tasks.append(record)
        last = place_of(place.order, record, row)
    return Found(tasks, None)


async def _walk(call: Call, where: Filter, place: Place, enough: int) -> AsyncIterator[_Located]:
    """What `where` means, in order, from after `place`; at most `enough` rows are read at once."""
    async for topic in _topics_from(call, where, place.topic):
        start = place if topic == place.topic else Place(place.order, topic)
        if place.order == "live":
            for one in await _live(call, where, start, enough):
                yield one
        elif place.order == "ended":
            assert where.state is not None
            for one in await _timed(call, topic, where.state, (start.instant, start.row), _LATEST, enough):
                yield one
        else:
            async for one in _named(call, where, start, enough):
                yield one


async def _topics_from(call: Call, where: Filter, first: Topic) -> AsyncIterator[Topic]:
    if where.topic is not None:
        if where.topic >= first:
            yield where.topic
        return
    topic = first
    if first:
        yield first
    while True:
        if where.group is None:
            rows = await call.fetch("next_topic", topic)
        else:
            rows = await call.fetch("next_topic_of_group", where.group, topic)
        if not rows or rows[0][0] is None:
            return
        topic = rows[0][0]
        yield topic


async def _live(call: Call, where: Filter, start: Place, enough: int) -> list[_Located]:
    """Waiting and leased are two indexes: merged by `wake_at`, and by row among equals."""
    after = (start.instant, start.row)
    if where.wake_from is not None:
        after = max(after, (where.wake_from, -1))
    before = _LATEST if where.wake_before is None else where.wake_before
    states = (State.WAITING, State.LEASED) if where.state is None else (where.state,)
    pages = [await _timed(call, start.topic, state, after, before, enough) for state in states if state.live]
    return list(merge(*pages, key=_by_wake_at))


async def _timed(
    call: Call, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, enough: int
) -> list[_Located]:
    """One state of one topic by its time, and by row among equal times, from after that place."""
    rows = await call.fetch(f"page_of_state_{CODES[state]}", topic, *after, before, enough)
    return [(row[ROW], record_of(row)) for row in rows]


def _by_wake_at(found: _Located) -> tuple[Millis, int]:
    return found[1].wake_at, found[0]


async def _named(call: Call, where: Filter, start: Place, enough: int) -> AsyncIterator[_Located]:
    """By key, of a group or of all; what else `where` says is looked at row by row."""
    key = start.key
    while True:
        if where.group is None:
            rows = await call.fetch("page_by_name", start.topic, key, enough)
        else:
            rows = await call.fetch("page_by_group", where.group, start.topic, key, enough)
        for row in rows:
            record = record_of(row)
            if where.admits(record):
                yield row[ROW], record
        if len(rows) < enough:
            return
        key = rows[-1]["key"]
