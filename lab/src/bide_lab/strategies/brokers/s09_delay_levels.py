"""S9: a broker with 18 fixed delays, and a long delay that is relayed over several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bide_lab.strategies.brokers.broker import Message, RabbitMqStrategy, WithRows
from bide_lab.strategy import Effect, Flaw, Item, now, when

_MINUTE, _HOUR = 60, 3600
LEVELS = (
    1, 5, 10, 30, *(minutes * _MINUTE for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)), _HOUR, 2 * _HOUR,
)  # fmt: skip
"""Seconds of strategy time."""
_ARRIVED = "arrived"


def level_for(seconds: int) -> int:
    """The largest level not above the rest; the smallest for what is shorter still.

    >>> [level_for(rest) for rest in (18_000, 10_800, 3_600, 59, 0)]
    [7200, 7200, 3600, 30, 1]
    """
    return max((level for level in LEVELS if level <= seconds), default=LEVELS[0])


class DelayLevels(WithRows, RabbitMqStrategy):
    """The rows are in SQLite; the levels are RabbitMQ queues."""

    name = "S9"
    title = "Delay levels, relayed"
    precision = 1.0
    shows = ("steady", "churn")
    flaws = (
        Flaw(
            "a delay that is no level is relayed over several hops, each with a lateness of its own", "relay",
            when("hops_most", "up to {hops_most:.0f} hops for a delay, {late_ms_per_hop:.1f} ms late at each", over=1),
        ),
        Flaw(
            "a moved task leaves its old message behind", "relay",
            when("messages_alive_per_task", "{messages_alive_per_task:.0f} messages alive for each task that was moved "
                 "{moves_per_task:.0f} times", over=1),
        ),
    )  # fmt: skip

    def queues(self) -> Sequence[str]:
        return [self.queue(name) for name in (_ARRIVED, *map(str, LEVELS))]

    def lasts(self, level: int) -> int:
        """Milliseconds."""
        return math.ceil(self.setting.span(level) * 1000)

    async def prepare(self) -> None:
        await self.declare(_ARRIVED)
        for level in LEVELS:
            await self.declare(str(level), to=_ARRIVED, ttl=self.lasts(level))

    async def send_for(self, item: Item, *, at_once: bool = False, hop: int = 1) -> None:
        rest = max(0, item.due - now()) / 1000
        level = level_for(math.ceil(rest / self.setting.span(1)))
        if at_once:
            await self.send(_ARRIVED, item)
        else:
            await self.send(str(level), item, waits=self.lasts(level), hop=hop)

    async def run(self, role: str, effect: Effect) -> None:
        async def arrived(message: Message) -> None:
            item = message.item
            self.counted.update(hops=1, hops_late_ms=max(0, now() - message.meant))
            if not self.wants(item):
                return
            if item.due > now():
                await self.send_for(item, hop=message.hop + 1)
            else:
                self.counted[f"fired_after_{message.hop}"] += 1
                await effect(item.key, item.due)
                self.done(item)

        await self.consume(_ARRIVED, arrived)
