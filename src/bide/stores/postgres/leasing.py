"""Leasing: one statement takes what is due of each topic, and says when to come again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Leased, Record, Topic
from bide.stores.postgres.bounds import SOON, Asked, Bounds, Reach
from bide.stores.postgres.journaled_connection import Call, PostgresConnection, Row
from bide.stores.postgres.queries import MOST, WOKE, record_of
from bide.stores.sql.leasing import LATER, Leasing
from bide.stores.sql.scan_position import LONGEST, SLACK, ScanFloors

_BEFORE = 5
"""Columns in front of the record's: now, micros, wake, ends, skipped."""
_BEFORE_MORE = 2
"""The same of `lease_more`: now, micros."""
_SLACK: Millis = 100
"""The slack of the floors where wakes are heard: then who committed late has told of it, whatever is looked for."""


class PostgresLeasing(Leasing):
    """See `sql.leasing`."""

    def __init__(self, runtime: Any) -> None:
        pooled = runtime.address.pooled
        super().__init__(runtime, ScanFloors(used=runtime.by_server, slack=SLACK if pooled else _SLACK))
        self.bounds = Bounds(used=runtime.by_server and not pooled, background=self.look_in_background)

    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        floors, bounds = self.floors, self.bounds
        topics = sorted(wants)
        counts = [min(wants[topic], MOST[-1]) for topic in topics]
        form = next(most for most in MOST if most >= max(counts))

        async def take(call: Call) -> tuple[Leased, bool]:
            since, thorough = floors.ask(topics, about)
            began, reach = time.monotonic(), None
            try:
                if not thorough and len(topics) == 1 and floors.plenty(topics[0]):
                    rows = await call.numbered(f"lease_more_{form}", now, topics[0], counts[0], lasts, holder, since[0])
                    return self._taken_more(rows, topics[0], counts[0]), False
                reach = await self._reach(call, topics, since, thorough=thorough)
                began = time.monotonic()
                rows = await call.numbered(
                    f"lease_{form}", now, topics, counts, lasts, holder, reach.waiting, thorough, reach.lost,
                    reach.ends, SOON,
                )  # fmt: skip
            except BaseException:
                floors.failed(topics)
                if reach is not None:
                    bounds.failed(time.monotonic() - began, whole=reach.whole)
                raise
            if thorough:
                bounds.looked(topics, time.monotonic() - began, rows[0]["now"], reach, lasts)
            return self._taken(rows, dict(zip(topics, counts, strict=True)), thorough=thorough)

        async def taken(row: Row, call: Call) -> tuple[Leased, bool]:
            """The tasks that an earlier sending took and still holds: a late answer gives out nothing of others'."""
            there = row["now"]
            rows = await call.fetch("leased_then", list(row["topics"]), there + lasts, row["tokens"][0], holder)
            rows.sort(key=lambda one: one[WOKE])
            return Leased([record_of(one) for one in rows], there, there), False

        return await self._connection.run(take, taken)

    async def _reach(self, call: Call, topics: list[Topic], since: list[Millis], *, thorough: bool) -> Reach:
        """From where on a look that is to be thorough, or not, is to look."""
        bounds = self.bounds
        if not thorough:
            return Reach(since, since, since, False)
        bounds.on(call.connection)
        if bounds.watching:
            [row] = await call.fetch("writers")
            bounds.read(row["now"], row["writers"])
        reach: Reach = bounds.reach(topics, [self.floors.floor(topic) for topic in topics])
        if reach.whole and bounds.patience:
            call.allow(bounds.patience)
        return reach

    def _taken(self, rows: list[Any], wants: Mapping[Topic, int], *, thorough: bool) -> tuple[Leased, bool]:
        """The tasks, oldest first, and whether some were passed over; note how far it was looked."""
        floors, bounds = self.floors, self.bounds
        there, _, wake, ends, skipped = rows[0][:_BEFORE]
        first = _first(wake, ends)
        if skipped:
            wake = there + LATER if wake is None else min(wake, there + LATER)
        tasks: list[Record] = []
        numbers: dict[Topic, int] = {}
        reached: dict[Topic, Millis] = {}
        if rows[0]["topic"] is not None:
            rows.sort(key=lambda row: row[_BEFORE + WOKE])
            for row in rows:
                record = record_of(row, _BEFORE)
                tasks.append(record)
                numbers[record.topic] = numbers.get(record.topic, 0) + 1
                if record.planned_at == row[_BEFORE + WOKE]:  # it waited, and was no lost lease
                    reached[record.topic] = record.planned_at
        emptied = [topic for topic, want in wants.items() if not skipped and 0 <= numbers.get(topic, 0) < want]
        if not skipped:
            floors.emptied(emptied, there)
            floors.reached({topic: at for topic, at in reached.items() if numbers[topic] >= wants[topic]})
        if thorough:
            floors.ends(ends)
            bounds.ended([topic for topic, want in wants.items() if numbers.get(topic, 0) < max(want, 1)], ends, there)
            bounds.emptied(emptied)
            bounds.emptied([topic for topic, want in wants.items() if want <= 0], first)
        return Leased(tasks, floors.sleep(wake, there, thorough=thorough), there), skipped

    def _taken_more(self, rows: list[Any], topic: Topic, want: int) -> Leased:
        """The tasks, oldest first. If there are fewer than wanted, why is for the next look, at once, to see."""
        there = rows[0]["now"]
        if rows[0]["topic"] is None:
            rows = []
        rows.sort(key=lambda row: row[_BEFORE_MORE + WOKE])
        tasks = [record_of(row, _BEFORE_MORE) for row in rows]
        if len(tasks) < want:
            self.floors.ran_short(topic)
            return Leased(tasks, there, there)
        self.floors.reached({topic: tasks[-1].planned_at})
        return Leased(tasks, self.floors.sleep(None, there, thorough=False), there)

    async def _look(self, wants: Mapping[Topic, int], now: Millis | None, about: Millis) -> tuple[Leased, bool]:
        floors, bounds = self.floors, self.bounds
        topics = sorted(wants)

        async def work(call: Call) -> Leased:
            since, thorough = floors.ask(topics, about)
            reach = await self._reach(call, topics, since, thorough=thorough)
            began = time.monotonic()
            asked = (now, topics, reach.waiting, thorough, reach.lost, reach.ends, SOON)
            try:
                [row] = await call.timed("look_for_wake", *asked)
            except BaseException:
                floors.failed(topics)
                bounds.failed(time.monotonic() - began, whole=reach.whole)
                raise
            if thorough:
                bounds.looked(topics, time.monotonic() - began, row["now"], reach)
                floors.ends(row["ends"])
                bounds.ended(topics, row["ends"], row["now"])
                bounds.emptied(topics, _first(row["wake"], row["ends"]))
            return Leased([], floors.sleep(row["wake"], row["now"], thorough=thorough), row["now"])

        return await self._connection.read(work), False

    async def _look_whole(self, connection: PostgresConnection, asked: Asked) -> None:
        nothing = [0] * len(asked.topics)

        async def work(call: Call) -> None:
            call.allow(LONGEST)
            began = time.monotonic()
            [row] = await call.fetch("look_for_wake", None, asked.topics, nothing, True, nothing, nothing, SOON)
            self.bounds.found(asked, _first(row["wake"], row["ends"]), time.monotonic() - began)

        try:
            await connection.read(work)
        finally:
            self.bounds.lost_sight(asked)


def _first(*heads: Millis | None) -> Millis | None:
    """The earliest that is known."""
    return min((at for at in heads if at is not None), default=None)
