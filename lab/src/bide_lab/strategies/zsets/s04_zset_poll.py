"""S4: a sorted set of ids by due time, asked again and again for what is due."""

from __future__ import annotations

from collections.abc import Sequence

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import DONE_TWICE, NEVER_DONE, Effect, Flaw, Harm, Item, Setting, held_up, now, poll, when

_PERIOD = 0.1


class _ZsetPoll(RedisStrategy):
    """The sorted set and its clients, which the variants share, and the poller, which asks every 100 ms."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.due, self.bodies = self.key("due:order"), self.key("bodies:order")  # each kind of task has its own

    async def schedule(self, items: Sequence[Item]) -> None:
        due = {item.key: item.due for item in items}
        await self.redis.pipeline().hset(self.bodies, mapping=due).zadd(self.due, due).execute()

    async def reschedule(self, item: Item) -> bool:
        # a body that is not there stays away: it is written only if the index has the task
        changed = bool(await self.redis.zadd(self.due, {item.key: item.due}, xx=True, ch=True))
        if changed:
            await self.redis.hset(self.bodies, item.key, item.due)
        return changed

    async def cancel(self, key: str) -> bool:
        was_there, _ = await self.redis.pipeline().zrem(self.due, key).hdel(self.bodies, key).execute()
        return bool(was_there)

    async def due_until(self, end: int) -> list[tuple[str, int]]:
        """Ids and due times of what is due, in order; `end` in milliseconds since the epoch."""
        found = await self.redis.zrangebyscore(self.due, 0, end, withscores=True)
        return [(key.decode(), int(score)) for key, score in found]

    async def run(self, role: str, effect: Effect) -> None:
        await poll(_PERIOD, lambda: self.look(effect))

    async def look(self, effect: Effect) -> None:
        """Do all that is due."""
        raise NotImplementedError


class RemoveAfter(_ZsetPoll):
    """Range, do, remove."""

    name = "S4-A"
    title = "ZSET poll, removed when done"
    flaws = (Flaw("two pollers do the same task", "two", DONE_TWICE, Harm.TWICE),)

    async def look(self, effect: Effect) -> None:
        for key, due in await self.due_until(now()):
            await effect(key, due)
            await self.cancel(key)


class RemoveBefore(_ZsetPoll):
    """Range, remove index and body of all that is due, then do them."""

    name = "S4-B"
    title = "ZSET poll, removed before it is done"
    shows = ()
    flaws = (Flaw("a poller that dies takes with it what it had removed", "killed", NEVER_DONE, Harm.LOST),)

    async def look(self, effect: Effect) -> None:
        found = await self.due_until(now())
        mine = [(key, due) for key, due in found if await self.cancel(key)]
        for key, due in mine:
            await effect(key, due)


class SmallestOnly(_ZsetPoll):
    """The smallest element alone: not due, sleep; due, remove it, do it, and look again."""

    name = "S4-C"
    title = "ZSET poll, the smallest element only"
    loses = "what its holder had taken and not done when it died"
    flaws = (Flaw("one slow task holds up all others", "slow", held_up),)

    async def look(self, effect: Effect) -> None:
        while (head := await self.redis.zrange(self.due, 0, 0, withscores=True)) and head[0][1] <= now():
            [(key, score)] = head
            if await self.cancel(key.decode()):  # of several pollers one has removed it
                await effect(key.decode(), int(score))


class RemoveRange(_ZsetPoll):
    """Range, then remove the same range, then do what was found."""

    name = "S4-D"
    title = "ZSET poll, the range removed as a range"
    shows = ()
    flaws = (
        Flaw(
            "what is added between the two commands, and is due, is removed undone", "gap",
            when("lost", "{lost} of {expected} tasks removed undone"), Harm.LOST,
        ),
    )  # fmt: skip

    async def look(self, effect: Effect) -> None:
        end = now()
        if found := await self.due_until(end):
            await self.redis.zremrangebyscore(self.due, 0, end)
            for key, due in found:
                await effect(key, due)
            await self.redis.hdel(self.bodies, *(key for key, _ in found))
