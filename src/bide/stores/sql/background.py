"""What is looked at beside, one after another, so that nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from bide.core.errors import StoreError


class Background:
    """Runs one thing at a time. Belongs to one event loop."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Begin `work`, unless something is under way: then False. If the store is away that is said, and no more."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.get_running_loop().create_task(self._run(work), name="bide aside")
        return True

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except StoreError as error:
            self._log.info("a look from the very start came to nothing: %s", error)

    async def close(self) -> None:
        """What is under way is ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
