"""S10: a queue that nobody reads, whose messages move to the work queue when they expire."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from bide_lab.strategies.brokers.broker import Message, RabbitMqStrategy
from bide_lab.strategy import VERBS, Effect, Flaw, Item, Setting, now, when

_WORK = "work"
_WAITING = "waiting"
_KEPT = 60_000
"""Milliseconds for which a queue of a delay outlives its last message."""
_AGAIN = 30.0
"""Seconds after which it is declared again, which keeps it."""


class OneQueue(RabbitMqStrategy):
    """One queue, a time to live for each message."""

    name = "S10"
    title = "Time to live and dead letter, one queue"
    cannot: ClassVar[Mapping[str, str]] = dict.fromkeys(
        VERBS[1:], "a message in a queue cannot be reached before it expires"
    )
    skips: ClassVar[Mapping[str, str]] = {"horizon": "a time to live is at most 49 days"}
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw(
            "a long delay at the head holds up the short ones behind it", "head",
            when("short_late", "{short_late:.0f} of {short:.0f} short delays came out only after the long one before "
                 "them, half of them more than {short_late_p50_ms:,.0f} ms late"),
        ),
    )  # fmt: skip

    def queues(self) -> Sequence[str]:
        return [self.queue(_WORK), self.queue(_WAITING)]

    async def prepare(self) -> None:
        await self.declare(_WORK)
        await self.declare(_WAITING, to=_WORK)

    async def schedule(self, items: Sequence[Item]) -> None:
        await asyncio.gather(*(self.send_for(item) for item in items))

    async def send_for(self, item: Item) -> None:
        await self.send(_WAITING, item, waits=max(0, item.due - now()), alone=True)

    async def run(self, role: str, effect: Effect) -> None:
        async def arrived(message: Message) -> None:
            await effect(*message.item)

        await self.consume(_WORK, arrived)


class QueuePerDelay(OneQueue):
    """A queue for each delay, in whole seconds of strategy time, rounded up."""

    name = "S10-levels"
    title = "Time to live and dead letter, a queue per delay"
    precision = 1.0
    shows = ("steady", "head")
    flaws = ()

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._declared: dict[str, tuple[float, asyncio.Task[None]]] = {}

    def queues(self) -> Sequence[str]:
        list_of_names = self.setting.folder / "queues"
        made = set(list_of_names.read_text(encoding="ascii").split()) if list_of_names.exists() else set()
        return [self.queue(_WORK), *sorted(made)]

    async def prepare(self) -> None:
        await self.declare(_WORK)

    async def send_for(self, item: Item) -> None:
        step = self.setting.span(1) * 1000
        waits = math.ceil(math.ceil(max(0, item.due - now()) / step) * step)
        name = f"after-{waits}"
        since, declared = self._declared.get(name, (-math.inf, None))
        if declared is None or time.monotonic() - since > _AGAIN:
            declared = asyncio.create_task(self._declare_for(name, waits))
            self._declared[name] = time.monotonic(), declared
        await declared
        await self.send(name, item, waits=waits)

    async def _declare_for(self, name: str, waits: int) -> None:
        with (self.setting.folder / "queues").open("a", encoding="ascii") as made:  # for `clear`: the broker lists none
            made.write(f"{self.queue(name)}\n")
        await self.declare(name, to=_WORK, ttl=waits, **{"x-expires": waits + _KEPT})
