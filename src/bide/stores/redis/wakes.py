"""Subscriptions to earlier wakes, which test themselves.

A subscription can die silently: the connection is half-open, the server was replaced, or the slot has moved away. So
every few seconds the subscriber sends itself an echo through the server; a subscription that does not receive its echo
is replaced and counted. Meanwhile nothing is lost: every head is queried again within a second.

If channels are sharded (a Cluster of Redis 7 or Valkey), each shard has its own channel on the server with its slot;
otherwise one channel serves the namespace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from msgspec import Struct, field
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from bide.core.errors import StoreUnavailable
from bide.core.instants import NEVER, Millis
from bide.core.records import Topic
from bide.ports import OnTaken, OnWake
from bide.stores.listeners import Listener, Listeners
from bide.stores.redis.layout import Layout
from bide.stores.redis.leasing import Leaser
from bide.stores.redis.topology import Topology, said
from bide.stores.resending import Lost, NotSent

_log = logging.getLogger("bide.redis")
ECHO_EVERY = 2.0
"""Seconds between echoes; a subscription is dead if an echo has not returned when the next one is due."""
_PAUSE = 0.1

HeardWake = Callable[[int, Topic, Millis], None]
"""(shard, topic, wake); a negative wake: all that was due was leased, and the head is now its absolute value"""


class Subscriber:
    """Receives the wakes of one shard (or of all, on one channel) over a separate connection."""

    def __init__(self, topology: Topology, layout: Layout, shard: int | None, name: str, heard: HeardWake) -> None:
        self.replaced = 0
        """How often the subscription was found dead or cut off, and replaced."""
        self._topology = topology
        self._shard = shard
        tag = f"{{{layout.namespace}}}:" if shard is None else layout.tags[shard]
        self._channels = (layout.wake_channel(shard), f"{tag}echo:{name}".encode())
        self._heard = heard
        self._echoed = asyncio.Event()
        self._open = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="bide subscriber")

    async def subscribed(self, patience: float) -> None:
        """Wait until it is subscribed, at most `patience` seconds; it keeps trying in the background."""
        try:
            async with asyncio.timeout(patience):
                await self._open.wait()
        except TimeoutError:
            _log.warning("no subscription yet; wakes are found by polling, up to a second late")

    def stop(self) -> asyncio.Task[None]:
        """End the subscription; the returned task is done once the connection is closed."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, NotSent, Lost, StoreUnavailable, TimeoutError) as error:
                _log.info("the subscription ended (%s); making another", said(error))
                try:
                    await self._topology.rediscover()
                except (NotSent, Lost, StoreUnavailable) as away:
                    _log.info("no server is reachable: %s", away)
            self.replaced += 1
            await asyncio.sleep(_PAUSE)

    async def _listen(self) -> None:
        connection = await self._topology.new_connection(self._shard)
        watching: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(ECHO_EVERY):
                await connection.connect()  # type: ignore[no-untyped-call]
                for channel in self._channels:
                    await connection.send_command("SUBSCRIBE" if self._shard is None else "SSUBSCRIBE", channel)
                    while self._take(await connection.read_response(disable_decoding=True)) != channel:
                        pass  # a message on the first channel while the second is subscribed to
            self._open.set()
            watching = asyncio.get_running_loop().create_task(self._watch(connection), name="bide subscriber: echo")
            while True:
                self._take(await connection.read_response(disable_decoding=True))
        finally:
            if watching is not None:
                watching.cancel()
            await connection.disconnect(nowait=True)

    def _take(self, message: list[bytes]) -> bytes | None:
        """Handle a message; return the channel if it confirms a subscription. Raises Lost if the server ended one."""
        kind, channel, said = message[:3]
        if kind in (b"subscribe", b"ssubscribe"):
            return channel
        if kind not in (b"message", b"smessage"):
            raise Lost(f"the server ended it: {kind!r}")  # sunsubscribe: the slot has moved away
        if channel == self._channels[1]:
            self._echoed.set()
            return None
        try:
            shard, wake, topic = said.split(b" ", 2)
            self._heard(int(shard), topic.decode(), int(wake))
        except (ValueError, IndexError):
            _log.warning("ignored a notification that bide did not send: %r", said[:80])
        return None

    async def _watch(self, connection: AbstractConnection) -> None:
        """Send echoes and wait for them; if one does not return, end the connection, so that the reader notices."""
        command = ("PUBLISH" if self._shard is None else "SPUBLISH", self._channels[1], b"")
        while True:
            self._echoed.clear()
            try:
                shared = await self._topology.connection(self._shard)
                [reply] = await shared.ask([command])
                if isinstance(reply, ResponseError):
                    _log.warning("the subscription cannot test itself: %s", reply)
                async with asyncio.timeout(ECHO_EVERY):
                    await self._echoed.wait()
                await asyncio.sleep(ECHO_EVERY)
            except (TimeoutError, NotSent, Lost, StoreUnavailable):
                await connection.disconnect(nowait=True)
                return


class Subscriptions(Struct, eq=False):
    """The subscribers of one store, made for its first listener; they notify `listeners`."""

    _topology: Topology
    _layout: Layout
    _name: str
    _listeners: Listeners
    _leaser: Leaser
    _sharded: bool
    _patience: float
    _subscribers: list[Subscriber] = []
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def replaced(self) -> int:
        """The number of subscriptions that were found dead and replaced."""
        return sum(one.replaced for one in self._subscribers)

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None) -> Listener:
        listener = self._listeners.listen(topics, on_wake, on_taken)
        try:
            async with self._making:
                if not self._subscribers:
                    await self._make()
        except BaseException:
            await listener.close()
            raise
        return listener

    async def _make(self) -> None:
        # any slot may move on its own at any time, so each shard's channel has a subscriber of its own
        shards: list[int | None] = [*range(self._layout.shards)] if self._sharded else [None]
        self._subscribers = [
            Subscriber(self._topology, self._layout, shard, f"{self._name}{number}", self._heard)
            for number, shard in enumerate(shards)
        ]
        await asyncio.gather(*(one.subscribed(self._patience) for one in self._subscribers))

    def _heard(self, shard: int, topic: Topic, wake: Millis) -> None:
        if wake < 0:
            self._listeners.notify_taken({topic: (NEVER, self._leaser.note_drained(shard, topic, -wake))}, "")
        else:
            self._listeners.notify(topic, self._leaser.note_wake(shard, topic, wake))

    async def close(self) -> None:
        await asyncio.gather(*[one.stop() for one in self._subscribers], return_exceptions=True)
