"""The contract of a store, kept by Redis: with one shard, where the order is exact, and with sixteen; by a Cluster, and
under Sentinel.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar
from zlib import crc32

import pytest
from tests.conformance.others import Others
from tests.servers.keyspace import client_of

from bide.core.records import Ref
from bide.stores.redis import RedisStore
from bide.stores.redis.layout import Layout
from bide.testing.store_suite import StoreSuite
from bide.testing.store_suite.base import SuiteBase
from bide.testing.store_suite.calls import Batches, EveryCell, Fairness, Leasing, OddInput, Racing
from bide.testing.store_suite.capabilities import Announcing, Listening, Opening, Remembering
from bide.testing.store_suite.finding import Counting, Finding


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
        with client_of(self.url) as client:
            client.hset(bodies, ref.key, b"\xff\xfe")


class OneServer(RedisSuite):
    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_url, redis_namespace


class TestRedisOneShard(OneServer, Leasing, Fairness, Finding, Counting, Batches, OddInput, Racing, Opening):
    """What depends on the number of shards: orders, listings, counts. Fewer races will do: each is for one key, which
    lies in one shard of sixteen, too.
    """

    shards: ClassVar[int] = 1
    races: ClassVar[int] = 50


class OnSixteenShards(OneServer):
    exact_order: ClassVar[bool] = False


class TestRedis(OnSixteenShards, EveryCell): ...


class TestRedisOthers(OnSixteenShards, Others): ...


class TestRedisCluster(RedisSuite, StoreSuite):
    """The scripts are the same as on one server, so fewer races will do; but here alone none may read a key of another
    slot, in any cell.
    """

    exact_order: ClassVar[bool] = False
    races: ClassVar[int] = 50

    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_cluster_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_cluster_url, redis_namespace


class TestRedisSentinel(RedisSuite, Batches, OddInput, Opening, Listening, Announcing, Remembering):
    """Here too one server answers, by the same scripts: what differs is how it is found, which each verb needs."""

    exact_order: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _own_namespace(self, redis_sentinel_url: str, redis_namespace: str) -> None:
        self.url, self.namespace = redis_sentinel_url, redis_namespace
