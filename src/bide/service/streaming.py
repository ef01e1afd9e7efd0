"""The event stream: the store's event log as server-sent events, polled while a client listens.

The log belongs to the store, so a stream has the events of every instance and every worker. Events have no sequence
numbers: an event is identified by its time and a checksum of its content. A client that reconnects with `Last-Event-ID`
continues after that event, and gets a `gap` if the log has lost events in between.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from itertools import islice

import msgspec

from bide.core.errors import StoreError
from bide.core.events import Event
from bide.engine.client import Client
from bide.service.schemas import event_shape

_EVERY = 0.5
"""Seconds between two polls of the log while there are listeners."""
_HEARTBEAT = 15.0
_PAGE = 1_000
_LOG = 10_000
"""The number of lines that stores keep, and so the most that are read to find the last known event."""
_MOST_KEPT = 2 * _LOG
"""The most lines that a listener may fall behind before it gets a gap."""
_GAP = b"event: gap\ndata: {}\n\n"

_encode = msgspec.json.encode


class EventFeed:
    """Polls the log once for all listeners, each of which keeps its own position. Belongs to the running loop."""

    def __init__(self, client: Client) -> None:
        self.listeners = 0
        self._client = client
        self._known: set[str] = set()
        self._lines: deque[bytes | tuple[str, Event]] = deque(maxlen=_MOST_KEPT)
        """The new events of each poll with their ids, with a gap in place of lost ones."""
        self._end = 0
        self._more = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._closing = False

    async def stream(self, last: str | None, admits: Callable[[Event], bool]) -> AsyncGenerator[bytes, None]:
        """Stream the admitted events after `last`, then the coming ones, with a comment every 15 s.

        The stream has every event that is written after this has returned. Raises StoreError.
        """
        place = self._end  # before the log is read, so that no event falls in between
        self.listeners += 1
        try:
            log = await self._log(None if last is None else {last})
        except BaseException:
            self.listeners -= 1
            raise
        if self._polling is None or self._polling.done():
            self._known = {id for id, _ in log}
            self._polling = asyncio.get_running_loop().create_task(self._poll(), name="bide events")
        return self._parts(place, log, last, admits)

    async def _parts(
        self, place: int, log: list[tuple[str, Event]], last: str | None, admits: Callable[[Event], bool]
    ) -> AsyncGenerator[bytes, None]:
        ids = [id for id, _ in log]
        sent = set(ids)
        try:
            yield b": bide events\nretry: 1000\n\n"
            if last is not None:
                if last not in sent:
                    yield _GAP
                for id, event in log[ids.index(last) + 1 if last in sent else 0 :]:
                    if admits(event):
                        yield _written(id, event)
            while not self._closing:
                first, more = self._end - len(self._lines), self._more
                if place < first:
                    yield _GAP
                lines = list(islice(self._lines, max(place - first, 0), None))
                place = self._end
                for line in lines:
                    if isinstance(line, bytes):
                        yield line
                    elif line[0] not in sent and admits(line[1]):
                        yield _written(*line)
                if place == self._end:
                    try:
                        async with asyncio.timeout(_HEARTBEAT):
                            await more.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            self.listeners -= 1

    async def close(self) -> None:
        self._closing = True
        self._more.set()
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            if not self.listeners:
                return
            try:
                log = await self._log(self._known)
            except StoreError:
                continue  # the heartbeat goes on, and so does the log once the store is back
            fresh: list[bytes | tuple[str, Event]] = [line for line in log if line[0] not in self._known]
            if self._known and len(fresh) == len(log) >= _LOG:
                fresh.insert(0, _GAP)  # the log has lost earlier events
            self._known = {id for id, _ in log}
            if fresh:
                self._lines.extend(fresh)
                self._end += len(fresh)
                self._more.set()
                self._more = asyncio.Event()

    async def _log(self, known: Collection[str] | None) -> list[tuple[str, Event]]:
        """The newest events with their ids, oldest first: enough to include one of `known`, if the log still has one.

        None: one page.
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
