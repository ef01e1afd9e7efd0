"""Leasing on a SQL server: when a lease looks again at what others have locked, and whole looks in the background."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.stores.sql.journaled_connection import JournaledConnection
from bide.stores.sql.scan_position import ScanFloors

LATER: Millis = 20
"""When to look again at what somebody keeps locked for longer, as an open transaction of the application's may."""
POLL: Millis = 200
"""How often a worker looks while nothing tells it of what others schedule."""
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between looks at what others have locked: a verb takes a few round trips."""


class Leasing(ABC):
    """Takes what is due, and knows from where on to look. Belongs to the connection that leases, and its event loop."""

    bounds: Any
    """Where thorough looks begin while whole ones are expensive."""

    def __init__(self, runtime: Any, floors: ScanFloors) -> None:
        self._runtime = runtime
        self._connection: JournaledConnection[Any] = runtime.connections["lease"]
        self.floors = floors
        self._whole: asyncio.Task[None] | None = None

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        """Something wakes then."""
        self.floors.told(wakes)
        self.bounds.told(wakes)

    async def lease(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> Leased:
        """Take what is due: O(log n) per task taken, whatever else waits, and a few seeks per topic.

        `about`: what time it is there, as far as is known.

        What others have locked is passed over. If there is nothing else, it is looked for again a few times: whoever
        locks a task has decided something about it in a moment.
        """
        if not any(want > 0 for want in wants.values()):
            leased, _ = await self._look(wants, now, about)
            return leased
        for pause in _PAUSES:
            leased, skipped = await self._take(wants, now, about, lasts, holder)
            if leased.tasks or not skipped:
                return leased
            await asyncio.sleep(pause)
        leased, _ = await self._take(wants, now, about, lasts, holder)
        return leased

    def look_in_background(self, asked: Any) -> bool:
        """Begin a whole look, unless one is under way: then False. If the store is away that is logged, and no more."""
        if self._whole is not None and not self._whole.done():
            return False
        self._whole = asyncio.get_running_loop().create_task(self._look_aside(asked), name="bide whole look")
        return True

    async def _look_aside(self, asked: Any) -> None:
        try:
            await self._look_whole(self._runtime.connections["whole"], asked)
        except StoreError as error:
            self._runtime.dialect.log.info("a look from the very start came to nothing: %s", error)

    async def close(self) -> None:
        """End the look that is under way."""
        if self._whole is not None:
            self._whole.cancel()
            await asyncio.wait([self._whole])

    # --- the server's part

    @abstractmethod
    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        """Take what is due, oldest first, and tell whether something due was locked and passed over."""

    @abstractmethod
    async def _look(self, wants: Mapping[Topic, int], now: Millis | None, about: Millis) -> tuple[Leased, bool]:
        """Read the next wake, and tell whether something is due."""

    @abstractmethod
    async def _look_whole(self, connection: Any, asked: Any) -> None:
        """Read what comes first from the very start, which may take long, and tell `bounds`."""
