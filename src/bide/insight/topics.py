"""Each topic: its counts, how late it goes out, its workers and their settings, and its last day.

Everything comes from cached queries that all viewers share, so that a page which is open all day in many browsers
costs a small part of one processor. Counts stop at ten thousand on most stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from bide.core.records import Topic
from bide.engine.client import Client
from bide.engine.presence import Held, Presence
from bide.engine.route_registry import Announced, announced_routes
from bide.insight.cached_query import CachedQuery
from bide.insight.minute_log import LastDay, Quarter
from bide.insight.overview import Overviews, TopicSeen, oldest_due

_SHARE = 0.01


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
        self._routes = CachedQuery(lambda: announced_routes(client.store, client.clock), every=10.0, share=_SHARE)

    async def all(self) -> list[TopicSeen]:
        """Every topic that has tasks, is paused, is worked on, was announced, or was delivered within the hour."""
        seen, routes = await asyncio.gather(self._overviews.quick(), self._routes.get())
        names = seen.names() | {*seen.counts.tally.forecast, *(one.route.topic for one in routes)}
        names.update(*(seen.workers or {}).values())
        if seen.recent is not None:
            names.update(topic for topic in seen.recent.hour.topics if topic)
        return seen.topics(sorted(names))

    async def one(self, topic: Topic) -> TopicStory:
        """This one, whether or not there is anything of it."""
        seen, routes, _, holding, oldest = await asyncio.gather(
            self._overviews.quick(), self._routes.get(), self._day.look(),
            self._presence.holding([topic], whole=False), oldest_due(self._client, [topic], self._client.clock.now()),
        )  # fmt: skip
        return TopicStory(
            seen._replace(oldest=oldest).topics([topic])[0],
            [one for one in routes if one.route.topic == topic],
            {holder: held for (holder, _), held in sorted(holding.by.items())},
            self._day.quarters(topic),
        )

    async def close(self) -> None:
        """Let no query go on."""
        await self._routes.close()
