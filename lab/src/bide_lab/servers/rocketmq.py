"""Strategies on RocketMQ 5, through its proxy."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from bide.core.errors import SetupError
from bide_lab.strategy import Item, Setting, Strategy

TOPIC = "bide_lab"
"""The topic, of type DELAY. An administrator makes it, and the groups, since clients cannot."""
GROUPS = 60
"""How many there are, `bide_lab_00` to `bide_lab_59`: a cell takes the one of the second in which it begins.

The broker goes on for half a minute with what a consumer that is gone had asked for last, and what comes out is lost to
the next consumer of the group until it is given out again.
"""


def _client(setting: Setting) -> Any:
    """The client's module. Its log goes to the cell's folder: as it is imported, it makes one in the home directory."""
    home = os.environ.get("HOME")
    os.environ["HOME"] = str(setting.folder)
    try:
        import rocketmq
    except ModuleNotFoundError as error:
        raise SetupError("a strategy on RocketMQ needs its client: pip install 'bide-lab[rocketmq]'") from error
    finally:
        os.environ.pop("HOME")
        if home is not None:
            os.environ["HOME"] = home
    return rocketmq


class RocketMqStrategy(Strategy):
    """A producer, and for who consumes a push consumer, whose threads do the work. Cells are told apart by tags.

    What is not due when a cell ends stays with the broker, which then hands it to nobody.
    """

    needs = ("rocketmq",)
    direct = True  # the proxy tells its clients its own address

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.producer: Any = None
        self.seen: Counter[str] = Counter()

    async def open(self) -> None:
        client = _client(self.setting)
        self.producer = client.Producer(self._configuration(client), (TOPIC,))
        await asyncio.to_thread(self.producer.startup)

    async def prepare(self) -> None:
        (self.setting.folder / "group").write_text(f"{TOPIC}_{int(time.time()) % GROUPS:02}", encoding="ascii")

    def _configuration(self, client: Any) -> Any:
        address = urlsplit(self.setting.urls["rocketmq"]).netloc
        return client.ClientConfiguration(address, client.Credentials())

    async def close(self) -> None:
        if self.producer is not None:
            await asyncio.to_thread(self.producer.shutdown)

    async def send(self, item: Item, *, at: int) -> None:
        """To be handed out at a time in whole seconds since the epoch: the client takes no others."""
        message = _client(self.setting).Message()
        message.topic = TOPIC
        message.tag = self.setting.prefix
        message.body = f"{item.due} {item.key}".encode()
        message.delivery_timestamp = at
        await asyncio.wrap_future(self.producer.send_async(message))
        self.seen["messages_sent"] += 1

    async def consume(self, done: Callable[[Item], None]) -> None:
        """Call `done` from threads, and acknowledge afterwards, until cancelled. A call that raises is made again."""
        client = _client(self.setting)

        class Listener(client.MessageListener):  # type: ignore[misc,name-defined]
            def consume(self, message: Any) -> Any:
                due, _, key = message.body.decode().partition(" ")
                done(Item(key, int(due)))
                return client.ConsumeResult.SUCCESS

        group = (self.setting.folder / "group").read_text(encoding="ascii")
        consumer = client.PushConsumer(
            self._configuration(client), group, Listener(), {TOPIC: client.FilterExpression(self.setting.prefix)}
        )
        await asyncio.to_thread(consumer.startup)
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(client.v5.exception.ClientException):  # the proxy may be gone by now
                await asyncio.to_thread(consumer.shutdown)

    def counts(self) -> Mapping[str, float]:
        return dict(self.seen)
