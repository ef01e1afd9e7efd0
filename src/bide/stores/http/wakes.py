"""The wake stream: one long answer of the service, with a line for each earlier wake.

The service writes a heartbeat every few seconds, so the client replaces a stream that is silent for three times as
long. It then notifies every listener, because a wake may have been missed. A lost wake only costs lateness, because
every sleep is capped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection

import aiohttp
from msgspec import Raw

from bide.core.errors import StoreError
from bide.core.records import Topic
from bide.ports import OnWake, remote
from bide.stores.http.calls import Reply, Transport
from bide.stores.listeners import Listener, Listeners
from bide.stores.resending import Lost
from bide.stores.server import ServerTime

_log = logging.getLogger("bide.http")
_SILENCE = 3 * remote.HEARTBEAT
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Subscription:
    """One listener; the stream ends when the last listener closes."""

    def __init__(self, listener: Listener, subscriber: Subscriber) -> None:
        self._listener = listener
        self._subscriber = subscriber

    async def close(self) -> None:
        await self._listener.close()
        await self._subscriber.unsubscribed()


class Subscriber:
    """All listeners of a store, over one stream."""

    def __init__(self, transport: Transport, time: ServerTime, *, patience: float) -> None:
        self._transport = transport
        self._time = time
        self._patience = patience
        self._listeners = Listeners(_log)
        self._topics: frozenset[Topic] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.replaced = 0
        """The number of streams that broke or fell silent."""

    async def listen(self, topics: Collection[Topic], on_wake: OnWake) -> Subscription:
        """Subscribe to wakes of `topics`. Raises NotAllowed.

        Returns once subscribed, or after `patience`; then it keeps trying in the background.
        """
        listener = self._listeners.listen(topics, on_wake)
        try:
            async with self._changing:
                if self._task is None or not self._topics.issuperset(topics):
                    await self._stop()
                    await self._start(self._topics.union(topics))
        except BaseException:
            await listener.close()
            raise
        return Subscription(listener, self)

    async def unsubscribed(self) -> None:
        """End the stream if no listener is left."""
        async with self._changing:
            if not self._listeners:
                await self.close()

    async def close(self) -> None:
        await self._stop()
        self._topics = frozenset()

    async def _start(self, topics: frozenset[Topic]) -> None:
        open_ = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(topics, open_), name="bide wake stream")
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.shield(open_)
        except TimeoutError:
            _log.warning("%s: no subscription yet; tasks of others are found by polling", self._transport.where)
        except BaseException:
            await self._stop()
            raise
        self._topics = topics

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, topics: frozenset[Topic], open_: asyncio.Future[None]) -> None:
        pause = _FIRST_PAUSE
        body = remote.encode(remote.Call("", 0, None, Raw(remote.encode(sorted(topics)))))
        error: Exception
        while True:
            opened = False
            try:
                async with self._transport.stream(remote.LISTEN.name, body, _SILENCE) as response:
                    await self._check(response)
                    async for line in response.content:
                        if not opened:
                            opened, pause = True, _FIRST_PAUSE
                            self._subscribed(topics, open_)
                        if len(line) > 1:
                            self._listeners.notify(*remote.read_wake(line))
                error = Lost(f"{self._transport.where}: the stream has ended")
            except StoreError as refused:
                if not open_.done():
                    open_.set_exception(refused)
                    return
                error = refused
            except (Lost, aiohttp.ClientError, TimeoutError, OSError, ValueError) as met:
                error = met
            _log.info("the subscription ended (%s); making another", str(error) or type(error).__name__)
            self.replaced += 1
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        """Check the response. Raises NotAllowed for a permanent refusal, Lost for anything that may pass."""
        if response.status == 200 and response.content_type in (remote.STREAM_TYPE, remote.CONTENT_TYPE):
            return
        reply = Reply(response.status, response.content_type, await response.read())
        if reply.status in (401, 403):
            raise self._transport.not_allowed(reply.status, reply.text)
        raise Lost(f"{self._transport.where}: it answers {reply.status} {reply.text}".rstrip())

    def _subscribed(self, topics: frozenset[Topic], open_: asyncio.Future[None]) -> None:
        if not open_.done():
            open_.set_result(None)
            return
        now = int(self._time.seconds() * 1000)
        for topic in topics:  # a wake may have been missed meanwhile
            self._listeners.notify(topic, now)
