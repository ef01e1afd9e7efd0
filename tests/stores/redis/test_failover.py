"""A master dies under load: the store finds the next one by itself, and those of the other masters notice nothing."""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.servers.redis_cluster import RedisCluster
from tests.servers.stalls import Stalls
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.stores.redis.load import Load

from bide.core.errors import PartlyFailed, StoreError
from bide.core.records import In
from bide.stores.redis import RedisStore
from bide.testing.store_suite.acts import keys, new, until

pytestmark = pytest.mark.faults
in_a_cluster = pytest.mark.parametrize("deployment", ["cluster"])  # elsewhere all tasks are on one server


def told(load: Load, what: str) -> None:
    """What asynchronous replication may lose is no failure, and is to be seen."""
    sys.stderr.write(f"\n{what}: {load.report()}\n")


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"])  # a single server has nobody to take over
@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_replica_takes_over(own_servers: Servers, open_store: OpensStore, replicas: int) -> None:
    query = f"&wait_replicas={replicas}"
    stores = [await open_store(own_servers.url, query=query, silence=0.5) for _ in range(2)]
    async with Load(*stores, least=101) as load:
        await asyncio.sleep(0.5)
        dead = await asyncio.to_thread(own_servers.fail_over)
        if own_servers.deployment == "cluster":
            await asyncio.to_thread(dead.start)  # as the only replica of the new one, so that there is one to wait for
            await asyncio.to_thread(own_servers.await_whole)
        await asyncio.sleep(0.7)
    told(load, f"{own_servers.deployment}, wait_replicas={replicas}")
    assert len(load.acknowledged) > 100
    assert load.errors == {}
    if own_servers.deployment == "sentinel":  # while in a Cluster the others go on, and the load waits for all of them
        assert load.gap < 5
    if replicas:
        assert (load.lost, load.again) == (set(), [])


def parts(store: RedisStore, count: int) -> dict[int, list[str]]:
    """Keys of topic t, by the server that they rest on."""
    found: dict[int, list[str]] = {}
    for number in range(count):
        found.setdefault(_server(store, f"{number}"), []).append(f"{number}")
    return found


@in_a_cluster
async def test_no_part_of_the_store_is_on_two_servers(own_cluster: RedisCluster, open_store: OpensStore) -> None:
    store = await open_store(own_cluster.url)
    servers: dict[int, set[int]] = {}
    for number in range(300):
        servers.setdefault(store.part_of("t", f"{number}"), set()).add(_server(store, f"{number}"))
    assert len(servers) > 3
    assert {len(those) for those in servers.values()} == {1}


@in_a_cluster
async def test_a_dead_node_fails_its_own_callers_only(
    own_cluster: RedisCluster, open_store: OpensStore, stalls: Stalls
) -> None:
    """No replica takes over: that part is unavailable once `patience` is over, and the others answer at once."""
    store = await open_store(own_cluster.url, silence=0.3, patience=1.0)
    by_part = parts(store, 300)
    assert len(by_part) == 3
    dead = own_cluster.master_of(own_cluster.slot_of(store._open().layout.tags[0]))
    mine = _server(store, next(key for keys in by_part.values() for key in keys if _shard(store, key) == 0))
    await asyncio.to_thread(own_cluster.replica_of(dead).kill)
    await asyncio.to_thread(dead.kill)
    loop = asyncio.get_running_loop()

    async def timed(keys: list[str]) -> tuple[float, BaseException | None]:
        began = loop.time()
        try:
            await store.add([new(key, due=In(0)) for key in keys], now=0)
        except StoreError as error:
            return loop.time() - began, error
        return loop.time() - began, None

    took = dict(zip(by_part, await asyncio.gather(*(timed(keys) for keys in by_part.values())), strict=True))
    for part, (seconds, error) in took.items():
        if part == mine:
            assert isinstance(error, StoreError)
            assert not isinstance(error, PartlyFailed)
            assert 0.9 < seconds < 2.5 + stalls.seconds
        else:
            assert error is None
            assert seconds < 0.25 + stalls.seconds
    everything = [new(f"{number}", due=In(0)) for number in range(300)]
    with pytest.raises(PartlyFailed) as partly:
        await store.add(everything, now=0)
    assert [isinstance(answer, StoreError) for answer in partly.value.answers] == [
        _server(store, task.key) == mine for task in everything
    ]


