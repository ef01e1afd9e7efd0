"""The operations that only read. A page and a tally are read in one snapshot: what moves meanwhile is seen once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from bide.core.instants import Millis
from bide.core.records import Count, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.postgres.journaled_connection import Call
from bide.stores.postgres.queries import CODES, ROW, STATES, record_of
from bide.stores.sql.journaled_connection import Reader
from bide.stores.sql.reading import Located, Reads, count_of


async def get(connection: Reader, refs: Sequence[Ref]) -> list[Record | None]:
    """Each task by its name. O(log n) per task."""

    async def work(call: Call) -> list[Record | None]:
        found: list[Record | None] = [None] * len(refs)
        rows = await call.fetch("tasks_by_names", [ref.topic for ref in refs], [ref.key for ref in refs])
        for row in rows:
            found[row[0] - 1] = record_of(row, 1)
        return found

    return await connection.read(work)


async def tally(connection: Reader, edges: Sequence[Millis] | None, upto: int, only: Collection[Topic] | None) -> Tally:
    """Counts by topic and state; O(topics x COUNTED) at worst, and of each interval up to `upto`, whatever waits."""

    async def work(call: Call) -> Tally:
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        await call.begin_snapshot()
        for topic, *numbers in await call.fetch("counts", COUNTED + 1):
            for state, number in zip(STATES, numbers, strict=True):
                if number and (only is None or topic in only):
                    counts[topic, state] = count_of(number, COUNTED)
        spans = [] if edges is None else list(pairwise(edges))
        waiting = [topic for topic, state in counts if state is State.WAITING]
        if spans and waiting:
            asked = [(topic, low, high) for topic in waiting for low, high in spans]
            rows = await call.fetch("forecast", upto + 1, *(list(one) for one in zip(*asked, strict=True)))
            for topic, number in rows:
                forecast.setdefault(topic, []).append(count_of(number, upto))
        await call.commit()
        return Tally(counts, forecast)

    return await connection.read(work)


class PostgresReads(Reads):
    _record_of, _row = record_of, ROW

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        return self._located(await self._call.fetch(f"page_of_state_{CODES[state]}", topic, *after, before, most))
