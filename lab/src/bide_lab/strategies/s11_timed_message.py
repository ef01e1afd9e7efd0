"""Timed message: a broker that keeps a message until an absolute time, and only then shows it to its consumers.

**Idea.** The message carries the time at which it is to be delivered. The broker appends it to a log of its own, enters
its place in a wheel with a slot for each second, and moves it to the real topic when the hand comes by.

**Origin.** RocketMQ 5 (2022), which so replaced the delay levels of version 4; here by its proxy and the client for
Python, whose messages cannot be given a delay level any more: S9 with the broker's own 18 levels is not to be had.

**Cost.** O(1) to send and to fire, whatever waits; what waits is on disk. One message for each time that a task was
ever given, and a look at the business row for each delivery.

**Flaw.** Precise to a second: the wheel turns once in a second, and the client takes whole seconds alone. Delivery is
at least once, and a moved or cancelled task still gets its old message, so that the row has to be asked each time:
`update ... where status = 'scheduled' and due = this time`. Since 5.3 a message can be recalled by a handle that the
sender has to keep, where the broker allows it, which it does not by default. What a consumer held that was killed is
given out again after two minutes. A day is the longest delay by default.

**Right when.** RocketMQ is there already, a second does not matter, and there are very many tasks.

**To bide.** Schedule new tasks with bide, and read the rows that are still scheduled into bide once, with their keys;
a message that arrives afterwards finds the row done.

      client --- row: scheduled, 10:07:31 ---> [ database ] <--- scheduled for this time? ----+
         |                                                                                    |
         +--- deliver at 10:07:31 ---> [ log ] [ wheel: a slot a second ] ---> [ topic ] ---> consumer
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from bide_lab.servers.brokers import RocketMqStrategy, WithRows
from bide_lab.strategy import Effect, Flaw, Item, when


class TimedMessage(WithRows, RocketMqStrategy):
    """The rows are in SQLite; the times are rounded up to seconds, so that nothing is early."""

    name = "S11"
    title = "Timed message of a broker"
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
            when("p50", "half of the tasks more than {p50:,.0f} ms late", over=100),
        ),
        Flaw(
            "the broker delivers what was moved or cancelled all the same", "churn",
            when("superseded_dropped",
                 "{superseded_dropped:.0f} messages arrived for tasks that had been moved or cancelled"),
        ),
    )  # fmt: skip

    async def send_for(self, item: Item, *, at_once: bool = False) -> None:
        # a time that is over already is delivered at once
        await self.send(item, at=int(time.time()) if at_once else -(-item.due // 1000))

    async def run(self, role: str, effect: Effect) -> None:
        def arrived(item: Item) -> None:
            if self.wants(item):
                effect.blocking(item.key, item.due)
                self.done(item)

        await self.consume(arrived)
