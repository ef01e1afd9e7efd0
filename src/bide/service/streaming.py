"""The event stream, as server-sent events: the store's event log, followed for as long as somebody listens.

The log is that of the store, so a stream tells what every instance and every worker wrote. It has no numbers that rise,
so an event is known by its time and a checksum of what it says; who comes back with `Last-Event-ID` goes on behind it,
and is told (`gap`) where the log has meanwhile lost what came after.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Collection
from typing import TypeAlias

import msgspec

from bide.core.errors import StoreError
from bide.core.events import Event
from bide.engine.client import Client
from bide.service.schemas import event_shape

_EVERY = 0.5
"""Seconds between two looks at the log, while somebody listens."""
_HEARTBEAT = 15.0
_PAGE = 1_000
_LOG = 10_000
"""Lines that stores keep: so far back is looked for the last one that is known."""
_MOST_WAITING = 2 * _LOG
"""Events that a listener may be behind, before it is told of a gap."""

_GAP = b"event: gap\ndata: {}\n\n"

_encode = msgspec.json.encode
_Told: TypeAlias = tuple[str, Event | None] | None
"""An event with its id; without the event: some were lost. None: it is over."""


class Following:
    """Looks at the log once for all who listen. Belongs to the running loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._listeners: set[asyncio.Queue[_Told]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._seen: list[tuple[str, Event]] = []
        self._closing = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    async def stream(self, last: str | None, admits: Callable[[Event], bool]) -> AsyncGenerator[bytes, None]:
        """The events after `last` that are admitted, then those to come; a comment every 15 s.

        What is noted once this has returned is in the stream. Raises StoreError.
        """
        queue: asyncio.Queue[_Told] = asyncio.Queue(_MOST_WAITING)
        self._listeners.add(queue)  # before the log is read, so that nothing falls in between
        try:
            log = await self._log(None if last is None else {last})
        except BaseException:
            self._listeners.discard(queue)
            raise
        if self._looking is None or self._looking.done():
            self._seen = log
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="bide events")
        return self._parts(queue, log, last, admits)

    async def _parts(
        self,
        queue: asyncio.Queue[_Told],
        log: list[tuple[str, Event]],
        last: str | None,
        admits: Callable[[Event], bool],
    ) -> AsyncGenerator[bytes, None]:
        told = {id for id, _ in log}
        try:
            yield b": bide events\nretry: 1000\n\n"
            if last is not None:
                ids = [id for id, _ in log]
                if last in ids:
                    log = log[ids.index(last) + 1 :]
                else:
                    yield _GAP
                for id, event in log:
                    if admits(event):
                        yield _written(id, event)
            while not self._closing:
                try:
                    async with asyncio.timeout(_HEARTBEAT):
                        got = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if got is None:
                    return
                id, event_or_gap = got
                if event_or_gap is None:
                    yield _GAP
                elif id not in told and admits(event_or_gap):
                    yield _written(id, event_or_gap)
        finally:
            self._listeners.discard(queue)

    async def close(self) -> None:
        """End all streams."""
        self._closing = True
        for queue in list(self._listeners):
            _put(queue, None)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        """While somebody listens."""
        while True:
            await asyncio.sleep(_EVERY)
            if not self._listeners:
                return
            known = {id for id, _ in self._seen}
            try:
                log = await self._log(known)
            except StoreError:
                continue  # the heartbeat goes on, and so does the log once the store is back
            fresh: list[_Told] = [one for one in log if one[0] not in known]
            if known and len(fresh) == len(log) >= _LOG:
                fresh.insert(0, ("", None))  # the log has lost what came before
            self._seen = log
            for queue in list(self._listeners):
                for one in fresh:
                    _put(queue, one)

    async def _log(self, known: Collection[str] | None) -> list[tuple[str, Event]]:
        """The newest of the log, oldest first, each with its id; so many that one of `known` is among them, if any is.

        None: a page will do.
        """
        log: list[tuple[str, Event]] = []
        for limit in (_PAGE, _LOG):
            events = await self._client.events(limit=limit)
            log = [(_id(event), event) for event in reversed(events)]
            if known is None or len(log) < limit or any(id in known for id, _ in log):
                break
        return log


def _id(event: Event) -> str:
    return f"{event.at}-{zlib.crc32(msgspec.msgpack.encode(event)):08x}"


def _written(id: str, event: Event) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (id.encode(), event.kind.value.encode(), _encode(event_shape(event)))


def _put(queue: asyncio.Queue[_Told], one: _Told) -> None:
    """Append; a listener that is too far behind loses its stream, and comes back with the last id that it saw."""
    try:
        queue.put_nowait(one)
    except asyncio.QueueFull:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
