"""A replica takes over, the server's clock jumps, notifications are lost: nothing else is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
from tests.servers.fixtures import not_installed, running
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, patient, slot_of
from tests.stores.redis.load import Load
from tests.stores.redis.proxies import Proxies
from tests.waiting import PATIENCE, not_before, pause, until

from bide import Bide, Task
from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import In
from bide.core.records import Cancel, Record
from bide.stores.redis import RedisStore
from bide.stores.redis.wakes import Subscriptions
from bide.testing.proxy import Act, Chunk
from bide.testing.store_suite.base import MINUTE, keys, new
from bide_proofs.servers.process import HOST, ServerMissing
from bide_proofs.servers.redis import Connection
from bide_proofs.servers.redis_replicas import ClusterNode, RedisCluster
from bide_proofs.servers.server import ServerClock

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


def subscriptions(store: RedisStore) -> Subscriptions:
    return store._open().subscriptions


async def hears_of_every_shard(store: RedisStore, teller: RedisStore) -> None:
    """What was told while a subscription was being replaced is told anew; nobody asks for it."""
    layout = teller._open().layout
    keys: dict[int, str] = {}
    for number in range(20 * layout.shards):
        keys.setdefault(layout.shard_of("told", f"{number}"), f"{number}")
    heard: set[int] = set()

    def when(shard: int, topic: str, wake: int) -> int:
        heard.add(shard)
        return wake

    async def told_of_all() -> bool:
        left = keys.keys() - heard
        await teller.add([new(keys[shard], topic="told", due=In(-60_000)) for shard in left], now=0)
        await pause(0.05, why="wakes are on their way")
        await teller.change([Cancel("told", keys[shard]) for shard in left], now=0)  # so that the next are heads again
        return heard == keys.keys()

    store._open().leaser.note_wake = when  # type: ignore[method-assign]
    listening = await store.listen(["told"], lambda topic, wake: None)
    try:
        await until(told_of_all, "every shard to be heard of")
    finally:
        await listening.close()


@pytest.fixture
def seldom_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscription is replaced for what is done to it, and not because this machine is slow."""
    monkeypatch.setattr("bide.stores.redis.wakes.ECHO_EVERY", PATIENCE)


def subscribers(store: RedisStore) -> int:
    return len(subscriptions(store)._subscribers)


@pytest.mark.usefixtures("seldom_echoes")
async def test_a_subscription_that_was_cut_off_is_replaced(servers: Servers, open_store: OpensStore) -> None:
    store, teller = await open_store(servers.url), await open_store(servers.url)
    await hears_of_every_shard(store, teller)
    for count in (1, 2, 3):
        servers.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda count=count: subscriptions(store).replaced == count * subscribers(store), "being replaced")  # type: ignore[misc]
        await hears_of_every_shard(store, teller)


