"""What servers say when they cannot just now, or when somebody else is to be asked: the store goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, slot_of
from tests.stores.redis.load import Load
from tests.waiting import PATIENCE, pause, until, wait_until

from bide.core.errors import StoreUnavailable
from bide.core.instants import In
from bide.testing.store_suite.base import new
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import RedisServer, Refused
from bide_proofs.servers.redis_replicas import ClusterNode, RedisCluster


def went_well(load: Load) -> None:
    assert (load.lost, load.again, load.early, load.errors) == (set(), [], [], {}), load.report()


async def test_the_scripts_are_thrown_away_again_and_again(servers: Servers, open_store: OpensStore) -> None:
    async with Load(await open_store(servers.url)) as load:
        for _ in range(20 if servers.deployment == "single" else 10):
            await load.more(10)
            servers.ask("SCRIPT", "FLUSH")
        await load.more(10)
    went_well(load)


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_connections_are_killed_again_and_again(servers: Servers, open_store: OpensStore, kind: str) -> None:
    """Those of the Sentinels too, to the master and to themselves."""
    stores = [await open_store(servers.url) for _ in range(2)]
    for store in stores:
        await store.listen(["t"], lambda topic, wake: None)
    with servers.patient():
        async with Load(*stores) as load:
            for _ in range(10 if servers.deployment == "single" else 5):
                await load.more(50)
                for one in (*servers.masters, *servers.sentinels):
                    one.ask("CLIENT", "KILL", "TYPE", kind)
            await load.more(50)
    went_well(load)
    if kind == "pubsub":
        assert load.resent == 0


# Under Sentinel and in a Cluster nobody makes a master a replica and then a master again: another is made, see below.
@pytest.mark.parametrize("deployment", ["single"])
async def test_a_server_that_may_only_be_read_for_a_while(servers: Servers, open_store: OpensStore) -> None:
    """READONLY: it was made a replica, and is made a master again."""
    async with Load(await open_store(servers.url)) as load:
        await load.more(50)
        servers.ask("REPLICAOF", HOST, 1)
        await load.noticed()
        servers.ask("REPLICAOF", "NO", "ONE")
        await load.more(50)
    went_well(load)


@pytest.mark.parametrize("deployment", ["single"])  # elsewhere there is another server to ask
async def test_a_server_that_stays_read_only_is_unavailable(servers: Servers, open_store: OpensStore) -> None:
    """Nothing was done, and it is known that nothing was done."""
    store = await open_store(servers.url, patience=0.3)
    servers.ask("REPLICAOF", HOST, 1)
    try:
        with pytest.raises(StoreUnavailable, match="read only"):
            await store.add([new()], now=0)
    finally:
        servers.ask("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"])  # a single server has no replica to change places with
async def test_a_master_and_its_replica_change_places(servers: Servers, open_store: OpensStore) -> None:
    """As for an upgrade: the old master lives on, refuses or redirects, and has connections to it."""
    stores = [await open_store(servers.url) for _ in range(2)]
    async with Load(*stores) as load:
        await load.more(50)
        await asyncio.to_thread(servers.change_places)
        await load.more(50)
    await asyncio.to_thread(servers.await_whole)
    assert (load.early, load.errors) == ([], {}), load.report()
    if servers.deployment == "cluster":  # where the old one stops first; a Sentinel's goes on until it is told
        assert (load.lost, load.again) == (set(), []), load.report()


@contextmanager
def configured(server: RedisServer, line: str) -> Iterator[None]:
    """Add the line to its configuration for a start inside."""
    before = server.configuration.read_text(encoding="utf-8")
    server.configuration.write_text(f"{before}{line}\n", encoding="utf-8")
    try:
        yield
    finally:
        server.configuration.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("deployment", ["single"])  # whoever asks for it waits, wherever it is
async def test_a_server_that_still_loads_its_data(servers: Servers, open_store: OpensStore) -> None:
    """LOADING: it answers, and is not ready yet."""
    [server] = servers.masters
    await asyncio.to_thread(server.forget_history)  # else it loads what other tests did, too
    store = await open_store(servers.url)
    for first in range(0, 2_000, 10):
        await store.add([new(f"{first + number}", due=In(0)) for number in range(10)], now=0)
    await asyncio.to_thread(server.kill)
    try:
        with configured(server, "key-load-delay 1000"):  # so that it takes long; it listens a second apart
            server.launch()
            await asyncio.to_thread(wait_until, lambda: is_loading(server), "it to load", passes=(OSError, Refused))
        adding = asyncio.create_task(store.add([new(f"after-{number}") for number in range(30)], now=0))
        await until(lambda: store._open().clients["add"].resent > 0, "a call to be refused")
        await asyncio.to_thread(server.ask, "CONFIG", "SET", "key-load-delay", 0)
        assert all(answer.ok for answer in await adding)
    finally:
        await asyncio.to_thread(server.await_ready)
    assert (await store.tally()).number() == 2_030


def is_loading(server: RedisServer) -> bool:
    try:
        server.ask("DBSIZE")
    except Refused as refused:
        return "LOADING" in str(refused)
    return False


in_a_cluster = pytest.mark.parametrize("deployment", ["cluster"])  # elsewhere there are no slots


def migrate(source: ClusterNode, target: ClusterNode, slot: int) -> None:
    """Every key that is there now."""
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
        assert isinstance(keys, list)
        source.ask("MIGRATE", HOST, target.port, "", 0, 5_000, "KEYS", *(str(key) for key in keys))


@in_a_cluster
async def test_a_slot_moves_to_another_server_under_load(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """ASK, TRYAGAIN while it moves, and MOVED when it has."""
    stores = [await open_store(lasting_cluster.url) for _ in range(2)]
    slots = {slot_of(lasting_cluster, stores[0], shard) for shard in range(4)}
    async with Load(*stores) as load:
        for slot in sorted(slots):
            source = master_of(lasting_cluster, slot)
            target = next(node for node in lasting_cluster.masters if node is not source)
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
            for _ in range(2):  # until it has moved the load may be held up, so that nothing more of it is waited for
                await pause(0.1, why="calls meet the slot on its way")
                await asyncio.to_thread(migrate, source, target, slot)
            for node in (target, source):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
            await load.more(30)
        await load.more(30)
    went_well(load)


@in_a_cluster
async def test_a_slot_that_nobody_serves_for_a_while(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """CLUSTERDOWN for its tasks, and for those of no other slot."""
    store = await open_store(lasting_cluster.url)
    slot = slot_of(lasting_cluster, store, 0)
    owner = master_of(lasting_cluster, slot)
    async with Load(store) as load:
        await load.more(50)
        for node in lasting_cluster.masters:
            node.ask("CLUSTER", "DELSLOTS", slot)
        await load.noticed()
        owner.ask("CLUSTER", "ADDSLOTS", slot)
        await load.more(50)
    went_well(load)


@in_a_cluster
async def test_servers_that_send_a_call_to_each_other_without_end(
    lasting_cluster: RedisCluster, open_store: OpensStore
) -> None:
    """ASK and MOVED in turn, of a slot on its way to a server that knows nothing of it: `patience` counts here, too."""
    store = await open_store(lasting_cluster.url, patience=1.0)
    slot = slot_of(lasting_cluster, store, store._open().layout.shard_of("t", "k"))
    source = master_of(lasting_cluster, slot)
    target = next(node for node in lasting_cluster.masters if node is not source)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnavailable, match=r"ASK|MOVED"):
                await store.add([new("k")], now=0)
    finally:
        source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
    assert store._open().clients["add"].resent < 30, "it asks at a measured pace"
    [answer] = await store.add([new("k")], now=0)
    assert answer.ok
