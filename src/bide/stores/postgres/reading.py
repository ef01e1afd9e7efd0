"""The operations that only read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bide.core.instants import Millis
from bide.core.records import Count, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED
from bide.stores.postgres.queries import CODES, ROW, STATES, record_of
from bide.stores.sql.reading import Located, ServerReads, count_of


class PostgresReads(ServerReads):
    _record_of, _row = record_of, ROW

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        found: list[Record | None] = [None] * len(refs)
        asked = [ref.topic for ref in refs], [ref.key for ref in refs]
        for row in await self._call.fetch("tasks_by_names", *asked):
            found[row[0] - 1] = record_of(row, 1)
        return found

    async def tally(self, spans: Sequence[tuple[Millis, Millis]], upto: int, only: Collection[Topic] | None) -> Tally:
        """O(topics x COUNTED) at worst, whatever waits."""
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        for topic, *numbers in await self._call.fetch("counts", COUNTED + 1):
            for state, number in zip(STATES, numbers, strict=True):
                if number and (only is None or topic in only):
                    counts[topic, state] = count_of(number, COUNTED)
        waiting = [topic for topic, state in counts if state is State.WAITING]
        if spans and waiting:
            asked = [(topic, low, high) for topic in waiting for low, high in spans]
            for topic, number in await self._call.fetch(
                "forecast", upto + 1, *(list(one) for one in zip(*asked, strict=True))
            ):
                forecast.setdefault(topic, []).append(count_of(number, upto))
        return Tally(counts, forecast)

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        return self._located(await self._call.fetch(f"page_of_state_{CODES[state]}", topic, *after, before, most))
