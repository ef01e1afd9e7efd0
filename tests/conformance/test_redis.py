"""The contract of a store, kept by Redis: with one shard, where the order is exact, and with sixteen; by a Cluster, and
under Sentinel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import pytest
import redis
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel

from bide.core.records import Ref
from bide.stores.redis import RedisStore
from bide.stores.redis.address import address_of
from bide.stores.redis.layout import Layout
from bide.testing.store_suite import StoreSuite
from bide.testing.store_suite.base import SuiteBase
from bide.testing.store_suite.calls import Batches, OddInput
from bide.testing.store_suite.capabilities import Announcing, Listening, Opening, Remembering

Client = redis.Redis | RedisCluster


class RedisSuite(SuiteBase):
    durable: ClassVar[bool] = True
    shards: ClassVar[int] = 16

    url: str
    namespace: str

    async def make_store(self, tmp_path: Path) -> RedisStore:
        return RedisStore(
            f"{self.url}?namespace={self.place(tmp_path)}&shards={self.shards}", clock="caller", silence=30
        )

    def place(self, tmp_path: Path) -> str:
        """A namespace for each directory."""
        return f"{self.namespace}-{crc32(str(tmp_path).encode()):x}"

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        layout = Layout(self.place(tmp_path), self.shards)
        bodies = layout.topic(layout.shard_of(*ref), ref.topic)[0].decode()
        with self.client() as client:
            client.hset(bodies, ref.key, b"\xff\xfe")

    def client(self) -> AbstractContextManager[Client]:
        return redis.Redis.from_url(self.url)


class OneServer(RedisSuite):
    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_url, redis_namespace


class TestRedisOneShard(OneServer, StoreSuite):
    """Fewer races will do: each is for one key, which lies in one shard of sixteen, too."""

    shards: ClassVar[int] = 1
    races: ClassVar[int] = 50


class TestRedis(OneServer, StoreSuite):
    exact_order: ClassVar[bool] = False


class TestRedisCluster(RedisSuite, StoreSuite):
    """The scripts are the same as on one server, so fewer races will do; what differs is the way to them."""

    exact_order: ClassVar[bool] = False
    races: ClassVar[int] = 100

    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_cluster_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_cluster_url, redis_namespace

    def client(self) -> AbstractContextManager[Client]:
        host, port = address_of(self.url).hosts[0]
        return RedisCluster(host=host, port=port)


class TestRedisSentinel(RedisSuite, Batches, OddInput, Opening, Listening, Announcing, Remembering):
    """Here too one server answers, by the same scripts: what differs is how it is found, which each verb needs."""

    exact_order: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_sentinel_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_sentinel_url, redis_namespace

    @contextmanager
    def client(self) -> Iterator[Client]:
        address = address_of(self.url)
        untyped: Any = Sentinel  # redis-py leaves it so
        watching = untyped(list(address.hosts))
        try:
            with watching.master_for(address.service) as client:
                yield client
        finally:
            for one in watching.sentinels:
                one.close()
