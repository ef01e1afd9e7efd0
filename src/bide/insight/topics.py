"""Each topic: its counts, how late it goes out, its workers and their settings, and its last day.

Everything comes from cached queries that all viewers share, so that a page which is open all day in many browsers
costs a small part of one processor. Counts stop at ten thousand on most stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Count, Pause, State, Topic
from bide.engine.client import Client
from bide.engine.history import MINUTE, Past, Row
from bide.engine.presence import Held, Presence
from bide.engine.route_registry import Announced, announced_routes
from bide.insight.cached_query import CachedQuery
from bide.insight.minute_log import LastDay, Quarter
from bide.insight.overview import Overviews, Snapshot, oldest_due
from bide.ports import Served

_NONE = Count(0)
_SHARE = 0.01


class TopicSeen(Struct, frozen=True):
    """One topic."""

    topic: Topic
    counts: Mapping[State, Count]
    due: Count
    """Of the waiting those whose time has come."""
    oldest: Millis | None
    """Since when the oldest of these is due; None: none is, or it was not looked for."""
    hour: Past | None
    """Its deliveries within the last hour; None: that is not to be had."""
    hour_span: Millis
    workers: Sequence[str] | None
    """Those alive; None: the store cannot tell."""
    pause: Pause | None

    @property
    def late(self) -> Millis | None:
        """The lateness that 99 of 100 deliveries of the last hour did not pass."""
        return None if self.hour is None else self.hour.lateness(0.99)

    @property
    def failed(self) -> int:
        """Deliveries of the last hour that failed: tried again later, or dead."""
        return 0 if self.hour is None else self.hour.failed

    def per_minute(self, number: int) -> float:
        """So many of the last hour, by the minute."""
        return number * MINUTE / max(self.hour_span, 1)

    @property
    def abandoned(self) -> bool:
        """Nobody works on it: no worker is alive for it, and within the hour nobody began anything."""
        began = self.hour is not None and self.hour.begun > 0
        leased = self.counts.get(State.LEASED, _NONE).number > 0
        return self.workers is not None and not self.workers and not began and not leased


class TopicStory(Struct, frozen=True):
    """One topic, and what costs more to know."""

    seen: TopicSeen
    routes: Sequence[Announced]
    holders: Mapping[str, Held]
    """The holders of its tasks now, and how many each has; of some hundreds that were looked at."""
    day: Sequence[Quarter]
    """The last day, the oldest first, the running quarter of an hour last; empty where that is not to be had."""


class Topics:
    """Those of an open client's store. Belongs to its event loop; `close` it before the client. Raises StoreError.

    `overviews` and `day` are of the same store, and not closed here: others show them too.
    """

    def __init__(self, client: Client, overviews: Overviews, day: LastDay) -> None:
        self._client = client
        self._overviews = overviews
        self._presence = Presence(client)
        self._day = day
        self._told = not isinstance(client.store, Served)
        """A service keeps to itself what is there to be shown."""
        self._routes = CachedQuery(self._read_routes, every=10.0, share=_SHARE)

    async def all(self) -> list[TopicSeen]:
        """Every topic that has tasks, is paused, is worked on, was announced, or was delivered within the hour."""
        seen, routes = await asyncio.gather(self._overviews.quick(), self._routes.get())
        names = {topic for topic, _ in seen.counts.tally.counts}
        names |= {*seen.counts.tally.forecast, *seen.pauses}
        names |= {one.route.topic for one in routes}
        working: dict[Topic, list[str]] = {}
        for holder, topics in (seen.workers or {}).items():
            for topic in topics:
                working.setdefault(topic, []).append(holder)
        hour = self._hour(seen)
        names |= {*working, *(topic for topic in ({} if hour is None else hour.topics) if topic)}
        return [self._seen(topic, seen, working.get(topic, [])) for topic in sorted(names)]

    async def one(self, topic: Topic) -> TopicStory:
        """This one, whether or not there is anything of it."""
        seen, routes, day, holding, oldest = await asyncio.gather(
            self._overviews.quick(), self._routes.get(), self._quarters(topic),
            self._presence.holding([topic], whole=False), oldest_due(self._client, [topic], self._client.clock.now()),
        )  # fmt: skip
        working = sorted(holder for holder, its in (seen.workers or {}).items() if topic in its)
        return TopicStory(
            self._seen(topic, seen._replace(oldest=oldest), working),
            [one for one in routes if one.route.topic == topic],
            {holder: held for (holder, _), held in sorted(holding.by.items())},
            day,
        )

    async def changed(self) -> None:
        """Show a pause or a resume that has just happened in what is seen next. Raises StoreError."""
        await self._overviews.changed()

    async def close(self) -> None:
        """Let no query go on."""
        await self._routes.close()

    async def _quarters(self, topic: Topic) -> Sequence[Quarter]:
        if self._told:
            await self._day.look()
        return self._day.quarters(topic)

    async def _read_routes(self) -> list[Announced]:
        return await announced_routes(self._client.store, self._client.clock) if self._told else []

    def _hour(self, seen: Snapshot) -> Row | None:
        return seen.recent.hour if self._told and seen.recent is not None else None

    def _seen(self, topic: Topic, seen: Snapshot, workers: Sequence[str]) -> TopicSeen:
        hour = self._hour(seen)
        return TopicSeen(
            topic,
            {state: seen.counts.of(topic, state) for state in State},
            seen.counts.due(topic),
            seen.oldest.get(topic),
            None if hour is None else hour.topics.get(topic) or Past(),
            0 if seen.recent is None else seen.recent.hour_span,
            None if seen.workers is None else workers,
            seen.pauses.get(topic),
        )
