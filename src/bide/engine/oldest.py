"""Since when the oldest due task of a topic is due: the head of what waits, one page of one task for each topic."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from bide.core.instants import Millis
from bide.core.records import Filter, Page, State, Topic
from bide.engine.client import Client


async def oldest_due(client: Client, topics: Collection[Topic], now: Millis) -> dict[Topic, Millis]:
    """The earliest wake that has come by `now`; topics of which nothing is due are left out. Raises StoreError."""

    async def of(topic: Topic) -> Millis | None:
        where = Filter(topic=topic, state=State.WAITING, wake_before=now + 1)
        found = await client.find_page(where, Page(limit=1))
        return found.tasks[0].wake_at if found.tasks else None

    found = await asyncio.gather(*(of(topic) for topic in topics))
    return {topic: wake for topic, wake in zip(topics, found, strict=True) if wake is not None}
