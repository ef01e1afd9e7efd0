"""Strategies on Redis."""

from __future__ import annotations

from typing import Any

from bide.lab.strategy import Setting, Strategy


class RedisStrategy(Strategy):
    """One connection pool, and keys that all begin with the cell's prefix."""

    needs = ("redis",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.redis: Any = None
        """A plain asyncio client of redis-py."""

    async def open(self) -> None:
        from redis.asyncio import Redis

        self.redis = Redis.from_url(self.setting.urls["redis"])

    async def close(self) -> None:
        if self.redis is not None:
            await self.redis.aclose()

    def key(self, name: str) -> str:
        return f"{self.setting.prefix}:{name}"

    async def clear(self) -> None:
        batch = [key async for key in self.redis.scan_iter(match=f"{self.setting.prefix}:*", count=1000)]
        for begin in range(0, len(batch), 1000):
            await self.redis.unlink(*batch[begin : begin + 1000])
