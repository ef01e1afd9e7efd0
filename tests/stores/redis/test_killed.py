"""A server that is killed under load, and comes back: nothing that was acknowledged is lost, and the store goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.stores.redis.load import Load

from bide.core.errors import StoreError
from bide.core.records import In
from bide.testing.store_suite.acts import keys, lease, new

pytestmark = pytest.mark.faults


async def test_a_killed_server_loses_nothing_that_was_acknowledged(servers: Servers, open_store: OpensStore) -> None:
    """With appendfsync always. It comes back before anybody makes another master; `test_failover` is about the rest."""
    # a node of a Cluster that comes back lets 2 s go by before it serves
    times = {"single": 3, "sentinel": 2, "cluster": 1}[servers.deployment]
    stores = [await open_store(servers.url, silence=1.0) for _ in range(2)]
    with servers.patient():
        async with Load(*stores, least=101) as load:
            for _ in range(times):
                await asyncio.sleep(0.4)
                master = servers.masters[0]
                await asyncio.to_thread(master.kill)
                await asyncio.sleep(0.1)
                await asyncio.to_thread(master.start)
                await asyncio.to_thread(servers.await_whole)
            await asyncio.sleep(0.4)
    assert len(load.acknowledged) > 100, "there was a load"
    assert load.lost == set()
    assert load.again == []
    assert load.early == []
    assert load.errors == {}, f"the store goes on by itself: {load.report()}"
    assert load.gap < (4.5 if servers.deployment == "cluster" else 2.0)


async def test_a_server_that_stands_still_is_waited_for(servers: Servers, open_store: OpensStore) -> None:
    """Stopped in the middle of whatever it does for longer than `silence`, and going on as if nothing had been."""
    stores = [await open_store(servers.url, silence=0.2) for _ in range(2)]
    with servers.patient():
        async with Load(*stores) as load:
            await asyncio.sleep(0.3)
            master = servers.masters[0]
            master.pause()
            await asyncio.sleep(0.7)
            master.resume()
            await asyncio.sleep(0.3)
    assert (load.lost, load.again, load.early, load.errors) == (set(), [], [], {}), load.report()
    assert load.gap < 2.5


async def test_a_call_that_the_server_does_not_even_read_is_given_up(servers: Servers, open_store: OpensStore) -> None:
    """More than the buffers on the way take: the call does not hang in the middle of its own sending."""
    store = await open_store(servers.url, silence=0.2, patience=0.5)
    with servers.patient():
        masters = servers.masters
        for master in masters:
            master.pause()
        tasks = [new(f"{number}", due=In(0), payload=b"x" * 500_000) for number in range(60)]
        try:
            async with asyncio.timeout(5):
                with pytest.raises(StoreError):
                    await store.add(tasks, now=0)
        finally:
            for master in masters:
                master.resume()
        await store.add([new("after", due=In(-1_000_000))], now=0)
        assert "after" in keys((await lease(store, 100)).tasks)
