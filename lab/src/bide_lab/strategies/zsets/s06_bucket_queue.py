"""S6: sorted sets that a timer scans each second, and a queue for each topic."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from uuid import uuid4

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import Effect, Flaw, Harm, Item, each_period, now, together, when

_BUCKETS = 3
_PERIOD = 1.0
_PAGE = 100
_LOCK = 2.0
"""Seconds after which the lock of a timer that died in a scan ends."""
_TIME_TO_RUN = 600.0
"""Seconds of strategy time: ten minutes, so that no effect in the lab takes longer when they are scaled."""
_TOPIC = "order"


class BucketAndReady(RedisStrategy):
    """The option `hold` is the time-to-run in seconds."""

    name = "S6"
    title = "delay buckets and a ready queue"
    roles = ("timer", "worker")
    period = _PERIOD
    hold = _LOCK + 2 * _PERIOD
    time_out = _TIME_TO_RUN
    flaws = (
        Flaw(
            "every task waits for the timer's next look, and goes two hops", "steady",
            when("p50", "{hops:,.0f} hops for {fired:,} tasks, half of them {p50:,.0f} ms late by a timer that looks "
                 "each second", over=200), Harm.LATE,
        ),
    )  # fmt: skip

    async def open(self) -> None:
        await super().open()
        self._ready = self.key(f"ready:{_TOPIC}")
        self._time_to_run = self.setting.options.get("hold", self.setting.span(_TIME_TO_RUN))

    def _job(self, key: str) -> str:
        return self.key(f"job:{key}")

    def _bucket(self, key: str) -> str:
        return self.key(f"bucket:{zlib.crc32(key.encode()) % _BUCKETS}")

    async def schedule(self, items: Sequence[Item]) -> None:
        pipeline = self.redis.pipeline(transaction=True)
        for item in items:
            pipeline.hset(self._job(item.key), mapping={"topic": _TOPIC, "state": "delay", "due": item.due})
            pipeline.zadd(self._bucket(item.key), {item.key: item.due})
        await pipeline.execute()

    async def reschedule(self, item: Item) -> bool:
        if await self.redis.hget(self._job(item.key), "state") != b"delay":
            return False
        await self.schedule([item])
        return True

    async def cancel(self, key: str) -> bool:
        state = await self.redis.hget(self._job(key), "state")
        return state in (b"delay", b"ready") and await self._delete(key)

    async def _delete(self, key: str) -> bool:
        was_there, _ = await self.redis.pipeline().delete(self._job(key)).zrem(self._bucket(key), key).execute()
        return bool(was_there)

    async def run(self, role: str, effect: Effect) -> None:
        if role == "worker":
            await self._work(effect)
        buckets = [self.key(f"bucket:{number}") for number in range(_BUCKETS)]
        await each_period(_PERIOD, lambda: together(*(self._tick(bucket) for bucket in buckets)))

    async def _tick(self, bucket: str) -> None:
        """Look at it, unless another process's timer does."""
        lock, mine = f"{bucket}:lock", uuid4().hex
        if await self.redis.set(lock, mine, nx=True, px=round(_LOCK * 1000)):
            await self._scan(bucket)
            if await self.redis.get(lock) == mine.encode():
                await self.redis.delete(lock)

    async def _scan(self, bucket: str) -> None:
        while found := await self.redis.zrangebyscore(bucket, 0, now(), start=0, num=_PAGE):
            ask = self.redis.pipeline(transaction=False)
            for key in found:
                ask.hget(self._job(key.decode()), "topic")
            topics = await ask.execute()
            move = self.redis.pipeline(transaction=True)
            for key, topic in zip(found, topics, strict=True):
                if topic is not None:  # else it was deleted
                    move.hset(self._job(key.decode()), "state", "ready")
                    move.rpush(self.key(f"ready:{topic.decode()}"), key)
                    self.counted["hops"] += 1
                move.zrem(bucket, key)
            await move.execute()

    async def _work(self, effect: Effect) -> None:
        async for key in self.popped(self._ready):
            due = await self.redis.hget(self._job(key), "due")
            if due is None:  # deleted while it was ready
                await self.redis.delete(self._job(key))
                continue
            ready_again = now() + round(self._time_to_run * 1000)
            reserve = self.redis.pipeline().hset(self._job(key), "state", "reserved")
            await reserve.zadd(self._bucket(key), {key: ready_again}).execute()
            self.counted["hops"] += 1
            await effect(key, int(due))
            await self._delete(key)
