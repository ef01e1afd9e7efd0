"""What a benchmark does to a Redis server by itself: it leaves nothing, and measures what it says that it measures."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from redis import Redis

from bide.core.errors import BadInput, StoreUnavailable
from bide.wiring import address_of
from bide_bench.plan import Plan, limit_of, open_target
from bide_bench.redis_server import Busy, RedisServer, connect, redis_server
from bide_proofs.servers import redis as servers


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server without others' keys."""
    with servers.RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[Redis]:
    """A plain client of the server."""
    with Redis.from_url(redis_url) as client:
        yield client


def keys(client: Redis) -> set[str]:
    return {key.decode() for key in client.scan_iter()}


async def test_a_namespace_of_its_own_is_gone_afterwards_and_nothing_else(redis_url: str, client: Redis) -> None:
    before = keys(client)
    async with open_target(redis_url) as target:
        assert target.kind == "redis"
        assert target.shared
        assert target.owned
        (namespace,) = parse_qs(urlsplit(target.url).query)["namespace"]
        others = {f"{{{namespace}x}}:a", f"{{{namespace}:x}}:a", f"{namespace}:a", f"x{{{namespace}}}:a"}
        for key in (f"{{{namespace}}}:a", f"{{{namespace}:0}}:b", f"{{{namespace}:15}}:c", *others):
            client.set(key, "1")
    assert keys(client) - before == others
    client.delete(*others)


async def test_more_keys_than_one_call_takes_are_removed(redis_url: str, client: Redis) -> None:
    before = keys(client)
    async with open_target(redis_url) as target:
        assert isinstance(target, RedisServer)
        pipeline = client.pipeline(transaction=False)
        for number in range(2_500):
            pipeline.set(f"{{{target.namespace}:{number % 16}}}:{number}", "1")
        pipeline.execute()
    assert keys(client) == before


async def test_the_raw_limit_is_measured_and_leaves_nothing(redis_url: str, client: Redis) -> None:
    before = keys(client)
    async with open_target(redis_url) as target:
        async with limit_of(Plan(target=target, limit=True)) as limit:
            size = await target.size()
            await limit.measure(2)
            made = keys(client) - before
            assert len(made) == 2_001  # the tasks, and one sorted set
            assert await target.size() - size > 2_000 * 100
            assert (await limit.fields({}))["limit_per_s"] > 0
        assert keys(client) == before


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_a_cluster_and_a_sentinel_serve_as_well(kind: str, request: pytest.FixtureRequest) -> None:
    async with open_target(str(request.getfixturevalue(f"redis_{kind}_url"))) as target:
        assert isinstance(target, RedisServer)
        assert target.is_cluster == (kind == "cluster")
        for shard in range(16):
            target.client.set(f"{{{target.namespace}:{shard}}}:k", "1")
        assert not await target.is_empty()
        async with limit_of(Plan(target=target, limit=True)) as limit:
            size, load = await target.size(), await target.load()
            await limit.measure(2)
            assert await target.size() - size > 2_000 * 100
            assert (await target.load()).requests > load.requests
        await target.clear()
        assert await target.is_empty()


def test_the_time_of_a_command_in_a_script_counts_once() -> None:
    begun = Busy(outer=100, others=1000)
    assert Busy(outer=150, others=1040).since(begun) == 50
    assert Busy(outer=100, others=1040).since(begun) == 40


async def test_the_server_tells_what_it_did(redis_url: str, client: Redis) -> None:
    async with open_target(redis_url) as target:
        assert isinstance(target, RedisServer)
        busy, load = target.busy(), await target.load()
        for _ in range(10):
            client.eval("for i = 1, 10000 do redis.call('TIME') end", 0)
        spent, after = target.busy().since(busy), await target.load()
    assert spent > 0
    assert after.cpu > load.cpu
    assert after.requests - load.requests >= 10


async def test_what_goes_wrong_is_an_error_of_bide(redis_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="benchmark"):
        async with open_target("redis://127.0.0.1:1/0"):
            pass
    with pytest.raises(StoreUnavailable, match="benchmark"):
        async with redis_server(redis_url) as server:
            server.client.execute_command("NO-SUCH-COMMAND")


@pytest.mark.parametrize("url", ["redis://host:port", "redis://host?namespace=a*b"])
async def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    """Or one whose namespace would mean others' keys too, as a pattern."""
    with pytest.raises(BadInput, match=r"store|namespace"):
        async with open_target(url):
            pass


def test_a_url_is_read_as_the_store_reads_it() -> None:
    for url, said in (
        ("rediss://u%40v:p%3Aq@host?db=2&ssl_cert_reqs=none", {"username": "u@v", "password": "p:q", "db": 2}),
        ("unix:///run/redis%20one.sock?db=1", {"path": "/run/redis one.sock", "db": 1}),
    ):
        assert said.items() <= connect(address_of(url)).connection_pool.connection_kwargs.items()
