"""Background work: tasks that log their defects at once, repeated work, and hooks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from bide.core.errors import StoreError
from bide.core.names import text_of
from bide.core.tasks import Task
from bide.ports import call_in_thread, final_result, is_coroutine_function

_log = logging.getLogger("bide.worker")
T = TypeVar("T")
LEAST_PATIENCE = 1.0
"""Seconds that hooks have to end although the grace is over, and once more after they were cancelled."""


def log_defect(task: asyncio.Task[Any]) -> None:
    """Log a defect when it ends a task, not when the task is garbage-collected. For `add_done_callback`."""
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        _log.error("a defect has ended the task %r", task.get_name(), exc_info=error)


def begin(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `work` in the background of the running loop."""
    task = asyncio.get_running_loop().create_task(work, name=f"bide {name}")
    task.add_done_callback(log_defect)
    return task


async def repeat(
    what: str,
    once: Callable[[], Awaitable[object]],
    every: float,
    *,
    log: logging.Logger,
    first_after: float = 0.0,
    after_error: float | None = None,
) -> None:
    """Call `once` every `every` seconds until cancelled. Store errors and defects are logged and do not end it.

    `what` names the work in the log. `first_after` and `after_error` are in seconds too.
    """
    again = every if after_error is None else after_error
    if first_after:
        await asyncio.sleep(first_after)
    while True:
        pause = again
        try:
            await once()
            pause = every
        except StoreError as error:
            log.warning("%s failed, trying again in %g s: %s", what, again, error)
        except Exception:
            log.exception("a defect stopped %s; trying again in %g s", what, again)
        await asyncio.sleep(pause)


async def run_to_end(verb: Coroutine[Any, Any, T]) -> T:
    """Await `verb`. It runs to its end in this context even if the caller is cancelled."""
    return await asyncio.shield(asyncio.get_running_loop().create_task(verb))


class Background:
    """Work in the background, until whose end its owner can wait."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = begin(work, name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def call(self, hooks: Iterable[Callable[[Any], Any]], dead: Any) -> None:
        """Call each `on_dead` hook with the task or row that died, a plain one in a thread.

        An error in a hook is logged and stops nothing.
        """
        for hook in hooks:
            self.begin(_run(hook, dead), f"on_dead hook for {_named(dead)}")

    async def ended(self, patience: float | None = None) -> None:
        """Wait for all that is running now; after `patience` seconds cancel it. A thread goes on nevertheless."""
        running = set(self._running)
        if running:
            _, running = await asyncio.wait(running, timeout=patience)
        for task in running:
            _log.warning("%s is cut off, since its worker stops", task.get_name())
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LEAST_PATIENCE)


async def _run(hook: Callable[[Any], Any], dead: Any) -> None:
    try:
        result = hook(dead) if is_coroutine_function(hook) else await call_in_thread(None, hook, dead)
        await final_result(result)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - a hook must not stop the worker, not even by sys.exit()
        _log.exception("on_dead hook for %s failed", _named(dead))


def _named(dead: object) -> str:
    return f"{dead.topic}/{dead.key}" if isinstance(dead, Task) else text_of(dead)
