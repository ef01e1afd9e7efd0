"""No connection is left open, however a store is opened, used and closed; `made_connections` looks after every test."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, patient, slot_of
from tests.waiting import forever, until

from bide.core.instants import In
from bide.stores.redis import RedisStore
from bide.stores.redis.topology import NotSent, SharedConnection
from bide.testing.store_suite.base import new
from bide_proofs.servers.redis_replicas import RedisCluster


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
