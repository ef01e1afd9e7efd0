"""What is left when everything has ended; and who may open what is there."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers

from bide.core.errors import StoreMismatch
from bide.core.instants import At, In
from bide.core.records import Cancel, Filter, OnConflict, Redrive, State
from bide.stores.redis import RedisStore
from bide.testing.store_suite.base import (
    HOUR,
    LEASE,
    MINUTE,
    NOW,
    again,
    dead,
    defer,
    do,
    done,
    lease,
    listed,
    new,
    put,
    retry,
    settle,
    take,
)


async def test_nothing_is_left_behind(servers: Servers, redis_namespace: str, open_store: OpensStore) -> None:
    """Whichever way a task ended: the layout and two numbers for each shard, and answers that end by themselves."""
    store = await open_store(servers.url, query="&shards=2", clock="caller")
    kept = NOW + MINUTE
    everyone = [new(f"{number}", topic=topic, group=f"g{number % 3}", deadline=NOW + HOUR, options=b"o")
                for topic in ("a", "b") for number in range(40)]  # fmt: skip
    await put(store, *everyone)
    await put(store, *everyone[::2])
    await store.add([new("1", topic="a", on_conflict=OnConflict.LATEST, due=At(NOW + 1))], now=NOW)
    for topic in ("a", "b"):
        held = (await lease(store, 30, topic=topic, now=NOW + 1)).tasks
        outcomes = [
            (done(one), done(one, keep_until=kept), dead(one, keep_until=kept), retry(one, At(NOW)),
             defer(one, At(NOW)), again(one, At(NOW)))[number % 6]
            for number, one in enumerate(held)
        ]  # fmt: skip
        assert all(await store.settle(outcomes, now=NOW + 1))
        for one in await listed(store, Filter(topic=topic, state=State.DEAD)):
            await do(store, Redrive(topic, one.key, one.id, At(NOW)), now=NOW + 1)
        for number, one in enumerate(await listed(store, Filter(topic=topic, state=State.WAITING))):
            if number % 3 == 0:
                await do(store, Cancel(topic, one.key, kept if number % 2 else 0), now=NOW + 1)
        await lease(store, 3, topic=topic, now=NOW + 1)
        while held := (await lease(store, 100, topic=topic, now=NOW + 1 + LEASE)).tasks:
            assert all(await store.settle([done(one, keep_until=kept) for one in held], now=NOW + 1 + LEASE))
    assert (await store.tally()).number(state=State.WAITING) == 0
    assert await store.announce("w", ["a"], until=NOW + HOUR, now=NOW) != {}
    assert await store.announce("w", [], until=NOW, now=NOW) == {}
    while await store.purge(now=kept, limit=10):
        pass
    left = {name: ends for name, ends in servers.keys().items() if redis_namespace in name}
    lasting = {name for name, ends in left.items() if ends == -1}
    assert lasting == {f"{{{redis_namespace}}}:layout", f"{{{redis_namespace}:0}}:n", f"{{{redis_namespace}:1}}:n"}
    assert all(":a:" in name and 0 < ends <= 600_000 for name, ends in left.items() if name not in lasting)


@pytest.mark.parametrize(("version", "advice"), [(2, "upgrade bide"), (0, "older bide")])
async def test_a_client_of_another_layout_is_refused(
    redis_server: StartsRedis, open_store: OpensStore, version: int, advice: str
) -> None:
    server = redis_server()
    await open_store(server.url, namespace="ns")
    server.ask("HSET", "{ns}:layout", "version", version)
    with pytest.raises(StoreMismatch, match=advice):
        await open_store(server.url, namespace="ns")


async def test_two_namespaces_share_nothing(redis_url: str, redis_namespace: str, open_store: OpensStore) -> None:
    """Not even where one's name begins like the other's."""
    one = await open_store(redis_url, namespace=redis_namespace)
    other = await open_store(redis_url, namespace=f"{redis_namespace}.1")
    heard: list[str] = []
    await other.listen(["t"], lambda topic, wake: heard.append(topic))
    await put(one, new(group="g", due=In(0)))
    await one.announce("w", ["t"], until=10**15, now=0)
    assert (await lease(other, 1)).tasks == []
    assert await listed(other, Filter(group="g")) == []
    assert (await other.tally()).number() == 0
    assert await other.announce("v", ["t"], until=10**15, now=0) == {"v": ["t"]}
    held = await take(one)
    assert not await settle(other, done(held))
    assert await settle(one, done(held))
    assert heard == []


async def test_twenty_clients_open_a_new_namespace_at_once(redis_url: str, redis_namespace: str) -> None:
    """They agree on whose number of shards it is; those that asked for another are refused."""
    stores = [RedisStore(f"{redis_url}?namespace={redis_namespace}&shards={4 + one % 2}") for one in range(20)]
    results = await asyncio.gather(*(store.open() for store in stores), return_exceptions=True)
    refused = [one for one in results if one is not None]
    assert len(refused) == 10
    assert all(isinstance(one, StoreMismatch) for one in refused)
    assert len({str(one) for one in refused}) == 1, "by the same number"
    same = RedisStore(f"{redis_url}?namespace={redis_namespace}")
    await same.open()
    [shards] = {store._open().layout.shards for store in stores if store._opened is not None}
    assert same._open().layout.shards == shards, "who does not say takes what there is"
    await same.close()
    for store in stores:
        await store.close()


async def test_a_layout_that_was_only_half_written_is_completed(
    redis_server: StartsRedis, open_store: OpensStore
) -> None:
    """By a client that died between the two."""
    server = redis_server()
    server.ask("HSET", "{ns}:layout", "version", 1)
    store = await open_store(server.url, namespace="ns", query="&shards=3")
    assert store._open().layout.shards == 3
