"""Functions that are called with each task or row that dies, beside the worker that goes on."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from bide.core.tasks import Task
from bide.core.texts import text_of

_log = logging.getLogger("bide.worker")


class Hooks:
    """Those that run."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def call(self, hooks: Iterable[Callable[[Any], Any]], dead: Any) -> None:
        """Begin to call each; what one raises is logged, and stops nothing."""
        for hook in hooks:
            running = asyncio.get_running_loop().create_task(_run(hook, dead), name="bide on_dead")
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def ended(self) -> None:
        """Wait for those that run now."""
        await asyncio.gather(*self._running, return_exceptions=True)


async def _run(hook: Callable[[Any], Any], dead: Any) -> None:
    try:
        result = hook(dead)
        if inspect.isawaitable(result):
            await result
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - a hook must not stop the worker, by a sys.exit() neither
        _log.exception(
            "on_dead hook for %s failed", f"{dead.topic}/{dead.key}" if isinstance(dead, Task) else text_of(dead)
        )
