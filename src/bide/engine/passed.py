"""The last day as it happened, minute by minute: what was planned, what was done, and how fast it can go.

Taken from the history that every process writes (see `history`), of which little is kept here: a day of ten topics is
some megabytes. A minute that is over is not read again, but once every quarter of an hour, for what was written late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.engine.client import Client
from bide.engine.history import MINUTE, Row, bucket_of, rows_between
from bide.engine.looks import Look

_DAY = 24 * 60
_AT_ONCE = 60
"""Minutes that are read in one go, so that nobody waits long for the event loop."""
_STILL_WRITTEN = 3
"""Minutes after which a row is hardly written any more."""
_READ_AGAIN = 15
_EVERY = 5.0
_SHARE = 0.01
WAITED: Millis = 1_000
"""Who begins later than this had to wait for its turn."""
_WAITED_BUCKET = bucket_of(WAITED)


class Fastest(NamedTuple):
    """A minute amid a backlog, in which more deliveries ended than in any other such."""

    rate: float
    """Tasks a second."""
    at: Millis


class Past(NamedTuple):
    """What happened within one interval."""

    planned: int
    """Deliveries that began, by the time that they were planned for."""
    done: int
    """Deliveries that were done, by the time of that."""


class _Minute(NamedTuple):
    """What one minute's rows tell of one topic."""

    begun: int
    waited: int
    done: int
    ended: int
    planned: tuple[tuple[int, int], ...]

    def planned_before(self, minute: int) -> bool:
        """Whether any of it was planned for an earlier minute."""
        return any(one < minute for one, _ in self.planned)


class Passed:
    """Of an open client's store. Belongs to its event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._look: Look[None] = Look(self.read, every=_EVERY, share=_SHARE)
        self._minutes: dict[int, Mapping[Topic, _Minute]] = {}
        self._planned: dict[int, dict[Topic, int]] = {}
        self._read_to: int | None = None
        self._whole_at = 0
        self._fastest: dict[Hashable, Fastest | None] = {}

    @property
    def whole(self) -> bool:
        """Whether the day is known; before that, nothing of it."""
        return self._read_to is not None

    async def look(self) -> None:
        """See that what is known here is new enough. O(what happened since; at first in a day). Raises StoreError."""
        await self._look.get()

    async def close(self) -> None:
        """Let a look that is under way end."""
        await self._look.close()

    def between(self, edges: Sequence[Millis], admits: Callable[[Topic], bool]) -> list[Past]:
        """Of each interval, of the topics that `admits` admits. Edges should be of whole minutes."""
        planned, done = [0] * (len(edges) - 1), [0] * (len(edges) - 1)
        for minute in range(edges[0] // MINUTE, -(-edges[-1] // MINUTE)):
            place = bisect_right(edges, minute * MINUTE) - 1
            if not 0 <= place < len(planned):
                continue
            planned[place] += sum(number for topic, number in self._planned.get(minute, {}).items() if admits(topic))
            done[place] += sum(one.done for topic, one in self._minutes.get(minute, {}).items() if admits(topic))
        return [Past(*both) for both in zip(planned, done, strict=True)]

    def topics(self) -> set[Topic]:
        """All of which something happened."""
        return {topic for topics in self._minutes.values() for topic in topics}

    def fastest(self, whose: Hashable, admits: Callable[[Topic], bool]) -> Fastest | None:
        """The fastest minute throughout which tasks had to wait; None where there was no such minute.

        A burst that is worked off within seconds says nothing of what a minute could do. So only a minute counts into
        and out of which some of the backlog was carried, and in which nine of ten waited for longer than a second.
        `whose` stands for what `admits` admits: it is reckoned once for each.
        """
        if whose not in self._fastest:
            best: Fastest | None = None
            for minute in self._minutes:
                mine, after = self._of(minute, admits), self._of(minute + 1, admits)
                rate = sum(one.ended for one in mine) / 60
                if (
                    rate > (0 if best is None else best.rate)
                    and 10 * sum(one.waited for one in mine) >= 9 * sum(one.begun for one in mine)
                    and any(one.planned_before(minute) for one in mine)
                    and any(one.planned_before(minute + 1) for one in after)
                ):
                    best = Fastest(rate, minute * MINUTE)
            self._fastest[whose] = best
        return self._fastest[whose]

    def _of(self, minute: int, admits: Callable[[Topic], bool]) -> list[_Minute]:
        return [one for topic, one in self._minutes.get(minute, {}).items() if admits(topic)]

    async def read(self) -> None:
        latest = self._client.clock.now() // MINUTE
        whole = self._read_to is None or latest - self._whole_at >= _READ_AGAIN
        first = latest - _DAY if whole or self._read_to is None else max(self._read_to - _STILL_WRITTEN, latest - _DAY)
        found: dict[int, Mapping[Topic, _Minute]] = {}
        for start in range(first, latest + 1, _AT_ONCE):
            last = min(start + _AT_ONCE - 1, latest)
            rows = await rows_between(self._client.store, self._client.clock, start, last)
            found.update((minute, _minutes_of(row)) for minute, row in rows.items())
        kept = (
            {} if whole else {minute: its for minute, its in self._minutes.items() if latest - _DAY <= minute < first}
        )
        self._minutes = {**kept, **found}
        self._planned = _planned_of(self._minutes)
        self._fastest.clear()
        self._read_to = latest
        if whole:
            self._whole_at = latest


def _minutes_of(row: Row) -> Mapping[Topic, _Minute]:
    return {
        topic: _Minute(
            past.begun,
            sum(number for bucket, number in past.late.items() if bucket >= _WAITED_BUCKET),
            past.done,
            past.ended,
            tuple(past.planned.items()),
        )
        for topic, past in row.topics.items()
    }


def _planned_of(minutes: Mapping[int, Mapping[Topic, _Minute]]) -> dict[int, dict[Topic, int]]:
    """What was planned for which minute, whenever it began."""
    found: dict[int, dict[Topic, int]] = {}
    for topics in minutes.values():
        for topic, one in topics.items():
            for minute, number in one.planned:
                its = found.setdefault(minute, {})
                its[topic] = its.get(topic, 0) + number
    return found
