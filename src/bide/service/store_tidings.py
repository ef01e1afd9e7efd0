"""What a client that listens is told: a line for each topic that now wakes earlier, and that the service is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Notifies, Store
from bide.ports.wire import HEARTBEAT, tiding


class Streams:
    """Those that are open, so that they can be ended together."""

    def __init__(self) -> None:
        self.ending = False
        self.open: set[asyncio.Event] = set()

    def end(self) -> None:
        """Each ends as soon as it is looked at; those that come are ended at once."""
        self.ending = True
        for news in self.open:
            news.set()


async def tidings(store: Store, topics: Sequence[Topic], streams: Streams) -> AsyncGenerator[bytes, None]:
    """Lines of JSON, the first as soon as it is subscribed. Of a topic only the earliest wake waits to be sent, so a
    client that reads slowly costs no more memory than its topics. Ends with `streams`."""
    earliest: dict[Topic, Millis] = {}
    news = asyncio.Event()

    def heard(topic: Topic, wake: Millis) -> None:
        known = earliest.get(topic)
        if known is None or wake < known:
            earliest[topic] = wake
        news.set()

    listening = await store.listen(topics, heard) if isinstance(store, Notifies) else None
    streams.open.add(news)
    try:
        yield b"\n"
        while not streams.ending:
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await news.wait()
            except TimeoutError:
                yield b"\n"
                continue
            news.clear()
            if not earliest:
                continue
            told = b"".join(tiding((topic, wake)) + b"\n" for topic, wake in earliest.items())
            earliest.clear()
            yield told
    finally:
        streams.open.discard(news)
        if listening is not None:
            await listening.close()
