"""Writes the log of what was out of the ordinary: in batches, and never on the way of a delivery."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from bide.core.errors import StoreError
from bide.core.events import Event
from bide.engine.acting import to_the_end
from bide.engine.background import Soon
from bide.ports import KeepsEvents, Store

_log = logging.getLogger("bide.recorder")
_PAUSE = 0.05
_MOST = 10_000


class Recorder:
    """Gathers events for a moment and writes them together. A full or dead store costs events, and says how many."""

    def __init__(self, store: Store) -> None:
        self._store = store if isinstance(store, KeepsEvents) else None
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._soon = Soon(self.flush, _PAUSE, "recorder")
        self._writing = asyncio.Lock()
        self.dropped = 0

    def note(self, event: Event) -> None:
        """Remember `event`; it is written within some 50 ms."""
        if self._store is None:
            return
        if len(self._events) == _MOST:
            self.dropped += 1
        self._events.append(event)
        self._soon.ask()

    async def flush(self) -> None:
        """Everything noted until now is in the store when this returns, whoever writes it; or it was dropped."""
        if self._store is not None and (self._events or self._writing.locked()):
            await to_the_end(self._flush(self._store))

    async def _flush(self, store: KeepsEvents) -> None:
        async with self._writing:
            if not self._events:
                return
            batch = list(self._events)
            self._events.clear()
            try:
                await store.record(batch)
            except StoreError as error:
                self.dropped += len(batch)
                _log.warning("%d events were not recorded: %s", len(batch), error)

    async def close(self) -> None:
        await self._soon.close()
        await self.flush()
