"""The event log's writer, and the caller in whose name the verbs of a context are called.

A service has one client and many callers. So the caller travels in the context, as an open transaction does: no verb
needs a parameter for it, and every way to the store notes it. Events are written in batches, and never on the way of a
delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

from bide.core.answers import Answer
from bide.core.errors import StoreError
from bide.core.events import Event
from bide.engine.background import Coalescer
from bide.ports import KeepsEvents, Store

T = TypeVar("T")
OnChange: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and the caller's name, before these are returned. Must not
raise.
"""


class Caller(NamedTuple):
    """The caller of the verbs in a context."""

    who: str
    on_change: OnChange | None


_caller: ContextVar[Caller | None] = ContextVar("bide_acting", default=None)


def current_caller() -> Caller | None:
    """The caller that this coroutine acts for; None: the client's own actor."""
    return _caller.get()


@contextmanager
def acting_as(who: str, on_change: OnChange | None = None) -> Iterator[None]:
    """Within this block the verbs are `who`'s, in the event log and for `on_change`.

    `on_change` is called with every answer of every verb that changes. Of schedules the event log notes only those that
    replaced something: thousands of new tasks a second would push all else out of it. A verb that has been sent runs to
    its end although its caller is cancelled, so that hanging up hides no change.
    """
    mark = _caller.set(Caller(who, on_change))
    try:
        yield
    finally:
        _caller.reset(mark)


async def run_to_end(verb: Coroutine[Any, Any, T]) -> T:
    """Await `verb`, which runs to its end in this context although the caller is cancelled meanwhile."""
    return await asyncio.shield(asyncio.get_running_loop().create_task(verb))


_log = logging.getLogger("bide.recorder")
_PAUSE = 0.05
"""Seconds for which events gather."""
_MOST = 10_000
"""Events that wait to be written; beyond that the oldest are dropped."""


class Recorder:
    """Gathers events for a moment and writes them together. Counts those that a full or unreachable store costs."""

    def __init__(self, store: Store) -> None:
        self._log = store.features.events
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._writer = Coalescer(self.flush, _PAUSE, "recorder")
        self._writing = asyncio.Lock()
        self.dropped = 0

    def note(self, event: Event) -> None:
        """Take `event`; it is written within some 50 ms."""
        if self._log is None:
            return
        if len(self._events) == _MOST:
            self.dropped += 1
        self._events.append(event)
        self._writer.trigger()

    async def flush(self) -> None:
        """Return once everything noted until now is in the store, or was dropped."""
        if self._log is not None and (self._events or self._writing.locked()):
            await run_to_end(self._flush(self._log))

    async def _flush(self, log: KeepsEvents) -> None:
        async with self._writing:
            if not self._events:
                return
            batch = list(self._events)
            self._events.clear()
            try:
                await log.record(batch)
            except StoreError as error:
                self.dropped += len(batch)
                _log.warning("%d events were not recorded: %s", len(batch), error)

    async def close(self) -> None:
        await self._writer.close()
        await self.flush()
