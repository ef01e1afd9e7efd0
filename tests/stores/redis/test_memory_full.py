"""A server whose memory is full refuses new work, and nothing else: what is there drains."""

from __future__ import annotations

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.waiting import until

from bide.core.errors import PartlyFailed, SetupError, StoreFull
from bide.core.instants import In
from bide.core.records import Cancel, Filter, Move, Record, Result, State
from bide.stores.redis import RedisStore
from bide.testing.store_suite.base import do, done, extend, listed, new, retry

NEVER = 10_000_000
"""Milliseconds from now."""


ROOM = 4_000_000
"""Bytes that are left for tasks."""


async def filled(store: RedisStore) -> int:
    """Schedules until every server is full; how many tasks the store took."""
    for batch in range(1_000):
        tasks = [new(f"{batch}-{number}", due=In(0), payload=b"x" * 5_000) for number in range(100)]
        try:
            await store.add(tasks, now=0)
        except StoreFull:
            return (await store.tally()).number()
        except PartlyFailed as partly:
            if all(isinstance(answer, StoreFull) for answer in partly.answers):
                return (await store.tally()).number()
    raise AssertionError("it takes everything")


async def leased(store: RedisStore, count: int) -> list[Record]:
    """So many, in as many calls as it takes: in a Cluster none waits for the slowest server."""
    held: list[Record] = []

    async def enough() -> bool:
        held.extend((await store.lease({"t": count - len(held)}, now=0, until=NEVER, holder="w")).tasks)
        return len(held) == count

    await until(enough, "so many tasks")
    return held


async def test_full_servers_refuse_new_work_and_drain(servers: Servers, open_store: OpensStore) -> None:
    store = await open_store(servers.url)
    with servers.nearly_full(ROOM):
        before = await filled(store)
        assert before > 100
        with pytest.raises(StoreFull, match="maxmemory"):
            await store.add([new("one", payload=b"x" * 100_000)], now=0)

        live = await store.announce("w", ["t"], until=NEVER, now=0)
        assert live == {"w": ["t"]}, "a worker can say that it is there"
        other = await open_store(servers.url, query="&shards=16")
        held = await leased(other, 3)  # one that is opened only now can help
        assert await extend(other, held[0], now=0, until=2 * NEVER)
        assert await other.settle([retry(held[0], In(NEVER)), done(held[1])], now=0) == [True, True]
        assert (await do(store, Move("t", held[0].key, In(0)))).result is Result.MOVED
        assert (await do(store, Cancel("t", held[2].key))).result is Result.CANCELLED_WHILE_LEASED

        left = before - 2
        while left:
            some = await leased(store, min(left, 100))
            assert all(await store.settle([done(one) for one in some], now=0))
            left -= len(some)
        assert await listed(store, Filter()) == []
        [answer] = await store.add([new("after", due=In(0))], now=0)
        assert answer.result is Result.CREATED, "and there is room again"


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_policy_that_throws_tasks_away_is_refused(servers: Servers, redis_namespace: str, policy: str) -> None:
    store = RedisStore(f"{servers.url}?namespace={redis_namespace}")
    with servers.set_up(maxmemory_policy=policy), pytest.raises(SetupError, match=policy):
        await store.open()


async def test_a_policy_that_spares_keys_without_an_end_is_accepted(servers: Servers, open_store: OpensStore) -> None:
    """At its limit it throws away what a resend would be answered from, never a task."""
    with servers.set_up(maxmemory_policy="volatile-ttl"):
        store = await open_store(servers.url)
        with servers.nearly_full(ROOM):
            there = await filled(store)
            assert len(await listed(store, Filter(state=State.WAITING))) == there
