"""The subscription that tells of wakes: it dies in every way there is, is replaced, and nothing waits for it."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import pytest
from tests.servers.fixtures import StartsRedis
from tests.servers.redis_cluster import RedisCluster
from tests.servers.resp import Connection
from tests.stores.redis.conftest import OpensStore

from bide import Bide, Task
from bide.core.records import In
from bide.stores.redis import RedisStore
from bide.stores.redis.wakes import Hearing
from bide.testing.proxy import Act, Chunk, FaultProxy
from bide.testing.store_suite.acts import new, until


def hearing(store: RedisStore) -> Hearing:
    return store._open().hearing


async def heard_from(store: RedisStore, teller: RedisStore, key: str) -> bool:
    """Whether a subscriber of `store` hears within 0.2 s what `teller` schedules."""
    heard = asyncio.Event()
    listening = await store.listen(["told"], lambda topic, wake: heard.set())
    try:
        await teller.add([new(key, topic="told", due=In(-60_000))], now=0)
        async with asyncio.timeout(0.2):
            await heard.wait()
    except TimeoutError:
        return False
    finally:
        await listening.close()
        await teller.lease({"told": 100}, now=0, until=600_000, holder="w")  # so that the next is the head again
    return True


async def test_a_subscription_that_was_cut_off_is_replaced(redis_server: StartsRedis, open_store: OpensStore) -> None:
    server = redis_server()
    store, teller = await open_store(server.url), await open_store(server.url)
    assert await heard_from(store, teller, "before")
    for count in (1, 2, 3):
        server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda count=count: hearing(store).replaced == count, "being replaced")  # type: ignore[misc]
        await asyncio.sleep(0.2)
        assert await heard_from(store, teller, f"after-{count}")


async def test_a_subscription_that_fell_silent_is_found_and_replaced(
    proxy: FaultProxy, redis_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-open: nobody says that it is of no use any more, but it does not hear itself."""
    monkeypatch.setattr("bide.stores.redis.wakes.ECHO_EVERY", 0.3)
    store, teller = await open_store(f"redis://127.0.0.1:{proxy.port}/0"), await open_store(redis_url)
    assert await heard_from(store, teller, "before")
    deaf: set[int] = set()

    def to_the_subscriber(chunk: Chunk) -> Act:
        if b"message" in chunk.data and not deaf:
            deaf.add(chunk.connection)
        return Act.HOLD if chunk.connection in deaf else Act.FORWARD

    proxy.hook = to_the_subscriber
    await until(lambda: bool(deaf), "the next echo")
    began = time.monotonic()
    await until(lambda: hearing(store).replaced == 1, "being replaced")
    assert time.monotonic() - began < 1.0, "about the time between two echoes"
    await asyncio.sleep(0.2)
    assert await heard_from(store, teller, "after")


async def test_what_is_told_while_it_subscribes_does_not_end_it(redis_url: str, open_store: OpensStore) -> None:
    """Between the two subscriptions of an ear there may be wakes already, on a busy server most often."""
    stores = [await open_store(redis_url) for _ in range(10)]
    channel = stores[0]._open().layout.wake_channel().decode()
    over = False

    def flood() -> None:
        with Connection("127.0.0.1", urlsplit(redis_url).port or 0) as loud:
            while not over:
                loud.ask_all([("PUBLISH", channel, "0 1 told")] * 50)

    flooding = asyncio.get_running_loop().run_in_executor(None, flood)
    try:
        for store in stores:
            await store.listen(["t"], lambda topic, wake: None)
            await asyncio.sleep(0.02)
    finally:
        over = True
        await flooding
    assert [hearing(store).replaced for store in stores] == [0] * 10


async def test_what_is_no_wake_is_passed_over(redis_server: StartsRedis, open_store: OpensStore) -> None:
    server = redis_server()
    store, teller = await open_store(server.url), await open_store(server.url)
    assert await heard_from(store, teller, "before")
    for words in ("", "x", "1 2", "99 1 told", "-1 x told"):
        server.ask("PUBLISH", store._open().layout.wake_channel().decode(), words)
    assert await heard_from(store, teller, "after")
    assert hearing(store).replaced == 0


async def test_losing_every_wake_costs_a_second_and_no_task(
    proxy: FaultProxy, redis_url: str, redis_namespace: str, open_store: OpensStore
) -> None:
    """The worker's subscription hears nothing at all; what others schedule is found by asking."""
    proxy.hook = lambda chunk: Act.HOLD if b"SUBSCRIBE" in chunk.data else Act.FORWARD
    teller = Bide(f"{redis_url}?namespace={redis_namespace}")
    worker = Bide(RedisStore(f"redis://127.0.0.1:{proxy.port}/0?namespace={redis_namespace}", silence=0.2))
    late: dict[str, float] = {}

    @worker.handler("work")
    async def work(task: Task[None]) -> None:
        late[task.key] = (worker.clock.now() - task.record.planned_at) / 1000

    async with teller, worker, worker.worker():
        await asyncio.sleep(0.3)
        for number in range(20):
            await teller.schedule("work", None, key=f"{number}", delay="10ms")
            await asyncio.sleep(0.05)
        await until(lambda: len(late) == 20, "all tasks")
    assert max(late.values()) < 1.3
    assert max(late.values()) > 0.1, "the wakes were lost"


async def test_every_shard_of_a_cluster_is_heard_again_after_a_failover(
    redis_cluster: RedisCluster, open_store: OpensStore
) -> None:
    store, teller = await open_store(redis_cluster.url), await open_store(redis_cluster.url)
    shards = store._open().layout.shards
    heard: set[int] = set()

    def when(shard: int, topic: str, wake: int) -> int:
        heard.add(shard)
        return wake

    hearing(store)._when = when
    await store.listen(["told"], lambda topic, wake: None)

    async def tell_all(round_: int) -> None:
        heard.clear()
        keys = [f"{round_}-{number}" for number in range(200)]
        await teller.add([new(key, topic="told", due=In(0)) for key in keys], now=0)
        await until(lambda: len(heard) == shards, "every shard to be heard")
        leased = await teller.lease({"told": 1_000}, now=0, until=600_000, holder="w")
        assert len(leased.tasks) == 200, "so that the next are heads again"

    await tell_all(1)
    killed = redis_cluster.masters[0]
    await asyncio.to_thread(killed.kill)
    await asyncio.to_thread(redis_cluster.await_whole)
    await asyncio.sleep(0.5)
    await tell_all(2)
    assert hearing(store).replaced >= 1
