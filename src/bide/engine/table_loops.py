"""The loops over all watched tables of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bide.engine.tables import TableLoop

__all__ = ["TableLoop", "TableLoops"]


class TableLoops(list[TableLoop]):
    """All tables of one worker."""

    _started: Sequence[TableLoop] = ()

    async def start(self) -> None:
        """Start them; none, if one cannot be. Raises SetupError, StoreUnavailable."""
        try:
            for loop in self:
                await loop.start()
                self._started = (*self._started, loop)
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace: float) -> None:
        started, self._started = self._started, ()
        await asyncio.gather(*(loop.stop(grace) for loop in started))

    async def until_empty(self) -> None:
        await asyncio.gather(*(loop.until_empty() for loop in self._started))

    @property
    def fired(self) -> int:
        """Rows that were fired so far."""
        return sum(loop.stats.fired for loop in self)
