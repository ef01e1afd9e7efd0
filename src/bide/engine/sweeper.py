"""Forgets ended tasks whose retention has passed, a page at a time, and says that this worker lives."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Clock, Shares, Store

_log = logging.getLogger("bide.sweeper")
PAGE = 1_000
PURGE_EVERY = 60.0
"""Seconds between purges; the first comes after a random part of it, so that workers do not sweep in step."""
ANNOUNCE_EVERY = 2.0
PRESENCE: Millis = 6_000
"""How long a worker counts as live after it last said so."""


class Sweeper:
    def __init__(self, store: Store, clock: Clock, holder: str, topics: Collection[Topic]) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._topics = list(topics)

    async def purge_for_ever(self) -> None:
        await asyncio.sleep(PURGE_EVERY * random.random())
        while True:
            try:
                purged = PAGE
                while purged == PAGE:
                    purged = await self._store.purge(now=self._clock.now(), limit=PAGE)
            except StoreError as error:
                _log.warning("purging failed, trying again in %.0f s: %s", PURGE_EVERY, error)
            except Exception:  # noqa: BLE001 - it outlives its defects, loudly
                _log.exception("a defect stopped a purge; trying again in %.0f s", PURGE_EVERY)
            await asyncio.sleep(PURGE_EVERY)

    async def announce_for_ever(self) -> None:
        while isinstance(self._store, Shares):
            try:
                now = self._clock.now()
                await self._store.announce(self._holder, self._topics, now + PRESENCE, now=now)
            except StoreError as error:
                _log.warning("presence could not be announced: %s", error)
            except Exception:  # noqa: BLE001 - as above
                _log.exception("a defect stopped an announcement")
            await asyncio.sleep(ANNOUNCE_EVERY)

    async def leave(self) -> None:
        """Say that this worker has gone."""
        if isinstance(self._store, Shares):
            now = self._clock.now()
            try:
                await self._store.announce(self._holder, [], now, now=now)
            except StoreError as error:
                _log.warning("leaving could not be announced; it shows by itself after a while: %s", error)
