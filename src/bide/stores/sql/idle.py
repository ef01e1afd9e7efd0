"""Connections that nobody uses: each is kept for a minute, and the one that was used last is lent first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""


class Idle(Generic[T]):
    """Belongs to one event loop. `drop` closes a connection at once."""

    def __init__(self, drop: Callable[[T], None]) -> None:
        self._drop = drop
        self._kept: list[tuple[float, T]] = []
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> T | None:
        """The one that was used last; None: there is none."""
        return self._kept.pop()[1] if self._kept else None

    def keep(self, connection: T) -> None:
        self._kept.append((time.monotonic(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)

    def take_all(self) -> list[T]:
        """End the sweeping, and hand over all that are kept."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        kept, self._kept = self._kept, []
        return [connection for _, connection in kept]

    def drop_all(self) -> None:
        for connection in self.take_all():
            self._drop(connection)

    def _tidy(self) -> None:
        self._sweep = None
        while self._kept and self._kept[0][0] <= time.monotonic() - KEPT:
            self._drop(self._kept.pop(0)[1])
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(KEPT, self._tidy)
