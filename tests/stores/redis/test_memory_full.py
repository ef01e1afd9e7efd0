"""A server whose memory is full refuses new work, and nothing else: what is there drains."""

from __future__ import annotations

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore

from bide.core.errors import PartlyFailed, SetupError, StoreFull
from bide.core.records import Cancel, Filter, In, Move, Result, State
from bide.stores.redis import RedisStore
from bide.testing.store_suite.acts import SECOND, do, done, extend, lease, listed, new, retry

NEVER = 10_000_000
"""Milliseconds from now."""


async def filled(store: RedisStore) -> int:
    """Schedules until the store is full; how many tasks it took."""
    for batch in range(1_000):
        tasks = [new(f"{batch}-{number}", due=In(0), payload=b"x" * 5_000) for number in range(100)]
        try:
            await store.add(tasks, now=0)
        except (StoreFull, PartlyFailed):
            return (await store.tally()).number()
    raise AssertionError("it takes everything")


async def test_a_full_server_refuses_new_work_and_drains(redis_server: StartsRedis, open_store: OpensStore) -> None:
    server = redis_server(options={"maxmemory": "6mb"})
    store = await open_store(server.url)
    before = await filled(store)
    assert before > 100
    with pytest.raises(StoreFull, match="maxmemory"):
        await store.add([new("one", payload=b"x" * 100_000)], now=0)

    live = await store.announce("w", ["t"], until=NEVER, now=0)
    assert live == {"w": ["t"]}, "a worker can say that it is there"
    other = await open_store(server.url, query="&shards=16")
    held = (await lease(other, 3, now=0)).tasks
    assert len(held) == 3, "one that is opened only now can help"
    assert await extend(other, held[0], now=0, until=60 * SECOND)
    assert await other.settle([retry(held[0], In(NEVER)), done(held[1])], now=0) == [True, True]
    assert (await do(store, Move("t", held[0].key, In(0)))).result is Result.MOVED
    assert (await do(store, Cancel("t", held[2].key))).result is Result.CANCELLED_WHILE_LEASED

    while left := (await lease(store, 100, now=0)).tasks:
        assert all(await store.settle([done(one) for one in left], now=0))
    assert await listed(store, Filter()) == []
    [answer] = await store.add([new("after", due=In(0))], now=0)
    assert answer.result is Result.CREATED, "and there is room again"


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
async def test_a_policy_that_throws_tasks_away_is_refused(
    redis_server: StartsRedis, redis_namespace: str, policy: str
) -> None:
    server = redis_server(options={"maxmemory": "10mb", "maxmemory-policy": policy})
    store = RedisStore(f"{server.url}?namespace={redis_namespace}")
    with pytest.raises(SetupError, match=policy):
        await store.open()


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl", "volatile-random"])
async def test_a_policy_that_spares_keys_without_an_end_is_accepted(
    redis_server: StartsRedis, open_store: OpensStore, policy: str
) -> None:
    """At its limit it throws away what a resend would be answered from, never a task."""
    server = redis_server(options={"maxmemory": "6mb", "maxmemory-policy": policy})
    store = await open_store(server.url)
    there = await filled(store)
    assert len(await listed(store, Filter(state=State.WAITING))) == there
