"""S5: several sorted sets, a poller with a lock for each, and workers elsewhere."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from bide_lab.figures import Figures
from bide_lab.processes import RedisStrategy
from bide_lab.strategy import Effect, Flaw, Harm, Item, now, poll, together, when

_SHARDS = 4
_PERIOD = 0.1
_PAGE = 500
_LOCK = 1.5
"""Seconds that a poller's lock lasts without being renewed. Not a minute-thing, so it is not scaled."""
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"


def _shards(seen: Figures, *, uneven: float = 1.0, opening: str = "") -> str:
    """How full and how busy they are; empty unless the fullest holds `uneven` times as much as they do on average."""
    sizes, commands = (
        [count for what, count in seen.counts.items() if what.startswith(name)] for name in ("waiting_", "commands_")
    )
    if not sizes or max(sizes) < uneven * sum(sizes) / len(sizes):
        return ""
    return (
        f"{opening}the fullest of {len(sizes)} shards holds {max(sizes):,.0f} tasks, the emptiest {min(sizes):,.0f};"
        f" the busiest took {max(commands) / sum(commands) * 100:.0f} % of {sum(commands):,.0f} commands"
    )


class HashedShards(RedisStrategy):
    """The hash of a uuid picks the shard."""

    name = "S5-A"
    title = "ZSET shards, picked by the hash of a uuid"
    loses = "what its holder had taken and not done when it died"
    roles = ("poller", "worker")
    hold = _LOCK + 0.5
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw(
            "the shards of a poller that dies stand still until its lock ends", "failover",
            when("most", "half of the tasks {p50:,.0f} ms late, but {most:,.0f} ms while a dead poller's locks lasted",
                 over=500), Harm.LATE,
        ),
        Flaw("shards that get equal shares of calls grow uneven", "uneven", partial(_shards, uneven=1.2)),
    )  # fmt: skip

    async def open(self) -> None:
        await super().open()
        self._me, self._queue = uuid4().hex, self.key("queue")
        self._renew: Any = self.redis.register_script(_RENEW)

    def _shard(self, shard: int) -> str:
        """The name of its sorted set; counted, since each asks for it to send one command there."""
        self.counted[f"commands_{shard}"] += 1
        return self.key(f"due:{shard}")

    async def pick(self) -> int:
        """The shard that the tasks of a call go to."""
        return zlib.crc32(uuid4().bytes) % _SHARDS

    async def schedule(self, items: Sequence[Item]) -> None:
        shard = await self.pick()
        # the keys are on different nodes of a Cluster, so this is no transaction: bodies first, then what finds them
        pipeline = self.redis.pipeline(transaction=False)
        for item in items:
            pipeline.set(self.key(f"body:{item.key}"), f"{shard} {item.due}")
        pipeline.zadd(self._shard(shard), {item.key: item.due for item in items})
        await pipeline.execute()

    async def reschedule(self, item: Item) -> bool:
        body = await self.redis.get(self.key(f"body:{item.key}"))
        if body is None:
            return False
        shard = int(body.split()[0])
        if not await self.redis.zadd(self._shard(shard), {item.key: item.due}, xx=True, ch=True):
            return False
        return bool(await self.redis.set(self.key(f"body:{item.key}"), f"{shard} {item.due}", xx=True))

    async def cancel(self, key: str) -> bool:
        body = await self.redis.get(self.key(f"body:{key}"))
        if body is None or not await self.redis.zrem(self._shard(int(body.split()[0])), key):
            return False
        return bool(await self.redis.delete(self.key(f"body:{key}")))

    async def run(self, role: str, effect: Effect) -> None:
        if role == "worker":
            await self._work(effect)
        await together(*(poll(_PERIOD, partial(self._hold, shard)) for shard in range(_SHARDS)))

    async def _hold(self, shard: int) -> None:
        """Poll the shard while the lock is ours; wait for it while another consumer has it."""
        lock, milliseconds = self.key(f"lock:{shard}"), round(_LOCK * 1000)
        if not await self.redis.set(lock, self._me, nx=True, px=milliseconds):
            return
        renewed = time.monotonic()
        while True:
            while await self._move(shard):
                pass
            if time.monotonic() - renewed > _LOCK / 4:
                if not await self._renew(keys=[lock], args=[self._me, milliseconds]):
                    break
                renewed = time.monotonic()
            await asyncio.sleep(_PERIOD)
        del self.counted[f"waiting_{shard}"]

    async def _move(self, shard: int) -> bool:
        """Queue what is due, then take it out: who dies in between has it queued twice, and a worker finds no body.

        Answers whether there may be more.
        """
        look = self.redis.pipeline(transaction=False)
        look.zrangebyscore(self._shard(shard), 0, now(), start=0, num=_PAGE).zcard(self._shard(shard))
        found, self.counted[f"waiting_{shard}"] = await look.execute()
        if found:
            await self.redis.rpush(self._queue, *found)
            self.counted[f"waiting_{shard}"] -= await self.redis.zrem(self._shard(shard), *found)
        return len(found) == _PAGE

    async def _work(self, effect: Effect) -> None:
        async for key in self.popped(self._queue):
            body = await self.redis.getdel(self.key(f"body:{key}"))
            if body is not None:
                await effect(key, int(body.split()[1]))


class WeightedShards(HashedShards):
    """Weights inverse to the sizes pick the shard."""

    name = "S5-B"
    title = "ZSET shards, picked by weights inverse to their sizes"
    shows = ()
    flaws = (
        Flaw(
            "evener shards cost a question before each schedule", "uneven",
            partial(_shards, opening="asked before each schedule, "),
        ),
    )  # fmt: skip

    async def pick(self) -> int:
        ask = self.redis.pipeline(transaction=False)
        for shard in range(_SHARDS):
            ask.zcard(self._shard(shard))
        sizes = await ask.execute()
        return random.choices(range(_SHARDS), weights=[1 / (1 + size) for size in sizes])[0]
