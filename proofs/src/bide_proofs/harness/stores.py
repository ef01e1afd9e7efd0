"""Questions to any store before and after a run: a part of its own, is it empty, is it drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

from bide.app import Bide
from bide.cli.bench.redis_server import redis_server
from bide.core.errors import StoreError, StoreMismatch
from bide.core.records import State
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker
from bide_proofs.harness.command import PATIENCE

LOOK = 0.25
"""Seconds from one look at a store to the next."""
_REDIS = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")


async def migrated(url: str) -> None:
    """Make the tables of a store that has some, where they are missing or old."""
    store = store_maker(url, Settings())()
    if isinstance(store, HasSchema) and await store.plan():
        await store.migrate()


async def refuse_unless_empty(app: Bide, topics: Collection[str]) -> None:
    """Raises StoreMismatch if there are tasks of these topics: they would be delivered, and judged."""
    tally = await app.tally()
    if any(tally.number(topic) for topic in topics):
        raise StoreMismatch(f"the store has tasks of the topics {', '.join(topics)} already; give an empty one")


async def live_tasks(app: Bide, *topics: str) -> int:
    """How many tasks of these topics, or of all, wait or are being delivered."""
    tally = await app.tally()
    return sum(tally.number(topic, state) for topic in topics or (None,) for state in State if state.live)


async def drained(app_of: Callable[[], Bide], *topics: str) -> float | None:
    """Wait until nothing of these topics, or of all, is live, though the store may be away; seconds. None: never."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        try:
            async with app_of() as app:
                while time.monotonic() < began + PATIENCE:
                    if not await live_tasks(app, *topics):
                        return time.monotonic() - began
                    await asyncio.sleep(LOOK)
        except StoreError:
            await asyncio.sleep(LOOK)
    return None


@contextmanager
def own_namespace(url: str) -> Iterator[str]:
    """On Redis a fresh namespace, unless `url` names one; its keys are removed at the end."""
    parts = urlsplit(url)
    if parts.scheme not in _REDIS or "namespace" in dict(parse_qsl(parts.query)):
        yield url
        return
    with redis_server(url) as server:
        try:
            yield server.url
        finally:
            server.remove()