@in_a_cluster
async def test_what_a_slow_node_leases_late_is_handed_out_by_the_next_lease(
    lasting_cluster: RedisCluster, open_store: OpensStore
) -> None:
    """The call went on without it; its tasks are not leased in vain, and the worker is told that they are there."""
    store = await open_store(lasting_cluster.url, silence=3.0)
    heard: list[str] = []
    await store.listen(["t"], lambda topic, wake: heard.append(topic))
    await store.add([new(f"{number}", due=In(0)) for number in range(100)], now=0)
    slow = lasting_cluster.master_of(lasting_cluster.slot_of(store._open().layout.tags[0]))
    slow.pause()
    try:
        first = await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
        assert 0 < len(first.tasks) < 100
        heard.clear()
    finally:
        slow.resume()
    await until(lambda: bool(heard), "being told")
    second = await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
    assert sorted(keys([*first.tasks, *second.tasks]), key=int) == [f"{number}" for number in range(100)]
    assert {task.attempt for task in second.tasks} == {1}


@in_a_cluster
@pytest.mark.parametrize("ended_by", ["leaving", "closing", "nothing"])
async def test_what_a_slow_node_leases_too_late_is_given_back(
    lasting_cluster: RedisCluster, open_store: OpensStore, ended_by: str
) -> None:
    """The holder went meanwhile, or wants no more of it: others have it in a moment, not at the end of its lease."""
    store, other = await open_store(lasting_cluster.url, silence=3.0), await open_store(lasting_cluster.url)
    await store.add([new(f"{number}", due=In(0)) for number in range(100)], now=0)
    slow = lasting_cluster.master_of(lasting_cluster.slot_of(store._open().layout.tags[0]))
    slow.pause()
    try:
        first = await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
        assert 0 < len(first.tasks) < 100
        going = asyncio.create_task(_end(store, ended_by))
        await asyncio.sleep(0)  # it begins while the answer is still to come
    finally:
        slow.resume()
    await going
    got = keys(first.tasks)
    began = asyncio.get_running_loop().time()
    while len(got) < 100:
        leased = (await other.lease({"t": 1_000}, now=0, until=60_000, holder="other")).tasks
        got += keys(leased)
        assert {task.attempt for task in leased} <= {1}
        assert asyncio.get_running_loop().time() - began < 5
        await asyncio.sleep(0.01)
    assert sorted(got, key=int) == [f"{number}" for number in range(100)]


@in_a_cluster
@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_lease_does_not_wait_for_a_dead_node(
    own_cluster: RedisCluster, open_store: OpensStore, stalls: Stalls, how: str
) -> None:
    """What the other nodes have is handed out while one is away, whether it refuses or says nothing."""
    store = await open_store(own_cluster.url, silence=1.0)
    by_part = parts(store, 300)
    dead = own_cluster.master_of(own_cluster.slot_of(store._open().layout.tags[0]))
    mine = _server(store, next(key for keys in by_part.values() for key in keys if _shard(store, key) == 0))
    alive = {key for part, keys in by_part.items() if part != mine for key in keys}
    await store.lease({"t": 1}, now=0, until=60_000, holder="w")
    await asyncio.to_thread(dead.kill if how == "killed" else dead.pause)
    try:
        await asyncio.gather(*(store.add([new(key, due=In(0))], now=0) for key in alive))
        await asyncio.sleep(1.0)  # so that every head is to be asked for again
        loop = asyncio.get_running_loop()
        got: set[str] = set()
        began = loop.time()
        while got != alive:
            leased = await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
            got |= {task.key for task in leased.tasks}
            assert loop.time() - began < 1.0 + stalls.seconds, f"{len(got)} of {len(alive)}"
        await asyncio.sleep(1.1)
        leased = await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
        assert leased.next_wake is None or leased.next_wake > leased.now, "and nobody asks without a pause"
    finally:
        dead.resume() if how == "paused" else None


async def _end(store: RedisStore, by: str) -> None:
    if by == "leaving":
        await store.announce("w", [], 0, now=0)
    elif by == "closing":
        await store.close()


def _shard(store: RedisStore, key: str) -> int:
    return store._open().layout.shard_of("t", key)


def _server(store: RedisStore, key: str) -> int:
    return store._open().nodes.part_of(_shard(store, key))
