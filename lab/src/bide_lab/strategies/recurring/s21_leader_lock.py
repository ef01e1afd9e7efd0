"""S21: the holder of a lock leads, and computes the next time from now."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import RUN_LOST, RUN_TWICE, Effect, Flaw, Harm, Recurrent

_LOCK = 20.0
"""Seconds of strategy time that the lock lasts without being renewed; it is renewed three times as often."""
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"


class LeaderLock(RedisStrategy, Recurrent):
    """SET NX PX; the others ask again and again."""

    name = "S21"
    title = "one leader with a lock in Redis"
    loses = "every run whose time comes between a leader's death and the end of its lock"
    flaws = (
        Flaw("a run is lost that comes due until a dead leader's lock ends", "recurrence", RUN_LOST, Harm.LOST),
        Flaw("a leader that stood still does a run that the next has done", "recurrence", RUN_TWICE, Harm.TWICE),
    )  # fmt: skip

    async def open(self) -> None:
        await super().open()
        self._me, self._lock = uuid4().hex, self.key("leader")
        self._lasts = self.setting.span(_LOCK)
        self._renew: Any = self.redis.register_script(_RENEW)

    async def run(self, role: str, effect: Effect) -> None:
        while True:
            if await self.redis.set(self._lock, self._me, nx=True, px=round(self._lasts * 1000)):
                await self._lead(effect)
            await asyncio.sleep(self._lasts / 10)

    async def _lead(self, effect: Effect) -> None:
        """Until the renewal, which holds up no run, finds the lock gone: that may be when a run has begun already."""
        renewing = asyncio.create_task(self._keep())
        try:
            async for due in self.instants():
                if renewing.done():
                    return await renewing
                await effect("rule", due)
        finally:
            renewing.cancel()

    async def _keep(self) -> None:
        while await self._renew(keys=[self._lock], args=[self._me, round(self._lasts * 1000)]):  # noqa: ASYNC110
            await asyncio.sleep(self._lasts / 3)
