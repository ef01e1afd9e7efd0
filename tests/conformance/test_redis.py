"""The contract of a store, kept by Redis: with one shard, where the order is exact, and with sixteen."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar
from zlib import crc32

import pytest
import redis

from bide.core.records import Ref
from bide.stores.redis import RedisStore
from bide.stores.redis.layout import Layout
from bide.testing.store_suite import StoreSuite


class RedisSuite(StoreSuite):
    durable: ClassVar[bool] = True
    shards: ClassVar[int] = 16

    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_url, redis_namespace

    async def make_store(self, tmp_path: Path) -> RedisStore:
        return RedisStore(f"{self.url}?namespace={self.place(tmp_path)}&shards={self.shards}", clock="caller")

    def place(self, tmp_path: Path) -> str:
        """A namespace for each directory."""
        return f"{self.namespace}-{crc32(str(tmp_path).encode()):x}"

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        layout = Layout(self.place(tmp_path), self.shards)
        with redis.Redis.from_url(self.url) as client:
            client.hset(layout.topic(layout.shard_of(*ref), ref.topic)[0].decode(), ref.key, b"\xff\xfe")


class TestRedisOneShard(RedisSuite):
    shards: ClassVar[int] = 1


class TestRedis(RedisSuite):
    exact_order: ClassVar[bool] = False
