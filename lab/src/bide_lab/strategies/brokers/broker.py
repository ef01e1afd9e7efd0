"""The common parts of strategies on a broker: RabbitMQ, and the business rows that go with the messages of any."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from bide_lab.processes import sqlite_file
from bide_lab.strategy import Item, Setting, Strategy, now

_WINDOW = 50
"""Messages that a consumer holds at once, each in a coroutine of its own."""
_RECONNECT = 0.5
"""Seconds before a connection that was lost is made again."""
_GOODBYE = 5.0
"""Seconds to tell the broker that a consumer goes: the client waits for a connection, and for ever for one closed."""


class Message(NamedTuple):
    """A task as RabbitMQ holds it, with what the figures need to know of its way."""

    item: Item
    meant: int
    """When the broker was to hand it out: milliseconds since the epoch."""
    hop: int
    """How often this has been sent on, from 1."""


class RabbitMqStrategy(Strategy):
    """One connection with one channel, whose publications the broker confirms when they are on its disk.

    Queues are durable and messages persistent, as for work that must survive a restart. All names begin with the
    cell's prefix.
    """

    needs = ("rabbitmq",)
    connection: Any
    channel: Any

    async def open(self) -> None:
        import aio_pika

        self.connection = await aio_pika.connect_robust(self.setting.urls["rabbitmq"], reconnect_interval=_RECONNECT)
        self.closing.push_async_callback(self.connection.close)
        self.channel = await self.connection.channel()
        await self.channel.set_qos(prefetch_count=_WINDOW)

    def queue(self, name: str) -> str:
        return f"{self.setting.prefix}.{name}"

    def queues(self) -> Sequence[str]:
        """The full names of all that it has made."""
        raise NotImplementedError

    async def declare(self, name: str, *, to: str = "", ttl: int | None = None, **more: int) -> Any:
        """A queue; with `to`, one whose messages go to that queue when their time to live (milliseconds) is over."""
        arguments: dict[str, Any] = dict(more)
        if to:
            arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.queue(to)}
        if ttl is not None:
            arguments["x-message-ttl"] = ttl
        return await self.channel.declare_queue(self.queue(name), durable=True, arguments=arguments)

    async def send(self, queue: str, item: Item, *, waits: int = 0, hop: int = 1, alone: bool = False) -> None:
        """It answers when the broker has confirmed.

        `waits`: milliseconds until it comes out of that queue; `alone`: as the time to live of this message itself.
        """
        import aio_pika

        message = aio_pika.Message(
            msgspec.json.encode(Message(item, now() + waits, hop)), delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            # the client takes seconds, and cuts what it makes of them to whole milliseconds
            expiration=(waits + 0.5) / 1000 if alone else None,
        )  # fmt: skip
        await self.channel.default_exchange.publish(message, self.queue(queue))
        self.counted["messages_sent"] += 1

    async def consume(self, queue: str, done: Callable[[Message], Awaitable[None]]) -> None:
        """Call `done` for each message, and acknowledge it afterwards, until cancelled."""

        async def arrived(message: Any) -> None:
            async with message.process(requeue=True):
                await done(msgspec.json.decode(message.body, type=Message))

        source = await self.declare(queue)  # what is declared here is taken up again after a connection was lost
        tag = await source.consume(arrived)
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(TimeoutError):  # where there is no connection any more there is no consumer either
                async with asyncio.timeout(_GOODBYE):
                    await source.cancel(tag)

    async def clear(self) -> None:
        for name in self.queues():
            await self.channel.queue_delete(name)

    async def left(self) -> Mapping[str, float]:
        """Messages that wait on the broker, and queues for them."""
        found = [count for name in self.queues() if (count := await self._messages(name)) is not None]
        return {"messages_left": sum(found), "queues": len(found)}

    async def _messages(self, name: str) -> int | None:
        """How many wait in a queue; None if it is gone."""
        from aio_pika.exceptions import ChannelNotFoundEntity

        channel = await self.connection.channel()  # one that asks for what is not there is closed by the broker
        try:
            queue = await channel.declare_queue(name, passive=True)
            return int(queue.declaration_result.message_count)
        except ChannelNotFoundEntity:
            return None
        finally:
            await channel.close()


class WithRows(Strategy):
    """The half of a strategy that keeps the truth in a business row, and sends a message for each time of a task.

    A broker can neither move nor cancel a message, so that the row is changed and the old message is recognised when
    it arrives: it knows a key and a time, and only the row knows if both still hold. Here it is in a SQLite file of the
    cell, on one connection, which threads may share; each call takes some tens of microseconds.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._lock = threading.Lock()
        self._rows = sqlite_file(self, "rows.db")
        self._rows.execute(
            "CREATE TABLE IF NOT EXISTS task "
            "(key TEXT PRIMARY KEY, due INTEGER NOT NULL, status TEXT NOT NULL DEFAULT 'scheduled') WITHOUT ROWID"
        )

    async def send_for(self, item: Item, *, at_once: bool = False) -> None:
        """Send the message for this time of the task; `at_once`, where its time has come."""
        raise NotImplementedError

    async def schedule(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._rows.execute("BEGIN IMMEDIATE")
            self._rows.executemany("INSERT INTO task (key, due) VALUES (?, ?)", items)
            self._rows.execute("COMMIT")
        await asyncio.gather(*(self.send_for(item) for item in items))

    async def fire_now(self, key: str) -> bool:
        return await self.reschedule(Item(key, now()), at_once=True)

    async def reschedule(self, item: Item, *, at_once: bool = False) -> bool:
        moved = self._change("SET due = ? WHERE key = ?", item.due, item.key)
        if moved:
            await self.send_for(item, at_once=at_once)
        return moved

    async def cancel(self, key: str) -> bool:
        return self._change("SET status = 'cancelled' WHERE key = ?", key)

    def wants(self, item: Item) -> bool:
        """True if its row is still scheduled for this time; a message that it does not want is counted."""
        with self._lock:
            sql = "SELECT 1 FROM task WHERE key = ? AND due = ? AND status = 'scheduled'"
            wanted = bool(self._rows.execute(sql, item).fetchall())
        if not wanted:
            self.counted["superseded_dropped"] += 1
        return wanted

    def done(self, item: Item) -> bool:
        """The effect of this time has been: what a second message for it then finds."""
        return self._change("SET status = 'done' WHERE key = ? AND due = ?", *item)

    def _change(self, what: str, *values: Any) -> bool:
        with self._lock:
            return self._rows.execute(f"UPDATE task {what} AND status = 'scheduled'", values).rowcount == 1
