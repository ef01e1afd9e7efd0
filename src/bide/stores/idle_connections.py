"""Connections that nobody uses at the moment, kept for a minute. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

_KEPT = 60.0
"""Seconds that a connection is kept which nobody uses."""


class IdleConnections:
    """At most so many; `drop` lets go of one at once."""

    def __init__(self, most: int, drop: Callable[[Any], None]) -> None:
        self._most = most
        self._drop = drop
        self._idle: list[tuple[float, Any]] = []
        self._sweep: asyncio.TimerHandle | None = None

    def put(self, connection: Any) -> None:
        if len(self._idle) >= self._most:
            self._drop(connection)
            return
        self._idle.append((time.monotonic(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT, self._tidy)

    def pop(self) -> Any:
        """The one that was used last, or None."""
        return self._idle.pop()[1] if self._idle else None

    def drop_all(self) -> None:
        """Of one that has been idle it was found that it is dead: the others have been idle for as long, or longer."""
        for connection in self.take_all():
            self._drop(connection)

    def take_all(self) -> list[Any]:
        """All of them, for whoever closes them."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        idle, self._idle = self._idle, []
        return [connection for _, connection in idle]

    def _tidy(self) -> None:
        self._sweep = None
        while self._idle and self._idle[0][0] <= time.monotonic() - _KEPT:
            self._drop(self._idle.pop(0)[1])
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT, self._tidy)
