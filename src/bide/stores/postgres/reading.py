"""The operations that only read. A page and a tally are read in one snapshot: what moves meanwhile is seen once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.cursors import read_cursor
from bide.stores.pages import Located, read_page
from bide.stores.postgres.lane import Call, Runs
from bide.stores.postgres.rows import CODES, ROW, STATES, record_of

_SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"


async def get(lane: Runs, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""

    async def work(call: Call) -> list[Record | None]:
        found: list[Record | None] = [None] * len(refs)
        rows = await call.fetch("tasks_by_names", [ref.topic for ref in refs], [ref.key for ref in refs])
        for row in rows:
            found[row[0] - 1] = record_of(row, 1)
        return found

    return await lane.read(work)


async def tally(lane: Runs, edges: Sequence[Millis] | None, upto: int, only: Collection[Topic] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNTED) at worst, and of each interval up to `upto`, whatever waits."""

    async def work(call: Call) -> Tally:
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        await call.begin(_SNAPSHOT)
        for topic, *numbers in await call.fetch("counts", COUNTED + 1):
            for state, number in zip(STATES, numbers, strict=True):
                if number and (only is None or topic in only):
                    counts[topic, state] = _count(number, COUNTED)
        spans = [] if edges is None else list(pairwise(edges))
        waiting = [topic for topic, state in counts if state is State.WAITING]
        if spans and waiting:
            asked = [(topic, low, high) for topic in waiting for low, high in spans]
            rows = await call.fetch("forecast", upto + 1, *(list(one) for one in zip(*asked, strict=True)))
            for topic, number in rows:
                forecast.setdefault(topic, []).append(_count(number, upto))
        await call.commit()
        return Tally(counts, forecast)

    return await lane.read(work)


def _count(number: int, upto: int) -> Count:
    return Count(min(number, upto), number <= upto)


async def find(lane: Runs, where: Filter, page: Page) -> Found:
    """One page, each from the index that has its order; O(log n) per task, and one seek per topic passed."""
    place = read_cursor(page.cursor, where)

    async def work(call: Call) -> Found:
        if page.limit <= 0:
            return Found([], page.cursor)
        await call.begin(_SNAPSHOT)
        found = await read_page(_Reads(call), where, place, page.limit)
        await call.commit()
        return found

    return await lane.read(work)


class _Reads:
    """Pages by the queries of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def next_topic(self, after: Topic, group: str | None) -> Topic | None:
        if group is None:
            rows = await self._call.fetch("next_topic", after)
        else:
            rows = await self._call.fetch("next_topic_of_group", group, after)
        return rows[0][0] if rows else None

    async def by_name(self, topic: Topic, after: str, group: str | None, most: int) -> list[Located]:
        if group is None:
            rows = await self._call.fetch("page_by_name", topic, after, most)
        else:
            rows = await self._call.fetch("page_by_group", group, topic, after, most)
        return [(row[ROW], record_of(row)) for row in rows]

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        rows = await self._call.fetch(f"page_of_state_{CODES[state]}", topic, *after, before, most)
        return [(row[ROW], record_of(row)) for row in rows]
