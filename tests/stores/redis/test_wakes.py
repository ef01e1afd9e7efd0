"""The subscription that tells of wakes: it dies in every way there is, is replaced, and nothing waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.stores.redis.proxies import Proxies
from tests.waiting import PATIENCE, pause, until

from bide import Bide, Task
from bide.core.instants import In
from bide.core.records import Cancel
from bide.stores.redis import RedisStore
from bide.stores.redis.wakes import Subscriptions
from bide.testing.proxy import Act, Chunk
from bide.testing.store_suite.base import new
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import Connection


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

    subscriptions(store)._when = when
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
    sharded = opened.server.cluster and opened.server.shards_channels
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


async def test_losing_every_wake_costs_no_task(proxies: Proxies, shared_url: str, redis_namespace: str) -> None:
    """The worker's subscription hears nothing at all; what others schedule is found by asking."""
    proxies.watch(lambda chunk: Act.HOLD if b"SUBSCRIBE" in chunk.data else Act.FORWARD)
    teller = Bide(f"{shared_url}?namespace={redis_namespace}")
    deaf = RedisStore(f"{proxies.url}?namespace={redis_namespace}", silence=2.0)
    worker = Bide(deaf)
    done: set[str] = set()

    @worker.handler("work")
    async def work(task: Task[None]) -> None:
        done.add(task.key)

    async with teller, worker, worker.worker():
        for number in range(10):
            await teller.schedule("work", None, key=f"{number}", delay="10ms")
            await pause(0.05, why="some come while the worker sleeps")
        await until(lambda: len(done) == 10, "all tasks")
        assert [one for one in subscriptions(deaf)._subscribers if one._open.is_set()] == [], "the wakes were lost"


async def test_who_looks_in_between_comes_again_in_time(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was not asked for then is as old as it was: sleeping for a second more, nobody asks for two."""
    store, elapsed = await open_store(shared_url), 0.0
    monkeypatch.setattr("bide.stores.redis.leasing.steady", SimpleNamespace(monotonic=lambda: elapsed))
    monkeypatch.setattr(store._open().leaser, "_now", lambda now: 1_000_000)

    async def look(*topics: str) -> int | None:
        """In how many milliseconds to come again."""
        leased = await store.lease(dict.fromkeys(topics, 1), now=0, until=1_000, holder="w")
        return None if leased.again_by is None else leased.again_by - leased.now

    assert await look("early") is None, "all was asked for just now"
    elapsed = 0.3
    assert await look("early", "late") == pytest.approx(650, abs=3)
    elapsed = 0.9
    assert await look("early", "late") == pytest.approx(50, abs=3)
    elapsed = 0.96
    assert await look("early", "late") is None, "those half as old were asked for along with them"
    elapsed = 5.0
    assert await look("early", "late") is None
