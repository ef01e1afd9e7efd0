"""Notifications of earlier wakes: a sparing use of LISTEN and NOTIFY.

A NOTIFY takes a server-wide lock at commit, which serializes all commits that notify; a table with many notifications
can stall other databases. So bide sends one message per batch, and only for wakes within the `cap` (no worker sleeps
longer anyway). It sends none just after a message of an earlier wake that is still well ahead.

A subscription can fail silently: its connection is half open, or a proxy has given it to another client. So it tests
itself: every few seconds it sends an echo on another connection. A connection that does not receive the echo is
replaced, and counted. Without a working subscription, workers poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
import msgspec

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import OnWake
from bide.stores.listeners import Listener
from bide.stores.postgres.connection import Call, connect, said
from bide.stores.sql.dialect import NotSent
from bide.stores.sql.leasing import POLL

_log = logging.getLogger("bide.postgres")
ECHO_EVERY = 4.0
"""Seconds between echoes. If one does not arrive within twice that time, the connection counts as deaf."""
_PAUSE = 0.2
_LONGEST = 7_000
"""The maximum size of a message, in bytes; PostgreSQL's own limit is 8000."""
_AHEAD: Millis = 250
"""A notified wake counts as known only while it is at least this far ahead: a commit may take that long."""
_FRESH: Millis = 50
"""A notified wake counts as known for this long: if its task was cancelled, a worker's next poll no longer sees it."""
_REMEMBERED = 10_000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, int]).decode


class WakeMessages:
    """Decides which wakes are worth a message."""

    def __init__(self, cap: Millis) -> None:
        self._cap = cap
        self._known: dict[Topic, tuple[Millis, Millis]] = {}
        """The last notified wake of each topic, and the time of that message."""

    def forget(self, topics: Iterable[Topic]) -> None:
        """Forget the wakes of these topics, since their messages were not sent."""
        for topic in topics:
            self._known.pop(topic, None)

    def messages(self, wakes: Mapping[Topic, Millis], now: Millis, *, joined: bool = False) -> list[str]:
        """The messages for the earliest wakes of a batch.

        `joined`: the transaction is not ours, and may be long or roll back. Earlier messages are then disregarded.
        """
        worth = {topic: wake for topic, wake in wakes.items() if wake <= now + self._cap}
        if joined:
            return _written(worth)
        for topic, wake in list(worth.items()):
            known, sent = self._known.get(topic, (0, 0))
            if now + _AHEAD < known <= wake and sent <= now < sent + _FRESH:
                del worth[topic]
                continue
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[topic] = wake, now
        return _written(worth)


def _written(wakes: Mapping[Topic, Millis]) -> list[str]:
    if not wakes:
        return []
    text = _encode(wakes).decode()
    if len(text.encode()) <= _LONGEST:
        return [text]
    return [_encode({topic: wake}).decode() for topic, wake in wakes.items()]


class Subscription:
    """The connection that receives other processes' notifications; opened for the first listener."""

    def __init__(self, runtime: Any, channel: str, *, patience: float) -> None:
        self.replaced = 0
        """How often the connection was replaced, because it was deaf or broken."""
        self._runtime = runtime
        self._address = runtime.address
        self._channel = channel
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()
        self._echoed = asyncio.Event()

    async def listen(self, topics: Collection[Topic], on_wake: OnWake) -> Listener:
        listener: Listener = self._runtime.listeners.listen(topics, on_wake)
        try:
            if not self._address.pooled:
                if self._task is None:
                    self._task = asyncio.get_running_loop().create_task(self._run(), name="bide subscription")
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._patience):
                        await self._subscribed.wait()
        except BaseException:
            await listener.close()
            raise
        return listener

    async def works(self) -> bool:
        """Tell whether an echo comes back; opens the connection if there is none yet."""
        if self._address.pooled:
            return False
        listener = await self.listen((), lambda topic, wake: None)
        try:
            async with asyncio.timeout(self._patience):
                await self._echoed.wait()
        except TimeoutError:
            return False
        finally:
            await listener.close()
        return True

    async def _run(self) -> None:
        first = True
        while True:
            if not first:
                self.replaced += 1
                await asyncio.sleep(_PAUSE)
            first = False
            try:
                await self._hear()
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, NotSent, StoreError, TimeoutError) as error:
                _log.info("the subscription ended (%s); another is made", said(error))
            finally:
                self._runtime.look_every = POLL

    async def _hear(self) -> None:
        connection = await connect(self._address, within=self._patience)
        ended = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(self._channel, self._take)
            self._runtime.look_every = None  # until an echo fails to come back
            self._subscribed.set()
            while not ended.is_set():
                await self._echo()
                with suppress(TimeoutError):
                    async with asyncio.timeout(ECHO_EVERY):
                        await ended.wait()
        finally:
            self._subscribed.clear()
            connection.terminate()

    async def _echo(self) -> None:
        """Send an echo on another connection, and wait for it. Raises TimeoutError, StoreError."""
        self._echoed.clear()

        async def work(call: Call) -> None:
            await call.fetch("notify", self._runtime.name)

        async with asyncio.timeout(2 * ECHO_EVERY):  # the other connection may be busy
            await self._runtime.connections["lease"].read(work)
            await self._echoed.wait()

    def _take(self, connection: Any, pid: int, channel: str, text: str) -> None:
        if not text.startswith("{"):
            if text == self._runtime.name:
                self._echoed.set()
            return
        try:
            wakes = _decode(text)
        except msgspec.MsgspecError:
            _log.warning("this is no wake, and was not sent by bide: %r", text[:80])
            return
        self._runtime.notify(wakes)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