async def test_a_subscription_that_fell_silent_is_found_and_replaced(
    proxies: Proxies, shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-open: nobody says that it is of no use any more, but it does not hear itself."""
    monkeypatch.setattr("bide.stores.redis.wakes.ECHO_EVERY", 0.3)
    store, teller = await open_store(proxies.url), await open_store(shared_url)
    await hears_of_every_shard(store, teller)
    deaf: set[int] = set()

    def to_the_subscriber(chunk: Chunk) -> Act:
        if b"message" in chunk.data and not deaf:
            deaf.add(chunk.connection)
        return Act.HOLD if chunk.connection in deaf else Act.FORWARD

    proxies.watch(to_the_subscriber)
    await until(lambda: bool(deaf), "the next echo")
    before = subscriptions(store).replaced
    await until(lambda: subscriptions(store).replaced > before, "being replaced")
    monkeypatch.setattr("bide.stores.redis.wakes.ECHO_EVERY", 2.0)
    await hears_of_every_shard(store, teller)


@pytest.mark.usefixtures("seldom_echoes")
async def test_what_is_told_while_it_subscribes_does_not_end_it(shared_url: str, open_store: OpensStore) -> None:
    """Between the two subscriptions of a subscriber there may be wakes already, on a busy server most often."""
    stores = [await open_store(shared_url) for _ in range(4)]
    command, channel = telling(stores[0], 0)
    connection = await stores[0]._open().topology.connection(0)
    over = False

    def flood() -> None:
        with Connection(HOST, int(connection.name.rpartition(":")[2])) as loud:
            while not over:
                loud.ask("EVAL", "for _ = 1, 50 do redis.call(ARGV[1], KEYS[1], '0 1 told') end", 1, channel, command)

    flooding = asyncio.get_running_loop().run_in_executor(None, flood)
    try:
        for store in stores:
            await store.listen(["t"], lambda topic, wake: None)
            await pause(0.02, why="the flood goes on")
    finally:
        over = True
        await flooding
    assert [subscriptions(store).replaced for store in stores] == [0] * len(stores)


def telling(store: RedisStore, shard: int) -> tuple[str, str]:
    """The command, and the channel on which wakes of `shard` are told."""
    opened = store._open()
    sharded = opened.server.cluster and opened.server.is_modern
    channel = opened.layout.wake_channel(shard if sharded else None)
    return "SPUBLISH" if sharded else "PUBLISH", channel.decode()


@pytest.mark.usefixtures("seldom_echoes")
async def test_what_is_no_wake_is_passed_over(shared_url: str, open_store: OpensStore) -> None:
    store, teller = await open_store(shared_url), await open_store(shared_url)
    await hears_of_every_shard(store, teller)
    connection = await teller._open().topology.connection(3)
    for words in ("", "x", "1 2", "99 1 told", "-1 x told"):
        [reply] = await connection.ask([(*telling(teller, 3), words)])
        assert reply == 1, "it is heard"
    await hears_of_every_shard(store, teller)
    assert subscriptions(store).replaced == 0


async def test_who_looks_in_between_comes_again_in_time(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that reads no heads does not make them newer."""
    store, elapsed = await open_store(shared_url), 0.0
    monkeypatch.setattr("bide.stores.redis.leasing.steady", SimpleNamespace(monotonic=lambda: elapsed))
    monkeypatch.setattr(store._open().leaser, "_now", lambda now: 1_000_000)

    async def look(*topics: str) -> int | None:
        """In how many milliseconds to come again."""
        leased = await store.lease(dict.fromkeys(topics, 1), now=0, until=1_000, holder="w")
        return None if leased.again_by is None else leased.again_by - leased.now

    assert await look("t") is None, "all was read just now"
    elapsed = 0.3
    assert await look("t") == pytest.approx(650, abs=3)
    elapsed = 0.9
    assert await look("t") == pytest.approx(50, abs=3)
    assert await look("t", "new") is None, "the heads of a new topic are not known yet"
    elapsed = 0.96
    assert await look("early", "late") is None, "those half as old were asked for along with them"
    elapsed = 5.0
    assert await look("early", "late") is None


HOUR = 3_600
MILLISECOND = 0.001
"""Which is what servers count in. Both in seconds."""


class Watched:
    """An app with a worker that notes which keys were delivered."""

    def __init__(self, url: str) -> None:
        self.app = Bide(RedisStore(url))
        self.at: dict[str, float] = {}

        @self.app.handler("work")
        async def work(task: Task[None]) -> None:
            self.at[task.key] = time.monotonic()

    async def keeps(self, key: str, delay: float) -> None:
        """Schedule `key` and wait for it: it comes, and not before its time by the steady clock."""
        began = time.monotonic()
        await self.app.schedule("work", None, key=key, delay=f"{int(delay * 1000)}ms")
        await until(lambda: key in self.at, key)
        not_before(self.at[key], began + delay - MILLISECOND, key)

    async def goes_by(self, store: RedisStore) -> None:
        """The app's clock is that of the server, which is hours off."""
        assert abs(self.app.clock.now() - await store.time()) < MINUTE


@pytest.fixture(scope="module")
def start_shifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Servers, ServerClock]]]:
    """Servers of a deployment that go by a clock which can be set, the Sentinels by the machine's; for all tests here.

    All of a Cluster's go by the same one: each shard goes by its own node's (docs/redis.md, Clocks).
    """
    with ExitStack() as stack:
        started: dict[str, tuple[Servers, ServerClock]] = {}

        def start(deployment: str) -> tuple[Servers, ServerClock]:
            if deployment not in started:
                folder = tmp_path_factory.mktemp(f"shifted-{deployment}")
                try:
                    clock = ServerClock()
                except ServerMissing as error:
                    not_installed(error)
                servers = Servers(deployment, folder / "servers", clock=clock)
                stack.enter_context(running(servers.running))
                stack.enter_context(servers.patient())  # nodes whose clock was set take the others for dead
                started[deployment] = servers, clock
            return started[deployment]

        yield start


@pytest.fixture
def shifted(
    deployment: str, start_shifted: Callable[[str], tuple[Servers, ServerClock]]
) -> Iterator[tuple[Servers, ServerClock]]:
    servers, clock = start_shifted(deployment)
    yield servers, clock
    clock.shift(0)


@pytest.mark.parametrize("off", [-5 * HOUR, 5 * HOUR], ids=["behind", "ahead"])
async def test_a_server_that_is_hours_off_and_whose_clock_is_set_while_it_runs(
    shifted: tuple[Servers, ServerClock], redis_namespace: str, open_store: OpensStore, off: int
) -> None:
    """Ahead: what lay within the hour is due. Back: what waits has longer to wait. New delays are right at once."""
    servers, clock = shifted
    clock.shift(off)
    watched = Watched(f"{servers.url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        await watched.goes_by(await open_store(servers.url))
        await watched.keeps("before", 0.05)
        await watched.app.schedule("work", None, key="half an hour", delay="30m")
        clock.shift(off + HOUR)
        await until(lambda: "half an hour" in watched.at, "what is due by the clock that was set")
        await watched.keeps("ahead", 0.1)
        await watched.app.schedule("work", None, key="later", delay="10m")
        clock.shift(off)
        await watched.keeps("back", 0.1)
        await watched.keeps("and again", 0.1)
        assert "later" not in watched.at, "an hour and a bit from now, by the server's clock"
        clock.shift(off + HOUR + 1_200)
        await until(lambda: "later" in watched.at, "the last")


@pytest.mark.parametrize("off", [-9 * HOUR, 9 * HOUR], ids=["behind", "ahead"])
async def test_a_client_whose_clock_is_hours_wrong_is_neither_early_nor_late(
    shared_url: str, redis_namespace: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    right = await open_store(shared_url)
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + off)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + off * 10**9)
    watched = Watched(f"{shared_url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        await watched.keeps("own", 0.1)
        began = time.monotonic()
        await right.add([new("other", topic="work", due=In(100), payload=b"null")], now=0)
        await until(lambda: "other" in watched.at, "what another client scheduled")
        not_before(watched.at["other"], began + 0.1 - MILLISECOND, "what another client scheduled")
        await watched.goes_by(right)
