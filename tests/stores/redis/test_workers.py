"""Workers on Redis: what they see of each other, and how they end: closed, killed, left."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, patient, slot_of
from tests.stores.redis.load import Load
from tests.waiting import PATIENCE, forever, until

from bide import Bide, Task
from bide.core.errors import StoreError
from bide.core.instants import In
from bide.stores.redis import RedisStore
from bide.stores.redis.topology import SharedConnection
from bide.stores.resending import NotSent
from bide.testing.store_suite.base import keys, lease, new
from bide_proofs.servers.redis_replicas import RedisCluster


@pytest.fixture
def url(shared_url: str, redis_namespace: str) -> str:
    return f"{shared_url}?namespace={redis_namespace}"


@pytest.mark.parametrize("deployment", ["single", "cluster"])  # one answers under Sentinel, too
async def test_others_take_what_a_busy_worker_cannot(url: str) -> None:
    """Its slots are taken, so its shards are served by whoever has room, once the head is 50 ms overdue."""
    done: Counter[str] = Counter()
    over = asyncio.Event()

    def worker(concurrency: int, until_set: asyncio.Event | None = None) -> Bide:
        app = Bide(RedisStore(url), concurrency=concurrency)

        @app.handler("t")
        async def work(task: Task[None]) -> None:
            done[task.key] += 1
            if until_set is not None:
                await until_set.wait()

        return app

    async with worker(1, over) as one, one.worker() as busy:
        await one.schedule("t", None, key="long", delay="0s")
        await until(lambda: done["long"] == 1, "the long one to begin")
        async with worker(10) as other, other.worker():
            for number in range(60):
                await one.schedule("t", None, key=f"{number}", delay="5ms")
            await until(lambda: len(done) == 61, "all of them")
            assert busy.stats.leased == 1
        over.set()
    assert set(done.values()) == {1}


async def some_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_open_that_is_cancelled_anywhere(shared_url: str, redis_namespace: str) -> None:
    for turns in range(0, 400, 20):
        store = RedisStore(f"{shared_url}?namespace={redis_namespace}")
        opening = asyncio.create_task(store.open())
        await some_turns(turns)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await store.close()


async def test_a_store_that_two_open_at_once(
    shared_url: str, redis_namespace: str, made_connections: list[Any]
) -> None:
    store = RedisStore(f"{shared_url}?namespace={redis_namespace}")
    await asyncio.gather(store.open(), store.open())
    await store.close()
    assert [one for one in made_connections if one.is_connected] == []


async def test_a_store_that_is_closed_while_somebody_begins_to_listen(shared_url: str, open_store: OpensStore) -> None:
    store = await open_store(shared_url)
    listening = asyncio.create_task(store.listen(["t"], lambda topic, wake: None))
    await asyncio.sleep(0)
    await store.close()
    await some_turns(5)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "bide subscriber"] == []
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"])  # a single server has no other to connect to
async def test_nobody_connects_once_the_store_is_closed(shared_url: str, open_store: OpensStore) -> None:
    """As a call that is still under way would, where there is another master by now."""
    store = await open_store(shared_url)
    topology = store._open().topology
    await store.close()
    topology._connections.clear()
    with pytest.raises(NotSent):
        await (await topology.connection(0)).ask([("PING",)])


@pytest.mark.parametrize("deployment", ["single"])  # what happens, happens to one connection
async def test_a_call_that_is_cancelled_while_it_is_written(servers: Servers, open_store: OpensStore) -> None:
    """Who comes next finds the connection broken; nobody makes another behind the link's back."""
    store = await open_store(servers.url)
    link = await store._open().topology.connection(0)
    [server] = servers.masters
    server.pause()
    try:
        large = [new(f"{number}", due=In(0), payload=b"x" * 500_000) for number in range(60)]
        adding = asyncio.create_task(store.add(large, now=0))
        await until(_more_than_it_takes(link), "the server to take no more")
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        assert not link.ready
        after = asyncio.create_task(store.add([new("after", due=In(0))], now=0))
        await some_turns(3)
    finally:
        server.resume()
    [answer] = await after
    assert answer.ok


def _more_than_it_takes(link: SharedConnection) -> Callable[[], bool]:
    def is_stuck() -> bool:
        writer = getattr(link._connection, "_writer", None)
        return writer is not None and writer.transport.get_write_buffer_size() > 0

    return is_stuck


class Slow:
    """A connection that never comes about."""

    is_closed = False

    async def connect(self) -> None:
        await forever()

    async def disconnect(self, *, nowait: bool) -> None:
        self.is_closed = True


async def test_a_caller_is_cancelled_though_the_link_is_closed_too() -> None:
    """It ends, and does not take it for a lost connection and try another."""
    connection: Any = Slow()
    link = SharedConnection("slow", lambda: connection, patience=30.0)
    asking = asyncio.create_task(link.ask([("PING",)]))
    await some_turns(3)
    asking.cancel()
    await link.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert connection.is_closed


class Refused(Slow):
    """A connection that is refused once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def connect(self) -> None:
        await self.go.wait()
        raise ConnectionRefusedError("nobody listens")


async def test_a_connection_that_is_refused_once_its_caller_has_gone() -> None:
    """Whoever asks next is told; asyncio does not report an exception that nobody has retrieved."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    connection: Any = Refused()
    link = SharedConnection("refused", lambda: connection, patience=30.0)
    asking = asyncio.create_task(link.ask([("PING",)]))
    await some_turns(3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    connection.go.set()
    await some_turns(5)
    with pytest.raises(NotSent, match="nobody listens"):
        await link.ask([("PING",)])
    del asking
    gc.collect()
    await link.close()
    assert reported == []


@pytest.mark.parametrize("deployment", ["cluster"])  # elsewhere there is no server that others do not wait for
async def test_a_close_that_is_cancelled(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """While it waits for what a slow server has leased."""
    store = await open_store(lasting_cluster.url)
    await store.add([new(f"{number}", due=In(0)) for number in range(100)], now=0)
    slow = master_of(lasting_cluster, slot_of(lasting_cluster, store, 0))
    with patient(lasting_cluster):
        slow.pause()
        try:
            await store.lease({"t": 1_000}, now=0, until=60_000, holder="w")
            closing = asyncio.create_task(store.close())
            await some_turns(5)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        finally:
            slow.resume()


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
    store = await open_store(servers.url, silence=1.0, patience=2.0)
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
