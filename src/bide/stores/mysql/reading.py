"""The operations that only read. A page and a tally are read in one snapshot: what moves meanwhile is seen once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from heapq import merge
from itertools import pairwise

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.stores.cursors import Place, order_of, place_of, read_cursor, write_cursor
from bide.stores.mysql.connecting import Rows
from bide.stores.mysql.lane import Call, Runs
from bide.stores.mysql.operations import look_up
from bide.stores.mysql.rows import CODES, ROW, STATES, record_of

COUNT_LIMIT = 10_000
"""Where counting stops: a few milliseconds' worth of index entries."""
_LATEST: Millis = 2**62
"""After every instant that there is."""

_Located = tuple[int, Record]
"""The row's number and the record."""


async def get(lane: Runs, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""

    async def work(call: Call) -> list[Record | None]:
        found = {old.record.ref: old.record for old in await look_up(call, refs)}
        return [found.get(Ref(*ref)) for ref in refs]

    return await lane.read(work)


async def tally(lane: Runs, edges: Sequence[Millis] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNT_LIMIT) at worst, whatever waits."""

    async def work(call: Call) -> Tally:
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        await begin(call)
        spans = [] if edges is None else list(pairwise(edges))
        async for topic in _topics_from(call, Filter(), ""):
            states = [
                call.write("count_state", topic=topic, state=code, most=COUNT_LIMIT + 1) for code in CODES.values()
            ]
            waiting = [
                call.write("count_waiting_between", topic=topic, low=low, high=high, most=COUNT_LIMIT + 1)
                for low, high in spans
            ]
            numbers = [number for ((number,),) in await call.send(*states, *waiting)]
            for state, number in zip(STATES, numbers, strict=False):
                if number:
                    counts[topic, state] = _count(number)
            if spans and (topic, State.WAITING) in counts:
                forecast[topic] = [_count(number) for number in numbers[len(STATES) :]]
        await call.send(*call.commit())
        return Tally(counts, forecast)

    return await lane.read(work)


def _count(number: int) -> Count:
    return Count(min(number, COUNT_LIMIT), number <= COUNT_LIMIT)


async def begin(call: Call) -> None:
    """A transaction that sees one state of the database throughout."""
    await call.send(call.write("snapshot"), call.write("begin_snapshot"))


async def find(lane: Runs, where: Filter, page: Page) -> Found:
    """One page, each from the index that has its order; O(log n) per task, and one seek per topic passed."""
    order = order_of(where)
    place = read_cursor(page.cursor, order)

    async def work(call: Call) -> Found:
        if page.limit <= 0:
            return Found([], page.cursor)
        await begin(call)
        found = await _page(call, where, place, page.limit)
        await call.send(*call.commit())
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
            [rows] = await call.send(call.write("next_topic", topic=topic))
        else:
            [rows] = await call.send(call.write("next_topic_of_group", group=where.group, topic=topic))
        if not rows:
            return
        topic = rows[0][0].decode("utf-8", "surrogateescape")
        yield topic


async def _live(call: Call, where: Filter, start: Place, enough: int) -> list[_Located]:
    """Waiting and leased are two ranges of one index: merged by `wake_at`, and by row among equals."""
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
    instant, row = after
    values = {"topic": topic, "state": CODES[state], "instant": instant, "most": enough}
    statements = [call.write("page_after_instant", before=before, **values)]
    if instant < before:
        statements.insert(0, call.write("page_at_instant", row=max(row, 0), **values))
    found: list[_Located] = []
    for rows in await call.send(*statements):
        found += _located(rows)
    return found[:enough]


def _located(rows: Rows) -> list[_Located]:
    return [(row[ROW], record_of(row)) for row in rows]


def _by_wake_at(found: _Located) -> tuple[Millis, int]:
    return found[1].wake_at, found[0]


async def _named(call: Call, where: Filter, start: Place, enough: int) -> AsyncIterator[_Located]:
    """By key, of a group or of all; what else `where` says is looked at row by row."""
    key = start.key
    while True:
        if where.group is None:
            [rows] = await call.send(call.write("page_by_name", topic=start.topic, key=key, most=enough))
        else:
            values = {"group": where.group, "topic": start.topic, "key": key, "most": enough}
            [rows] = await call.send(call.write("page_by_group", **values))
        for row, record in _located(rows):
            if where.admits(record):
                yield row, record
        if len(rows) < enough:
            return
        key = record_of(rows[-1]).key
