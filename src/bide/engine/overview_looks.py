"""The looks that an overview is made of, each of which takes a small share of one processor, however many ask.

An overview may be open all day, in many browsers, over a store with millions of tasks. So there are four of them
(`engine.looks`):

* the counts of each topic and state, which most stores stop at ten thousand;
* where they stopped, an exact count of what is pending, as seldom as its cost asks for: it shows how old it is;
* the history of the last two minutes, the pauses, and who says that he lives;
* what is held by whom, and since when the oldest task is due, in topics that have any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, as_datetime
from bide.core.records import Count, State, Topic
from bide.engine.client import Client
from bide.engine.looks import Look
from bide.engine.oldest import oldest_due
from bide.engine.overview import Counted, Seen, Told, Work
from bide.engine.pauses import Pauses
from bide.engine.presence import Presence
from bide.engine.throughput import Recent, Throughput

EVERY = 1.5
"""Seconds between two looks of a kind at least; who asks every two seconds gets a new one each time."""
_MOST_TOPICS = 20
"""Topics of which the oldest due task is looked for, and what is held: those that have the most."""
_EXACT_SHARE = 0.002
_WORK_SHARE = 0.002
_TOLD_SHARE = 0.02
"""These calls cost little; what they take is mostly the way to the store."""
_ENOUGH = 0.1
"""Seconds after which an exact count is not begun again with a higher limit."""
_TOO_LONG = 0.25
_SOON = 0.15
"""Seconds that somebody waits for the first exact count; after that it is shown as soon as it is there."""
_FIRST_LIMIT = 1_000_000
_HIGHEST_LIMIT = 100_000_000
_LEAST_LIMIT = 20_000


class Overviews:
    """Looks at the store of an open client for all who ask. Make it in the client's event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._presence = Presence(client)
        self._pauses = Pauses(client.store, client.clock)
        self._throughput = Throughput(client.store, client.clock)
        self._limit, self._highest = _FIRST_LIMIT, _HIGHEST_LIMIT
        self._last_exact: Counted | None = None
        self._counts = Look(self._count, every=EVERY, of=2)
        self._exact = Look(self._count_exactly, every=EVERY, share=_EXACT_SHARE, of=2)
        self._told = Look(self._listen, every=EVERY, share=_TOLD_SHARE, of=2)
        self._work = Look(self._look_at_work, every=EVERY, share=_WORK_SHARE, of=2)

    async def get(self) -> Seen:
        """What there is, each part as old as its look. Raises StoreError."""
        counts, told, work = await asyncio.gather(self._counts.get(), self._told.get(), self._work.get())
        if _stopped(counts):
            try:
                async with asyncio.timeout(_SOON if self._last_exact is None else 0):
                    self._last_exact = await self._exact.get()
            except TimeoutError:
                pass  # it goes on, and who asks next has it; until then what is known has to do
        return Seen(self._client.clock.now(), counts, self._last_exact, told, work)

    async def close(self) -> None:
        """Let no look go on."""
        await self._work.close()
        await self._told.close()
        await self._exact.close()
        await self._counts.close()

    # --- the looks

    async def _count(self) -> Counted:
        now = self._client.clock.now()
        return Counted(await self._client.tally([as_datetime(0), as_datetime(now + 1)]), now)

    async def _count_exactly(self) -> Counted:
        """As far as it can be afforded: a limit that was too low is raised while that is quick, one that took too long
        is lowered for the next time."""
        stopped = max(sum(not count.exact for count in (await self._counts.get()).tally.counts.values()), 1)
        limit = max(self._limit // stopped, _LEAST_LIMIT)
        began = self._loop.time()
        while True:
            now, since = self._client.clock.now(), self._loop.time()
            edges = (0, now + 1, LAST_INSTANT)
            tally = await self._client.tally([as_datetime(edge) for edge in edges], upto=limit)
            took, in_all = self._loop.time() - since, self._loop.time() - began
            exact = all(count.exact for counts in tally.forecast.values() for count in counts)
            if took > _TOO_LONG:
                self._highest = max(limit // 4, _LEAST_LIMIT)
            elif took < _TOO_LONG / 4:
                self._highest = min(self._highest * 2, _HIGHEST_LIMIT)
            if exact or in_all > _ENOUGH or 4 * limit > self._highest:
                self._limit = min(limit, self._highest) * stopped
                return Counted(tally, now)
            limit *= 4

    async def _listen(self) -> Told:
        recent, _, workers = await asyncio.gather(self._recent(), self._pauses.look(), self._presence.workers())
        return Told(recent, self._pauses.topics, workers)

    async def _recent(self) -> Recent | None:
        try:
            return await self._throughput.look()
        except SetupError:  # a service refuses it to a token that may not read every topic
            return None

    async def _look_at_work(self) -> Work:
        tally = (await self._counts.get()).tally
        due = {topic: count[0] for topic, count in tally.forecast.items()}
        leased = {topic: count for (topic, state), count in tally.counts.items() if state is State.LEASED}
        oldest, holding = await asyncio.gather(
            oldest_due(self._client, _most(due), self._client.clock.now()),
            self._presence.holding(_most(leased), whole=len(leased) <= _MOST_TOPICS),
        )
        return Work(oldest, holding)


def _stopped(counts: Counted) -> bool:
    """Whether there is more pending than was counted."""
    return any(not count.exact for (_, state), count in counts.tally.counts.items() if state is State.WAITING) or any(
        not count.exact for intervals in counts.tally.forecast.values() for count in intervals
    )


def _most(counts: Mapping[Topic, Count]) -> list[Topic]:
    """The topics that have the most, of those that have any."""
    some = [topic for topic, count in counts.items() if count.number]
    return sorted(some, key=lambda topic: (-counts[topic].number, topic))[:_MOST_TOPICS]
