"""Writes the log of what was out of the ordinary: in batches, and never on the way of a delivery.

For whom the verbs of this context are called: somebody else than the client's own `actor`, for one call.

A service has one client and many callers. Who calls travels in the context, as an open transaction does, so that no
verb needs a parameter for it, and no way to the store goes past it.
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
Told: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and who called it, before the caller has them. Must not raise."""


class Caller(NamedTuple):
    """The caller, and the function that is told of their changes."""

    who: str
    told: Told | None


_caller: ContextVar[Caller | None] = ContextVar("bide_acting", default=None)


def current_caller() -> Caller | None:
    """For whom this coroutine calls; None: for the client's own actor."""
    return _caller.get()


@contextmanager
def acting_as(who: str, told: Told | None = None) -> Iterator[None]:
    """Within this block the verbs are `who`'s, in the event log and for `told`.

    `told` hears every answer of every verb that changes. Of the schedules in the event log only those are noted that
    replaced something: thousands of new tasks a second would push all else out of it. A verb that has been sent runs to
    its end although its caller is cancelled, so that nobody changes anything unheard by hanging up.
    """
    mark = _caller.set(Caller(who, told))
    try:
        yield
    finally:
        _caller.reset(mark)


async def run_to_end(verb: Coroutine[Any, Any, T]) -> T:
    """Await `verb`. It runs to its end, in this context, although the caller is cancelled meanwhile."""
    return await asyncio.shield(asyncio.get_running_loop().create_task(verb))


_log = logging.getLogger("bide.recorder")
_PAUSE = 0.05
_MOST = 10_000


class Recorder:
    """Gathers events for a moment and writes them together. A full or dead store costs events, and says how many."""

    def __init__(self, store: Store) -> None:
        self._log = store.features.events
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._writer = Coalescer(self.flush, _PAUSE, "recorder")
        self._writing = asyncio.Lock()
        self.dropped = 0

    def note(self, event: Event) -> None:
        """Remember `event`; it is written within some 50 ms."""
        if self._log is None:
            return
        if len(self._events) == _MOST:
            self.dropped += 1
        self._events.append(event)
        self._writer.ask()

    async def flush(self) -> None:
        """Everything noted until now is in the store when this returns, whoever writes it; or it was dropped."""
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
