"""The counts of the tasks in a store, for its metrics: taken at intervals, and shared by all callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct

from bide.core.errors import StoreError
from bide.core.instants import Millis, as_datetime
from bide.core.records import State, Topic
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.overview import oldest_due
from bide.ports import SystemClock
from bide.service.health import reach, skew_of

_log = logging.getLogger("bide.metrics")
_LONG: Millis = 60_000
_SHARE = 0.1
"""The share of the time that counting may take: after a count of half a second, the next begins five seconds later."""
_MOST_OLDEST = 50
"""The most topics whose oldest due task is queried: those with tasks overdue by a minute first, then the fullest."""


class StoreSample(Struct, frozen=True):
    """The counts of one sample of the store. States in which a topic has no tasks are left out."""

    tasks: Mapping[tuple[Topic, State], int]
    due: Mapping[Topic, int]
    oldest: Mapping[Topic, float]
    """Seconds for which the oldest due task of each topic has been due, without topics that have none."""
    at_limit: int
    """The number of counts that stopped at the store's limit, and so are lower bounds."""
    skew: float | None
    """Seconds by which this machine's clock is ahead of the store's; None: the store has no clock of its own."""
    paused: Collection[Topic]


class StoreSampler:
    """Counts the store at most once in `every` seconds, however many callers ask; each waits at most `patience`.

    Cost: a get of a task that does not exist, a tally with two intervals (O(topics) on most stores, never O(tasks)), a
    page of one task for each topic with due tasks, and the store's time. A slow tally serves the next call.
    """

    def __init__(self, client: Client, *, every: float, patience: float) -> None:
        self._client = client
        self._patience = patience
        self._reaching = CachedQuery(lambda: reach(client.store, patience), every=every, share=1.0, lasting=False)
        self._counting = CachedQuery(self._ask, every=every, share=_SHARE)
        self.latest: StoreSample | None = None
        """The last complete sample."""

    @property
    def age(self) -> float:
        """Seconds since the latest sample began."""
        return self._counting.age

    async def sample(self) -> tuple[bool, bool]:
        """Take a sample. Returns whether the store answered, and whether it was counted in time; if not, `latest` is
        older."""
        if not await self._answered("reached", self._reaching):
            return False, False
        return True, await self._answered("counted", self._counting)

    async def _answered(self, what: str, look: CachedQuery[Any]) -> bool:
        """Run the query. Returns True if it answered in time."""
        try:
            async with asyncio.timeout(self._patience):
                await look.get()
            return True
        except (StoreError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error
            _log.warning("the store could not be %s for the metrics: %s", what, why)
        except Exception:  # noqa: BLE001 - a defect is logged, and must not hide the other metrics
            _log.exception("a defect kept the store from being %s for the metrics", what)
        return False

    async def _ask(self) -> StoreSample:
        client, clock = self._client, self._client.store.features.clock
        now = client.clock.now()
        edges = (0, max(now - _LONG, 0), now + 1)
        tally = await client.tally([as_datetime(edge) for edge in edges])
        overdue = {topic: [count.number for count in counts] for topic, counts in tally.forecast.items()}
        due = {topic: sum(numbers) for topic, numbers in overdue.items() if sum(numbers)}
        worst = sorted(due, key=lambda topic: (-min(overdue[topic][0], 1), -due[topic]))[:_MOST_OLDEST]
        oldest = await oldest_due(client, worst, now)
        self.latest = StoreSample(
            {of: count.number for of, count in tally.counts.items()},
            due,
            {topic: (now - since) / 1000 for topic, since in oldest.items()},
            sum(not count.exact for count in chain(tally.counts.values(), *tally.forecast.values())),
            None if clock is None else await skew_of(clock, SystemClock()),
            (await client.paused()).keys(),
        )
        return self.latest
