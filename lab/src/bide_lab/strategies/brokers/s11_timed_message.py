"""S11: a broker that keeps a message until an absolute time, and only then shows it to its consumers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

from bide.core.errors import SetupError
from bide_lab.strategies.brokers.broker import WithRows
from bide_lab.strategy import Effect, Flaw, Harm, Item, Setting, when

TOPIC = "bide_lab"
"""The topic, of type DELAY. An administrator makes it, and the groups, since clients cannot."""
GROUPS = 60
"""How many there are, `bide_lab_00` to `bide_lab_59`: a cell takes the one of the second in which it begins.

The broker goes on for half a minute with what a consumer that is gone had asked for last, and what comes out is lost to
the next consumer of the group until it is given out again.
"""


class TimedMessage(WithRows):
    """The rows are in SQLite; the times are rounded up to seconds, so that nothing is early.

    A push consumer's threads do the work. Cells are told apart by tags. What is not due when a cell ends stays with the
    broker, which then hands it to nobody.
    """

    name = "S11"
    title = "Timed message of a broker"
    needs = ("rocketmq",)
    direct = True  # the proxy tells its clients its own address
    period = 1.0
    hold = 150.0
    shows = ()
    skips: ClassVar[Mapping[str, str]] = {
        "horizon": "the longest delay is a day unless the proxy is told otherwise",
        "cut": "its clients go around what would count or cut",
    }
    flaws = (
        Flaw(
            "it is precise to a second", "steady",
            when("p50", "half of the tasks more than {p50:,.0f} ms late", over=100), Harm.LATE,
        ),
        Flaw(
            "the broker delivers what was moved or cancelled all the same", "churn",
            when("superseded_dropped",
                 "{superseded_dropped:.0f} messages arrived for tasks that had been moved or cancelled"),
        ),
    )  # fmt: skip

    client: Any
    """The client's module."""
    configuration: Any
    producer: Any

    async def prepare(self) -> None:
        (self.setting.folder / "group").write_text(f"{TOPIC}_{int(time.time()) % GROUPS:02}", encoding="ascii")

    async def open(self) -> None:
        self.client = client = _client(self.setting)
        address = urlsplit(self.setting.urls["rocketmq"]).netloc
        self.configuration = client.ClientConfiguration(address, client.Credentials())
        self.producer = client.Producer(self.configuration, (TOPIC,))
        self.closing.push_async_callback(asyncio.to_thread, self.producer.shutdown)
        await asyncio.to_thread(self.producer.startup)

    async def send_for(self, item: Item, *, at_once: bool = False) -> None:
        message = self.client.Message()
        message.topic = TOPIC
        message.tag = self.setting.prefix
        message.body = f"{item.due} {item.key}".encode()
        # in whole seconds: the client takes no others. A time that is over already is delivered at once
        message.delivery_timestamp = int(time.time()) if at_once else -(-item.due // 1000)
        await asyncio.wrap_future(self.producer.send_async(message))
        self.counted["messages_sent"] += 1

    async def run(self, role: str, effect: Effect) -> None:
        client = self.client

        def arrived(item: Item) -> None:
            if self.wants(item):
                effect.blocking(*item)
                self.done(item)

        class Listener(client.MessageListener):  # type: ignore[misc,name-defined]
            def consume(self, message: Any) -> Any:
                """Acknowledged when it has returned; if it raises it is called again."""
                due, _, key = message.body.decode().partition(" ")
                arrived(Item(key, int(due)))
                return client.ConsumeResult.SUCCESS

        group = (self.setting.folder / "group").read_text(encoding="ascii")
        consumer = client.PushConsumer(
            self.configuration, group, Listener(), {TOPIC: client.FilterExpression(self.setting.prefix)}
        )
        await asyncio.to_thread(consumer.startup)
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(client.v5.exception.ClientException):  # the proxy may be gone by now
                await asyncio.to_thread(consumer.shutdown)


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
