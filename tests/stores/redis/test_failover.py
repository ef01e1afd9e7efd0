"""A master dies under load: the store finds the next one by itself, and those of the other masters notice nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, patient, slot_of
from tests.stores.redis.load import Load
from tests.stores.redis.test_wakes import hears_of_every_shard, subscriptions
from tests.waiting import until

from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import In
from bide.core.records import Record
from bide.stores.redis import RedisStore
from bide.testing.store_suite.base import keys, new
from bide_proofs.servers.redis_replicas import ClusterNode, RedisCluster

in_a_cluster = pytest.mark.parametrize("deployment", ["cluster"])  # elsewhere all tasks are on one server
LONG = 600_000
"""Milliseconds of a lease that does not end in a test."""


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"])  # a single server has nobody to take over
async def test_a_replica_takes_over(own_servers: Servers, open_store: OpensStore, redis_namespace: str) -> None:
    """What asynchronous replication may lose is no failure, and is to be seen; who waits for a replica loses nothing.

    Each server's subscription is replaced, and every wake is heard again.
    """
    url, other = own_servers.url, f"{redis_namespace}-waits"
    stores = [await open_store(url) for _ in range(2)]
    waiting = [await open_store(url, namespace=other, query="&wait_replicas=1", silence=2.0) for _ in range(2)]
    listener, teller = await open_store(url), await open_store(url)
    await hears_of_every_shard(listener, teller)
    async with Load(*stores) as load, Load(*waiting) as safe:
        await asyncio.gather(load.more(100), safe.more(100))
        dead = await asyncio.to_thread(own_servers.fail_over)
        if own_servers.deployment == "cluster":
            await asyncio.to_thread(dead.start)  # as the only replica of the new one, so that there is one to wait for
            await asyncio.to_thread(own_servers.await_whole)
        await asyncio.gather(load.more(100), safe.more(100))
    sys.stderr.write(f"\n{own_servers.deployment}: {load.report()}\nwhere a replica is waited for: {safe.report()}\n")
    assert (load.errors, safe.errors) == ({}, {})
    assert (safe.lost, safe.again) == (set(), [])
    await hears_of_every_shard(listener, teller)
    assert subscriptions(listener).replaced >= 1


def parts(store: RedisStore, count: int) -> dict[int, list[str]]:
    """Keys of topic t, by the server that they rest on."""
    found: dict[int, list[str]] = {}
    for number in range(count):
        found.setdefault(_server(store, f"{number}"), []).append(f"{number}")
    return found


@in_a_cluster
async def test_no_part_of_the_store_is_on_two_servers(shared_url: str, open_store: OpensStore) -> None:
    store = await open_store(shared_url)
    servers: dict[int, set[int]] = {}
    for number in range(300):
        servers.setdefault(store.part_of("t", f"{number}"), set()).add(_server(store, f"{number}"))
    assert len(servers) > 3
    assert {len(those) for those in servers.values()} == {1}


@asynccontextmanager
async def away(cluster: RedisCluster, node: ClusterNode, how: str) -> AsyncIterator[None]:
    """Meanwhile `node` is dead or says nothing, and nobody takes its place."""
    with patient(cluster):
        await asyncio.to_thread(node.kill if how == "killed" else node.pause)
        try:
            yield
        finally:
            if how == "killed":
                await asyncio.to_thread(node.start)
                await asyncio.to_thread(cluster.await_whole)
            else:
                node.resume()


def first_node(cluster: RedisCluster, store: RedisStore) -> ClusterNode:
    """That of the first shard."""
    return master_of(cluster, slot_of(cluster, store, 0))


def keys_elsewhere(store: RedisStore, count: int) -> set[str]:
    """Keys of the other nodes."""
    mine = store._open().topology.part_of(0)
    return {key for part, keys in parts(store, count).items() if part != mine for key in keys}


@in_a_cluster
async def test_a_dead_node_fails_its_own_callers_only(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """That part is unavailable once `patience` is over, and the others answer before."""
    store, patient = await open_store(lasting_cluster.url, patience=1.0), await open_store(lasting_cluster.url)
    by_part, mine = parts(store, 300), store._open().topology.part_of(0)
    assert len(by_part) == 3
    async with away(lasting_cluster, first_node(lasting_cluster, store), "killed"):
        calls = {
            part: asyncio.create_task(patient.add([new(key, due=In(0)) for key in keys], now=0))
            for part, keys in by_part.items()
        }
        await asyncio.gather(*(call for part, call in calls.items() if part != mine))
        assert not calls[mine].done()
        calls[mine].cancel()
        with pytest.raises(StoreError) as failed:
            await store.add([new(key) for key in by_part[mine]], now=0)
        assert not isinstance(failed.value, PartlyFailed)
        everything = [new(f"{number}", due=In(0)) for number in range(300)]
        with pytest.raises(PartlyFailed) as partly:
            await store.add(everything, now=0)
        assert [isinstance(answer, StoreError) for answer in partly.value.answers] == [
            _server(store, task.key) == mine for task in everything
        ]


async def lease_until(store: RedisStore, holder: str, got: list[Record], wanted: set[str]) -> None:
    """Lease into `got`, in as many calls as it takes, until that is what is wanted."""

    async def complete() -> bool:
        got.extend((await store.lease({"t": 1_000}, now=0, until=LONG, holder=holder)).tasks)
        return set(keys(got)) >= wanted

    await until(complete, "what is to be had")


@in_a_cluster
async def test_what_a_slow_node_leases_late_is_handed_out_by_the_next_lease(
    lasting_cluster: RedisCluster, open_store: OpensStore
) -> None:
    """The call went on without it; its tasks are not leased in vain, and the worker is told that they are there."""
    store = await open_store(lasting_cluster.url)
    heard: list[str] = []
    await store.listen(["t"], lambda topic, wake: heard.append(topic))
    await store.add([new(f"{number}", due=In(0)) for number in range(100)], now=0)
    got: list[Record] = []
    async with away(lasting_cluster, first_node(lasting_cluster, store), "paused"):
        await lease_until(store, "w", got, keys_elsewhere(store, 100))
        assert len(got) < 100
        heard.clear()
    await until(lambda: bool(heard), "being told")
    await lease_until(store, "w", got, {f"{number}" for number in range(100)})
    assert len(got) == 100
    assert {task.attempt for task in got} == {1}


@in_a_cluster
@pytest.mark.parametrize("ended_by", ["leaving", "closing", "nothing"])
async def test_what_a_slow_node_leases_too_late_is_given_back(
    lasting_cluster: RedisCluster, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """The holder went meanwhile, or wants no more of it: others have it in a moment, not at the end of its lease."""
    monkeypatch.setattr("bide.stores.redis.leasing._PARTING", 60.0)  # however slow it is
    store, other = await open_store(lasting_cluster.url), await open_store(lasting_cluster.url)
    await store.add([new(f"{number}", due=In(0)) for number in range(100)], now=0)
    got: list[Record] = []
    async with away(lasting_cluster, first_node(lasting_cluster, store), "paused"):
        await lease_until(store, "w", got, keys_elsewhere(store, 100))
        assert len(got) < 100
        going = asyncio.create_task(_end(store, ended_by))
        await asyncio.sleep(0)  # it begins while the answer is still to come
    await going
    await lease_until(other, "other", got, {f"{number}" for number in range(100)})
    assert len(got) == 100
    assert {task.attempt for task in got} == {1}


@in_a_cluster
@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_lease_does_not_wait_for_a_dead_node(
    lasting_cluster: RedisCluster, open_store: OpensStore, how: str
) -> None:
    """What the other nodes have is handed out while one is away, whether it refuses or says nothing."""
    store = await open_store(lasting_cluster.url)
    alive = keys_elsewhere(store, 300)
    await store.lease({"t": 1}, now=0, until=LONG, holder="w")
    async with away(lasting_cluster, first_node(lasting_cluster, store), how):
        await store.add([new(key, due=In(0)) for key in alive], now=0)
        await lease_until(store, "w", [], alive)

        async def nobody_asks_without_a_pause() -> bool:
            leased = await store.lease({"t": 1_000}, now=0, until=LONG, holder="w")
            return leased.next_wake is None or leased.next_wake > leased.now

        await until(nobody_asks_without_a_pause, "a wake that is still to come")


async def _end(store: RedisStore, by: str) -> None:
    if by == "leaving":
        await store.announce("w", [], 0, now=0)
    elif by == "closing":
        await store.close()


def _shard(store: RedisStore, key: str) -> int:
    return store._open().layout.shard_of("t", key)


def _server(store: RedisStore, key: str) -> int:
    return store._open().topology.part_of(_shard(store, key))
