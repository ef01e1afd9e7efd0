"""A server that is killed under load, and comes back: nothing that was acknowledged is lost, and the store goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.load import Load

from bide.core.errors import StoreError
from bide.core.records import In
from bide.testing.store_suite.acts import keys, lease, new

pytestmark = pytest.mark.faults


async def test_a_killed_server_loses_nothing_that_was_acknowledged(
    redis_server: StartsRedis, open_store: OpensStore
) -> None:
    """With appendfsync always."""
    server = redis_server(appendfsync="always")
    stores = [await open_store(server.url, silence=1.0) for _ in range(2)]
    async with Load(*stores) as load:
        for _ in range(3):
            await asyncio.sleep(0.4)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(0.4)
    assert len(load.acknowledged) > 100, "there was a load"
    assert load.lost == set()
    assert load.again == []
    assert load.early == []
    assert load.errors == {}, f"the store goes on by itself: {load.report()}"
    assert load.gap < 2.0


async def test_a_server_that_stands_still_is_waited_for(redis_server: StartsRedis, open_store: OpensStore) -> None:
    """Stopped in the middle of whatever it does for longer than `silence`, and going on as if nothing had been."""
    server = redis_server()
    stores = [await open_store(server.url, silence=0.2) for _ in range(2)]
    async with Load(*stores) as load:
        await asyncio.sleep(0.3)
        server.pause()
        await asyncio.sleep(1.0)
        server.resume()
        await asyncio.sleep(0.5)
    assert (load.lost, load.again, load.early, load.errors) == (set(), [], [], {}), load.report()
    assert load.gap < 2.5


async def test_a_call_that_the_server_does_not_even_read_is_given_up(
    redis_server: StartsRedis, open_store: OpensStore
) -> None:
    """More than the buffers on the way take: the call does not hang in the middle of its own sending."""
    server = redis_server()
    store = await open_store(server.url, silence=0.2, patience=0.5)
    server.pause()
    tasks = [new(f"{number}", due=In(0), payload=b"x" * 500_000) for number in range(60)]
    try:
        async with asyncio.timeout(5):
            with pytest.raises(StoreError):
                await store.add(tasks, now=0)
    finally:
        server.resume()
    await store.add([new("after", due=In(-1_000_000))], now=0)
    assert "after" in keys((await lease(store, 100)).tasks)
