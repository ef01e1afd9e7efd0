"""What the store says of itself when somebody asks for the metrics: one tally, one look at its clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from bide.core.errors import StoreError
from bide.core.instants import Millis, as_datetime
from bide.core.records import State, Tally, Topic
from bide.engine.client import Client
from bide.engine.oldest import oldest_due
from bide.ports import Clock, TellsTime

_log = logging.getLogger("bide.metrics")
_LONG: Millis = 60_000
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


class Looking:
    """Looks at most every `every` seconds, however many ask, and for no longer than `patience`; then nothing is known.

    Cost: a tally with two intervals (O(topics) on most stores, never O(tasks)), a page of one for each topic that has
    due tasks, and the store's time.
    """

    def __init__(self, client: Client, *, every: float, patience: float, wall: Clock) -> None:
        self._client = client
        self._every = every
        self._patience = patience
        self._wall = wall
        self._seen: Seen | None = None
        self._looked = float("-inf")
        self._looks: asyncio.Task[Seen | None] | None = None

    async def look(self) -> Seen | None:
        """None: the store did not answer."""
        if time.monotonic() - self._looked < self._every:
            return self._seen
        if self._looks is None or self._looks.done():
            self._looks = asyncio.get_running_loop().create_task(self._look(), name="bide metrics")
        return await asyncio.shield(self._looks)

    async def _look(self) -> Seen | None:
        try:
            async with asyncio.timeout(self._patience):
                self._seen = await self._ask()
        except (StoreError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error
            _log.warning("the store could not be counted for the metrics: %s", why)
            self._seen = None
        except Exception:  # noqa: BLE001 - a defect must not hide the metrics that there are, and is said
            _log.exception("a defect kept the store from being counted for the metrics")
            self._seen = None
        self._looked = time.monotonic()
        return self._seen

    async def _ask(self) -> Seen:
        client = self._client
        now = client.clock.now()
        edges = (0, max(now - _LONG, 0), now + 1)
        tally = await client.tally([as_datetime(edge) for edge in edges])
        overdue = {topic: [count.number for count in counts] for topic, counts in tally.forecast.items()}
        due = {topic: sum(numbers) for topic, numbers in overdue.items() if sum(numbers)}
        worst = sorted(due, key=lambda topic: (-min(overdue[topic][0], 1), -due[topic]))[:_MOST_OLDEST]
        oldest = await oldest_due(client, worst, now)
        return Seen(
            {of: count.number for of, count in tally.counts.items()},
            due,
            {topic: (now - since) / 1000 for topic, since in oldest.items()},
            _at_limit(tally),
            await self._skew(),
            (await client.paused()).keys(),
        )

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
