"""S7: a client that puts the earliest task tells the listeners its time, and they set their timers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import NEVER_DONE, Effect, Flaw, Harm, Item, Setting, due_or_told, now, together, when

_PAGE = 100
_THREADS = 4
"""Of the consumer's executor, whose queue has no bound."""


class HeadPublish(RedisStrategy):
    """A member is the due time and the key: where the library puts a random number, so that equal values differ."""

    name = "S7"
    title = "head published to listeners, blocking queue"
    flaws = (
        Flaw("what a consumer has popped dies with it", "killed", NEVER_DONE, Harm.LOST),
        Flaw(
            "all listeners fire at once, one of them for something", "two",
            when("looks_in_vain", "{looks_in_vain:,.0f} of {looks:,.0f} looks of two listeners found nothing", over=20),
        ),
        Flaw(
            "a subscription that is dropped unnoticed stops delivery", "deaf",
            when("waited_for_a_restart",
                 "{waited_for_a_restart:,.0f} of {expected} tasks stayed until the listener was started again"),
        ),
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._head: int | None = None
        """The earliest time that this listener knows of."""
        self._told = asyncio.Event()

    async def open(self) -> None:
        await super().open()
        self._keys = [self.key("timeout"), self.key("list")]
        self._channel, self._queue = self.key("channel"), self.key("queue")
        self._offer = self._script("offer")
        self._move = self._script("move")
        self._remove = self._script("remove")

    def _script(self, name: str) -> Any:
        return self.redis.register_script(Path(__file__).with_name(f"s07_{name}.lua").read_text(encoding="utf-8"))

    async def schedule(self, items: Sequence[Item]) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for item in items:
            await self._offer(
                keys=[*self._keys, self._channel], args=[item.due, f"{item.due} {item.key}"], client=pipeline
            )
        await pipeline.execute()

    async def reschedule(self, item: Item) -> bool:
        found = await self.cancel(item.key)
        if found:
            await self.schedule([item])
        return found

    async def cancel(self, key: str) -> bool:
        return bool(await self._remove(keys=self._keys, args=[key]))

    async def fire_now(self, key: str) -> bool:
        found = await self.cancel(key)
        if found:
            await self.redis.rpush(self._queue, f"{now()} {key}")
        return found

    async def run(self, role: str, effect: Effect) -> None:
        popped: asyncio.Queue[str] = asyncio.Queue()
        self._head = None
        consumers = (self._do(popped, effect) for _ in range(_THREADS))
        await together(self._listen(), self._transfer(), self._take(popped), *consumers)

    async def _listen(self) -> None:
        """Told of a new head; and to look, when the subscription begins or was made again."""
        async with self.redis.pubsub() as channel:
            await channel.subscribe(self._channel)
            async for message in channel.listen():
                self._know(int(message["data"]) if message["type"] == "message" else now())
                self._told.set()

    def _know(self, head: int) -> None:
        self._head = head if self._head is None else min(self._head, head)

    async def _transfer(self) -> None:
        """The timer: at the time of the head move what is due, and learn the next."""
        while True:
            while self._head is None or self._head > now():
                await due_or_told(self._head, self._told)
            self._head = None
            moved, head = await self._move(keys=[*self._keys, self._queue], args=[now(), _PAGE])
            self.counted.update(looks=1, looks_in_vain=not moved)
            if head:
                self._know(int(head))

    async def _take(self, popped: asyncio.Queue[str]) -> None:
        """Pop, and hand over to the executor at once."""
        async for member in self.popped(self._queue):
            popped.put_nowait(member)

    async def _do(self, popped: asyncio.Queue[str], effect: Effect) -> None:
        while True:
            due, _, key = (await popped.get()).partition(" ")
            await effect(key, int(due))
