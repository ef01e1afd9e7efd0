"""S18: a worker fetches a task at once, and holds it unacknowledged until its time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from itertools import count
from uuid import uuid4

import msgspec

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import Effect, Flaw, Harm, Item, Setting, due_or_told, now, poll, together, when

_VISIBLE = 3600.0
"""Seconds of strategy time."""
_SCANS = 36
"""In a visibility time-out of an hour, one every 100 s."""
_POOL = 4


class Message(msgspec.Struct, frozen=True):
    """A task in the queue."""

    tag: str
    key: str
    eta: int
    """Milliseconds since the epoch."""


class InMemoryEta(RedisStrategy):
    """Acknowledged when it is handed to the pool, as by default. The option `hold` is the time-out in seconds."""

    name = "S18"
    title = "held in a worker's memory until its time"
    loses = "what its holder had taken and not done when it died"
    time_out = _VISIBLE * (1 + 1 / _SCANS)
    cannot = dict.fromkeys(
        ("reschedule", "fire_now"),
        "a task is in the memory of some worker, where nobody can reach it: revoke it, and send another",
    )
    flaws = (
        Flaw(
            "a task due later than the time-out is done several times", "beyond",
            when("duplicated", "{fired} tasks, due in {ahead_s:g} s, were done {done} times with a time-out of "
                 "{time_out_s:g} s"), Harm.TWICE,
        ),
        Flaw(
            "what a killed worker held comes only after the time-out", "failover",
            when("most", "half of the tasks {p50:,.0f} ms late, but {most:,.0f} ms where the killed worker held them",
                 over=500), Harm.LATE,
        ),
        Flaw(
            "every task that waits is in a worker's memory", "idle",
            when("held", "{held:,.0f} of {scheduled:,} tasks that wait were in the worker's memory"),
        ),
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._visible = setting.options.get("hold", setting.span(_VISIBLE))
        self._heap: list[tuple[int, int, Message]] = []
        self._order = count()
        self._earlier = asyncio.Event()
        self._revoked: set[str] = set()
        self._queue, self._unacked, self._index = self.key("queue"), self.key("unacked"), self.key("unacked_index")
        self._mutex, self._control = self.key("unacked_mutex"), self.key("control")

    async def schedule(self, items: Sequence[Item]) -> None:
        messages = [Message(uuid4().hex, item.key, item.due) for item in items]
        await self.redis.lpush(self._queue, *(msgspec.json.encode(message) for message in messages))

    async def cancel(self, key: str) -> bool:
        """Every worker is told to forget it when it is due. Nobody knows whether it has been done."""
        await self.redis.publish(self._control, key)
        return True

    async def run(self, role: str, effect: Effect) -> None:
        try:
            restore = poll(self._visible / _SCANS, self._restore)
            await together(self._hear(), self._fetch(), restore, self._fire(effect))
        finally:  # a worker that ends in order gives back what it holds
            for _, _, message in self._heap:
                await self._give_back(message.tag)
            self._heap.clear()

    async def _hear(self) -> None:
        async with self.redis.pubsub() as control:
            await control.subscribe(self._control)
            async for message in control.listen():
                if message["type"] == "message":
                    self._revoked.add(message["data"].decode())

    async def _fetch(self) -> None:
        while True:
            _, body = await self.redis.brpop([self._queue], 0)
            message = msgspec.json.decode(body, type=Message)
            note = self.redis.pipeline().zadd(self._index, {message.tag: now()})
            await note.hset(self._unacked, message.tag, body).execute()
            self.counted["fetched"] += 1
            heapq.heappush(self._heap, (message.eta, next(self._order), message))
            self._earlier.set()

    async def _fire(self, effect: Effect) -> None:
        pool = asyncio.Semaphore(_POOL)
        async with asyncio.TaskGroup() as processes:
            while True:
                while not self._heap or self._heap[0][0] > now():
                    await due_or_told(self._heap[0][0] if self._heap else None, self._earlier)
                await pool.acquire()
                _, _, message = heapq.heappop(self._heap)
                processes.create_task(self._do(message, effect, pool))

    async def _do(self, message: Message, effect: Effect, pool: asyncio.Semaphore) -> None:
        try:
            ack = self.redis.pipeline().zrem(self._index, message.tag)
            await ack.hdel(self._unacked, message.tag).execute()
            if message.key not in self._revoked:
                await effect(message.key, message.eta)
        finally:
            pool.release()

    async def _restore(self) -> None:
        """Put back what was fetched too long ago, by any holder."""
        if await self.redis.set(self._mutex, 1, nx=True, px=max(100, round(self._visible * 1000 / _SCANS))):
            ceiling = now() - round(self._visible * 1000)
            for tag in await self.redis.zrevrangebyscore(self._index, ceiling, 0):
                await self._give_back(tag.decode())
                self.counted["restored"] += 1
            await self.redis.delete(self._mutex)

    async def _give_back(self, tag: str) -> None:
        take = self.redis.pipeline().hget(self._unacked, tag).zrem(self._index, tag).hdel(self._unacked, tag)
        body, *_ = await take.execute()
        if body is not None:
            await self.redis.rpush(self._queue, body)

    def counts(self) -> Mapping[str, float]:
        return {**self.counted, "held": len(self._heap)}
