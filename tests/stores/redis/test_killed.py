"""A server that is killed under load, and comes back: nothing that was acknowledged is lost, and the store goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.stores.redis.load import Load
from tests.waiting import PATIENCE, until

from bide.core.errors import StoreError
from bide.core.instants import In
from bide.testing.store_suite.base import keys, lease, new


async def test_a_killed_server_loses_nothing_that_was_acknowledged(servers: Servers, open_store: OpensStore) -> None:
    """With appendfsync always. It comes back before anybody makes another master; `test_failover` is about the rest."""
    # a node of a Cluster that comes back lets 2 s go by before it serves
    times = {"single": 3, "sentinel": 2, "cluster": 1}[servers.deployment]
    stores = [await open_store(servers.url) for _ in range(2)]
    with servers.patient():
        async with Load(*stores) as load:
            for _ in range(times):
                await load.more(100)
                master = servers.masters[0]
                await asyncio.to_thread(master.kill)
                await load.noticed()
                await asyncio.to_thread(master.start)
                await asyncio.to_thread(servers.await_whole)
            await load.more(100)
    assert (load.lost, load.again, load.early) == (set(), [], [])
    assert load.errors == {}, f"the store goes on by itself: {load.report()}"


async def test_a_server_that_stands_still_is_waited_for(servers: Servers, open_store: OpensStore) -> None:
    """Stopped in the middle of whatever it does for longer than `silence`, and going on as if nothing had been."""
    stores = [await open_store(servers.url, silence=2.0) for _ in range(2)]
    with servers.patient():
        async with Load(*stores) as load:
            await load.more(50)
            master = servers.masters[0]
            master.pause()
            try:
                await load.noticed()
            finally:
                master.resume()
            await load.more(50)
    assert (load.lost, load.again, load.early, load.errors) == (set(), [], [], {}), load.report()


@pytest.mark.parametrize("deployment", ["single"])  # what happens, happens to one connection
async def test_a_call_that_the_server_does_not_even_read_is_given_up(servers: Servers, open_store: OpensStore) -> None:
    """More than the buffers on the way take: the call does not hang in the middle of its own sending."""
    store = await open_store(servers.url, silence=2.0, patience=5.0)
    [master] = servers.masters
    master.pause()
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreError):
                await store.add([new(f"{n}", due=In(0), payload=b"x" * 500_000) for n in range(60)], now=0)
    finally:
        master.resume()

    async def goes_on() -> bool:
        try:
            await store.add([new("after", due=In(-1_000_000))], now=0)
        except StoreError:
            return False
        return "after" in keys((await lease(store, 100)).tasks)

    await until(goes_on, "the next call to be answered")
