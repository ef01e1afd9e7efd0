"""What the store says of itself when somebody asks for the metrics: that it is there, one tally, and its clock."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from bide.core.errors import StoreError
from bide.core.instants import Millis, as_datetime
from bide.core.records import State, Tally, Topic
from bide.engine.client import Client
from bide.engine.looks import Look
from bide.engine.oldest import oldest_due
from bide.ports import Clock, TellsTime
from bide.service.health import reach

_log = logging.getLogger("bide.metrics")
_LONG: Millis = 60_000
_SHARE = 0.1
"""Of one processor that counting may take: where a count takes half a second, it is not begun anew for five."""
_MOST_OLDEST = 50
"""Topics whose oldest due task is looked for: those with any that is overdue by a minute first, then the fullest."""


class Seen(Struct, frozen=True):
    """What one look found. Counts of a topic that has none in a state are left out."""

    tasks: Mapping[tuple[Topic, State], int]
    due: Mapping[Topic, int]
    oldest: Mapping[Topic, float]
    """Seconds that the oldest due task of a topic has been due; where none is due, nothing."""
    at_limit: int
    """Counts that stopped at the store's limit: there are at least so many."""
    skew: float | None
    """Seconds by which this machine's clock is ahead of the store's; None: the store has none of its own."""
    paused: Collection[Topic]


class Looked(Struct, frozen=True):
    """What is known now."""

    up: bool
    """Whether the store answers at all."""
    counted: bool = False
    """Whether it could be counted in time; else what was seen is of an earlier look."""
    seen: Seen | None = None
    age: float = 0.0
    """Seconds since what was seen was asked for."""


class Looking:
    """Looks at most every `every` seconds, however many ask, who wait for no longer than `patience`.

    Cost: a task that does not exist, and a tally with two intervals (O(topics) on most stores, never O(tasks)), a page
    of one for each topic that has due tasks, and the store's time. A tally that takes longer goes on for the next.
    """

    def __init__(self, client: Client, *, every: float, patience: float, wall: Clock) -> None:
        self._client = client
        self._every = every
        self._patience = patience
        self._wall = wall
        self._seen: Seen | None = None
        self._reaching: Look[object]
        self._counting: Look[Seen]
        self._made = False

    async def look(self) -> Looked:
        if not self._made:  # in the loop that asks
            self._reaching = Look(self._reach, every=self._every, share=1.0, lasting=False)
            self._counting = Look(self._ask, every=self._every, share=_SHARE)
            self._made = True
        if not await self._told("reached", self._reaching):
            return Looked(up=False)
        counted = await self._told("counted", self._counting)
        return Looked(up=True, counted=counted, seen=self._seen, age=self._counting.age)

    async def _reach(self) -> object:
        return await reach(self._client.store, self._patience)

    async def _told(self, what: str, look: Look[Any]) -> bool:
        """Whether there was an answer in time."""
        try:
            async with asyncio.timeout(self._patience):
                await look.get()
            return True
        except (StoreError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error
            _log.warning("the store could not be %s for the metrics: %s", what, why)
        except Exception:  # noqa: BLE001 - a defect must not hide the metrics that there are, and is said
            _log.exception("a defect kept the store from being %s for the metrics", what)
        return False

    async def _ask(self) -> Seen:
        client = self._client
        now = client.clock.now()
        edges = (0, max(now - _LONG, 0), now + 1)
        tally = await client.tally([as_datetime(edge) for edge in edges])
        overdue = {topic: [count.number for count in counts] for topic, counts in tally.forecast.items()}
        due = {topic: sum(numbers) for topic, numbers in overdue.items() if sum(numbers)}
        worst = sorted(due, key=lambda topic: (-min(overdue[topic][0], 1), -due[topic]))[:_MOST_OLDEST]
        oldest = await oldest_due(client, worst, now)
        self._seen = Seen(
            {of: count.number for of, count in tally.counts.items()},
            due,
            {topic: (now - since) / 1000 for topic, since in oldest.items()},
            _at_limit(tally),
            await self._skew(),
            (await client.paused()).keys(),
        )
        return self._seen

    async def _skew(self) -> float | None:
        store = self._client.store
        return await skew_of(store, self._wall) if isinstance(store, TellsTime) else None


async def skew_of(store: TellsTime, wall: Clock) -> float:
    """Seconds by which this machine's clock is ahead of the store's, give or take half a round trip."""
    before = wall.now()
    there = await store.time()
    return ((before + wall.now()) / 2 - there) / 1000


def by_label(values: Mapping[Topic, float], label: Callable[[str], str], *, most: bool = False) -> dict[str, float]:
    """`values` under the labels of their topics; those of several topics summed up, or the largest."""
    found: dict[str, float] = defaultdict(float)
    for topic, value in values.items():
        name = label(topic)
        found[name] = max(found[name], value) if most else found[name] + value
    return found


def _at_limit(tally: Tally) -> int:
    counts = [*tally.counts.values(), *(count for counts in tally.forecast.values() for count in counts)]
    return sum(not count.exact for count in counts)
