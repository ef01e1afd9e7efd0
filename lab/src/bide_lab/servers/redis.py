"""Strategies on Redis."""

from __future__ import annotations

from typing import Any

from bide_lab.strategy import Setting, Strategy

_CONNECTIONS = 64
"""Of one process; who finds none free waits for one."""
_PATIENCE = 30.0
"""Seconds to connect: a machine that plays many cells at once may be slow, and that is no fault of a strategy."""


class RedisStrategy(Strategy):
    """One connection pool, and keys that all begin with the cell's prefix."""

    needs = ("redis",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.redis: Any = None
        """A plain asyncio client of redis-py."""

    async def open(self) -> None:
        from redis.asyncio import BlockingConnectionPool, Redis

        # without a time-out of the client's, so that a blocking pop may wait for as long as it likes
        pool = BlockingConnectionPool.from_url(
            self.setting.urls["redis"], max_connections=_CONNECTIONS, timeout=None,
            socket_timeout=None, socket_connect_timeout=_PATIENCE,
        )  # fmt: skip
        self.redis = Redis.from_pool(pool)

    async def close(self) -> None:
        if self.redis is not None:
            await self.redis.aclose()

    def key(self, name: str) -> str:
        return f"{self.setting.prefix}:{name}"

    async def clear(self) -> None:
        batch = [key async for key in self.redis.scan_iter(match=f"{self.setting.prefix}:*", count=1000)]
        for begin in range(0, len(batch), 1000):
            await self.redis.unlink(*batch[begin : begin + 1000])
