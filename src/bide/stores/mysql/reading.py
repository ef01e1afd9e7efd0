"""The operations that only read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bide.core.instants import Millis
from bide.core.records import Count, Filter, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.mysql.lease_batches import under_way
from bide.stores.mysql.operations import look_up
from bide.stores.mysql.queries import CODES, ROW, STATES, record_of, these
from bide.stores.sql.reading import LATEST, Located, ServerReads, by_wake_at, count_of, topics_from

_ENDED = [state for state in STATES if not state.live]


class MySqlReads(ServerReads):
    _record_of, _row = record_of, ROW

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        found = {record.ref: record for record in await look_up(self._call, refs)}
        return [found.get(Ref(*ref)) for ref in refs]

    async def tally(self, spans: Sequence[tuple[Millis, Millis]], upto: int, only: Collection[Topic] | None) -> Tally:
        """O(topics x COUNTED) and what is under way."""
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        for topic in [topic async for topic in topics_from(self, Filter(), "")] if only is None else only:
            states, intervals = await self._counted(topic, spans, upto)
            counts.update({(topic, state): count for state, count in states.items() if count.number})
            if spans and states[State.WAITING].number:
                forecast[topic] = intervals
        return Tally(counts, forecast)

    async def _counted(
        self, topic: Topic, spans: Sequence[tuple[Millis, Millis]], upto: int
    ) -> tuple[dict[State, Count], list[Count]]:
        """How many are in each state, and how many wait in each interval.

        What is leased is counted one by one, and is not among what waits, where it lies.
        """
        call = self._call
        held = await under_way(call, topic)
        intervals = [(0, LATEST, COUNTED), *[(low, high, upto) for low, high in spans]]
        asked, among = [], []
        for low, high, most in intervals:
            among.append(sum(low <= one.at < high for one in held))
            asked.append(call.write("count_living", topic=topic, low=low, high=high, most=among[-1] + most + 1))
        asked += [call.write("count_ended", topic=topic, state=CODES[state], most=COUNTED + 1) for state in _ENDED]
        numbers = [number for ((number,),) in await call.send(*asked)]
        waiting = [
            count_of(number - leased, most)
            for number, leased, (_, _, most) in zip(numbers, among, intervals, strict=False)
        ]
        ended = [count_of(number, COUNTED) for number in numbers[len(intervals) :]]
        states = {State.WAITING: waiting[0], State.LEASED: count_of(len(held), COUNTED)}
        return {**states, **dict(zip(_ENDED, ended, strict=True))}, waiting[1:]

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        if state is State.LEASED:
            return await self._leased(topic, after, before, most)
        instant, row = after
        values = {"topic": topic, "state": CODES[state], "instant": instant, "most": most}
        statements = [self._call.write("page_after_instant", before=before, **values)]
        if instant < before:
            statements.insert(0, self._call.write("page_at_instant", row=max(row, 0), **values))
        found: list[Located] = []
        for rows in await self._call.send(*statements):
            found += self._located(rows)
        return found[:most]

    async def _leased(self, topic: Topic, after: tuple[Millis, int], before: Millis, most: int) -> list[Located]:
        held = [one for one in await under_way(self._call, topic) if (one.wake, one.row) > after and one.wake < before]
        if not held:
            return []
        rows = sorted(one.row for one in held[:most])
        [found] = await self._call.send(self._call.write("tasks_by_rows", these=these(rows)))
        return sorted(self._located(found), key=by_wake_at)
