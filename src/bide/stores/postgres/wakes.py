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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
import msgspec

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import OnTaken, OnWake
from bide.stores.batches import Drained
from bide.stores.listeners import Listener
from bide.stores.postgres.connection import POSTGRES, connect, said
from bide.stores.resending import NotSent
from bide.stores.sql.leasing import POLL

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
_TAKEN_EVERY = 0.02
"""The least time in seconds between two notifications of leases: each one reaches all workers."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, int] | tuple[str, dict[str, tuple[int, int]]]).decode


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


def _written(about: Mapping[Topic, Any], holder: str | None = None) -> list[str]:
    """The messages about wakes, or about what `holder` took."""
    if not about:
        return []
    text = _encode(about if holder is None else (holder, about))
    if len(text) <= _LONGEST or len(about) == 1:
        return [text.decode()]
    return [message for topic, said in about.items() for message in _written({topic: said}, holder)]


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
        self._taken: dict[str, dict[Topic, Drained]] = {}
        """By holder, the tasks taken of which no message was sent yet."""
        self._sending: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()
        self._echoed = asyncio.Event()

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listener:
        listener: Listener = self._runtime.listeners.listen(topics, on_wake, on_taken)
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

    def send_taken(self, taken: Mapping[Topic, Drained], holder: str) -> None:
        """Notify other workers of what `holder` took, at most one message in `_TAKEN_EVERY` seconds."""
        if taken and not self._address.pooled:
            self._taken.setdefault(holder, {}).update(taken)
            if self._sending is None or self._sending.done():
                self._sending = asyncio.get_running_loop().create_task(self._send_taken(), name="bide what was taken")

    async def _send_taken(self) -> None:
        while self._taken:
            messages = [text for holder, taken in self._taken.items() for text in _written(taken, holder)]
            self._taken = {}
            try:
                for text in messages:
                    await self._notify("read", text)
            except StoreError as error:
                POSTGRES.log.info("the other workers could not be notified of a lease: %s", error)
            await asyncio.sleep(_TAKEN_EVERY)

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
        while True:
            try:
                await self._hear()
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, NotSent, StoreError, TimeoutError) as error:
                POSTGRES.log.info("the subscription ended (%s); making another", said(error))
            finally:
                self._runtime.look_every = POLL
            self.replaced += 1
            await asyncio.sleep(_PAUSE)

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
        async with asyncio.timeout(2 * ECHO_EVERY):  # the other connection may be busy
            await self._notify("lease", self._runtime.name)
            await self._echoed.wait()

    async def _notify(self, connection: str, text: str) -> None:
        await self._runtime.connections[connection].read(lambda call: call.fetch("notify", text))

    def _take(self, connection: Any, pid: int, channel: str, text: str) -> None:
        if not text.startswith(("{", "[")):
            if text == self._runtime.name:
                self._echoed.set()
            return
        try:
            said = _decode(text)
        except msgspec.MsgspecError:
            POSTGRES.log.warning("ignored a notification that bide did not send: %r", text[:80])
            return
        if isinstance(said, dict):
            self._runtime.notify(said)
        else:
            holder, taken = said
            self._runtime.listeners.notify_taken(taken, holder)

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._sending) if task is not None]
        self._task = self._sending = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
