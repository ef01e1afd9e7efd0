"""What a client that listens is told: a line for each topic that now wakes earlier, and that the service is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Notifies, Store
from bide.ports.wire import HEARTBEAT, tiding

Still = Callable[[], Awaitable[object]]
"""Raises when the caller may listen no longer."""


async def tidings(store: Store, topics: Sequence[Topic], still: Still | None) -> AsyncIterator[bytes]:
    """Lines of JSON, the first as soon as it is subscribed. Of a topic only the earliest wake waits to be sent, so a
    client that reads slowly costs no more memory than its topics. Ends by being closed, or when `still` raises."""
    earliest: dict[Topic, Millis] = {}
    news = asyncio.Event()

    def heard(topic: Topic, wake: Millis) -> None:
        known = earliest.get(topic)
        if known is None or wake < known:
            earliest[topic] = wake
        news.set()

    listening = await store.listen(topics, heard) if isinstance(store, Notifies) else None
    try:
        yield b"\n"
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await news.wait()
            except TimeoutError:
                if still is not None:
                    await still()
                yield b"\n"
                continue
            news.clear()
            told = b"".join(tiding((topic, wake)) + b"\n" for topic, wake in earliest.items())
            earliest.clear()
            yield told
    finally:
        if listening is not None:
            await listening.close()
