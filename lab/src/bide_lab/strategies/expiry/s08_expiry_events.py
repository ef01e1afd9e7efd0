"""S8: a key with a time to live for each task, and a subscription to what the server says has expired."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import NEVER_DONE, Effect, Flaw, Harm, Item, now, when

_SETTING = "notify-keyspace-events"
_EXPIRED = "Ex"
"""Events on the channel of an event; of keys that have expired."""


class ExpiryEvents(RedisStrategy):
    """The server's setting is changed for as long as a cell is played."""

    name = "S8"
    title = "key expiry events"
    flaws = (
        Flaw(
            "events come when the server happens to delete the key", "many",
            when("p50", "with {far_off:,.0f} keys waiting half were {p50:,.0f} ms late, the last {most:,.0f} ms",
                 over=400), Harm.LATE,
        ),
        Flaw("what expires while no listener is there is never told", "away", NEVER_DONE, Harm.LOST),
        Flaw("nor is it if the subscription is dropped unnoticed", "deaf", NEVER_DONE, Harm.LOST),
    )  # fmt: skip
    _before: str | None = None
    """The server's setting as it was."""

    async def prepare(self) -> None:
        before = (await self.redis.config_get(_SETTING))[_SETTING]
        await self.redis.config_set(_SETTING, "".join(sorted({*before, *_EXPIRED})))
        self._before = before

    async def clear(self) -> None:
        if self._before is not None:
            await self.redis.config_set(_SETTING, self._before)
        await super().clear()

    def _task(self, key: str) -> str:
        return self.key(f"task:{key}")

    def _body(self, key: str) -> str:
        return self.key(f"body:{key}")

    async def schedule(self, items: Sequence[Item]) -> None:
        pipeline = self.redis.pipeline(transaction=True)
        for item in items:
            pipeline.set(self._body(item.key), item.due)
            pipeline.set(self._task(item.key), "", px=_ahead(item.due))
        await pipeline.execute()

    async def reschedule(self, item: Item) -> bool:
        moved = bool(await self.redis.pexpire(self._task(item.key), _ahead(item.due)))
        if moved:
            await self.redis.set(self._body(item.key), item.due, xx=True)
        return moved

    async def cancel(self, key: str) -> bool:
        # deleting is another event than expiring; of a key that has expired already the event is under way
        there = bool(await self.redis.delete(self._task(key)))
        if there:
            await self.redis.delete(self._body(key))
        return there

    async def run(self, role: str, effect: Effect) -> None:
        database = self.redis.connection_pool.connection_kwargs.get("db", 0)
        mine = self._task("").encode()
        async with self.redis.pubsub() as events, asyncio.TaskGroup() as tasks:
            await events.subscribe(f"__keyevent@{database}__:expired")
            async for event in events.listen():
                if event["type"] == "message" and event["data"].startswith(mine):
                    tasks.create_task(self._expired(event["data"].removeprefix(mine).decode(), effect))

    async def _expired(self, key: str, effect: Effect) -> None:
        body = await self.redis.getdel(self._body(key))
        if body is not None:  # else another listener has it
            await effect(key, int(body))


def _ahead(due: int) -> int:
    """Milliseconds from now, at least one: what is to have expired already is deleted, and that is not an expiry."""
    return max(1, due - now())
