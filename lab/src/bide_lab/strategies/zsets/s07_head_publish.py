"""S7: whoever puts the earliest task tells the listeners its time, and they set their timers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bide_lab.servers import RedisStrategy
from bide_lab.strategy import NEVER_DONE, Effect, Flaw, Item, Setting, due_or_told, now, together, when

_PAGE = 100
_THREADS = 4
"""Of the consumer's executor, whose queue has no bound."""
_OFFER = """
redis.call('zadd', KEYS[1], ARGV[1], ARGV[2])
redis.call('rpush', KEYS[2], ARGV[2])
if redis.call('zrange', KEYS[1], 0, 0)[1] == ARGV[2] then redis.call('publish', KEYS[3], ARGV[1]) end
"""
_MOVE = """
local due = redis.call('zrangebyscore', KEYS[1], 0, ARGV[1], 'limit', 0, ARGV[2])
for _, member in ipairs(due) do
    redis.call('rpush', KEYS[3], member)
    redis.call('lrem', KEYS[2], 1, member)
end
if #due > 0 then redis.call('zrem', KEYS[1], unpack(due)) end
return {#due, redis.call('zrange', KEYS[1], 0, 0, 'withscores')[2] or ''}
"""
_REMOVE = """
for i = 0, redis.call('llen', KEYS[2]) - 1 do
    local member = redis.call('lindex', KEYS[2], i)
    if string.match(member, '^%d+ (.*)$') == ARGV[1] then
        redis.call('zrem', KEYS[1], member)
        redis.call('lrem', KEYS[2], 1, member)
        return 1
    end
end
return 0
"""


class HeadPublish(RedisStrategy):
    """A member is the due time and the key: where the library puts a random number, so that equal values differ."""

    name = "S7"
    title = "head published to listeners, blocking queue"
    flaws = (
        Flaw("what a consumer has popped dies with it", "killed", NEVER_DONE),
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
        self._offer: Any = self.redis.register_script(_OFFER)
        self._move: Any = self.redis.register_script(_MOVE)
        self._remove: Any = self.redis.register_script(_REMOVE)

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
