"""The operations that only read. A page and a tally are read in one snapshot: what moves meanwhile is seen once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.cursors import order_of, read_cursor
from bide.stores.mysql.connecting import Rows
from bide.stores.mysql.lane import Call, Runs
from bide.stores.mysql.operations import look_up
from bide.stores.mysql.rows import CODES, ROW, STATES, record_of
from bide.stores.pages import Located, read_page, topics_from


async def get(lane: Runs, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""

    async def work(call: Call) -> list[Record | None]:
        found = {old.record.ref: old.record for old in await look_up(call, refs)}
        return [found.get(Ref(*ref)) for ref in refs]

    return await lane.read(work)


async def tally(lane: Runs, edges: Sequence[Millis] | None, upto: int) -> Tally:
    """Counts by topic and state; O(topics x COUNTED) at worst, and of each interval up to `upto`, whatever waits."""

    async def work(call: Call) -> Tally:
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        await begin(call)
        spans = [] if edges is None else list(pairwise(edges))
        async for topic in topics_from(_Reads(call), Filter(), ""):
            states = [call.write("count_state", topic=topic, state=code, most=COUNTED + 1) for code in CODES.values()]
            waiting = [
                call.write("count_waiting_between", topic=topic, low=low, high=high, most=upto + 1)
                for low, high in spans
            ]
            numbers = [number for ((number,),) in await call.send(*states, *waiting)]
            for state, number in zip(STATES, numbers, strict=False):
                if number:
                    counts[topic, state] = _count(number, COUNTED)
            if spans and (topic, State.WAITING) in counts:
                forecast[topic] = [_count(number, upto) for number in numbers[len(STATES) :]]
        await call.send(*call.commit())
        return Tally(counts, forecast)

    return await lane.read(work)


def _count(number: int, upto: int) -> Count:
    return Count(min(number, upto), number <= upto)


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
        found = await read_page(_Reads(call), where, place, page.limit)
        await call.send(*call.commit())
        return found

    return await lane.read(work)


class _Reads:
    """Pages by the queries of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def next_topic(self, after: Topic, group: str | None) -> Topic | None:
        call = self._call
        if group is None:
            [rows] = await call.send(call.write("next_topic", topic=after))
        else:
            [rows] = await call.send(call.write("next_topic_of_group", group=group, topic=after))
        return rows[0][0].decode("utf-8", "surrogateescape") if rows else None

    async def by_name(self, topic: Topic, after: str, group: str | None, most: int) -> list[Located]:
        call = self._call
        if group is None:
            [rows] = await call.send(call.write("page_by_name", topic=topic, key=after, most=most))
        else:
            [rows] = await call.send(call.write("page_by_group", group=group, topic=topic, key=after, most=most))
        return _located(rows)

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        instant, row = after
        values = {"topic": topic, "state": CODES[state], "instant": instant, "most": most}
        statements = [self._call.write("page_after_instant", before=before, **values)]
        if instant < before:
            statements.insert(0, self._call.write("page_at_instant", row=max(row, 0), **values))
        found: list[Located] = []
        for rows in await self._call.send(*statements):
            found += _located(rows)
        return found[:most]


def _located(rows: Rows) -> list[Located]:
    return [(row[ROW], record_of(row)) for row in rows]
