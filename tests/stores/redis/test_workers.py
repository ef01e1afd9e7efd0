"""Workers on Redis: what they see of each other, and how they end: closed, killed, left."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, patient, slot_of
from tests.stores.redis.load import Load
from tests.waiting import PATIENCE, forever, pause, until

from bide import Bide, Task
from bide.core.errors import StoreError
from bide.core.instants import In
from bide.core.records import OutcomeKind, Record, Settlement
from bide.engine.delivery.worker import Worker
from bide.stores.redis import RedisStore
from bide.stores.redis.topology import SharedConnection
from bide.stores.resending import NotSent
from bide.testing.store_suite.base import keys, lease, new
from bide_proofs.servers.redis_replicas import RedisCluster


class Crew:
    """Workers, each with an app and connections of its own, and what they did."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.done: Counter[str] = Counter()
        self.by: Counter[int] = Counter()
        self._running: list[AsyncExitStack] = []
        self._numbers = count()

    async def hire(
        self, topics: Sequence[str], *, concurrency: int = 10, until_set: asyncio.Event | None = None
    ) -> Worker:
        app = Bide(RedisStore(self.url), concurrency=concurrency, keep_done="0s")
        number = next(self._numbers)

        async def work(task: Task[Any]) -> None:
            self.done[f"{task.topic}/{task.key}"] += 1
            self.by[number] += 1
            if until_set is not None:
                await until_set.wait()

        for topic in topics:
            app.handler(topic)(work)
        stack = AsyncExitStack()
        await stack.enter_async_context(app)
        worker = await stack.enter_async_context(app.worker(name=f"worker-{number}"))
        self._running.append(stack)
        return worker

    async def change_to(self, size: int, kinds: Sequence[Sequence[str]]) -> None:
        """The newest stay. Of those who come the first works on everything, so that no topic is without a worker."""
        there = len(self._running)
        await asyncio.gather(*(self.hire(kinds[one % len(kinds)]) for one in range(max(1, size - there))))
        await self.dismiss(len(self._running) - size)

    async def dismiss(self, number: int) -> None:
        leaving, self._running = self._running[:number], self._running[number:]
        await asyncio.gather(*(one.aclose() for one in leaving))

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.dismiss(len(self._running))


@pytest.fixture
def url(shared_url: str, redis_namespace: str) -> str:
    return f"{shared_url}?namespace={redis_namespace}"


async def test_workers_come_and_go_and_every_task_is_done_once(url: str) -> None:
    """1, 5, 2, 10 and 1 workers, of different topics, under a steady load: nobody starves while they change."""
    kinds = [["a", "b", "c"], ["a"], ["b", "c"]]
    expected: list[str] = []
    stopping = False

    async def schedule() -> None:
        while not stopping:
            number = len(expected)
            topic = "abc"[number % 3]
            expected.append(f"{topic}/{number}")
            await client.schedule(topic, None, key=f"{number}", delay="30ms")
            await pause(0.005, why="the pace of the load")

    async with Bide(url) as client, Crew(url) as crew:
        await crew.hire(kinds[0])
        scheduling = asyncio.create_task(schedule())
        for size in (5, 2, 10, 1):
            enough = len(crew.done) + 50
            await until(lambda enough=enough: len(crew.done) >= enough, "some of the load")  # type: ignore[misc]
            await crew.change_to(size, kinds)
        await crew.hire(kinds[0])
        stopping = True
        await scheduling
        await until(lambda: len(crew.done) == len(expected), "all of them")
        assert len(crew.by) > 2, "the work is shared"
        await crew.dismiss(2)
        assert (await client.tally()).number() == 0
    assert sorted(crew.done) == sorted(expected)
    assert set(crew.done.values()) == {1}


async def test_others_take_what_a_busy_worker_cannot(url: str) -> None:
    """Its slots are taken, so its shards are served by whoever has room, once the head is 50 ms overdue."""
    async with Bide(url) as client, Crew(url) as crew:
        over = asyncio.Event()
        busy = await crew.hire(["t"], concurrency=1, until_set=over)
        await client.schedule("t", None, key="long", delay="0s")
        try:
            await until(lambda: crew.done["t/long"] == 1, "the long one to begin")
            await crew.hire(["t"])
            for number in range(60):
                await client.schedule("t", None, key=f"{number}", delay="5ms")
            await until(lambda: len(crew.done) == 61, "all of them")
            assert busy.stats.leased == 1
        finally:
            over.set()


async def test_a_worker_that_stands_still_for_longer_than_its_lease(url: str, root: Path) -> None:
    """What it held is done by another; when it goes on, what is done is not delivered, and nothing is lost.

    One that stood still while its lease was on its way gives back what it gets, without a delivery: that is no end.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.stores.redis.stopped_worker", url, "500ms",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=root,
    )  # fmt: skip
    tokens: dict[str, dict[str, list[int]]] = {what: defaultdict(list) for what in ("ready", "delivered", "done")}
    theirs: set[str] = set()
    numbers = count()

    async def read() -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            what, key, token = line.decode().split()
            tokens[what][key].append(int(token))
            theirs.add(key)

    reading = asyncio.create_task(read())
    app = Bide(RedisStore(url), lease="500ms", keep_done="0s")

    @app.handler("work", losses=1_000)
    async def work(task: Task[None]) -> None:
        tokens["delivered"][task.key].append(task.record.token)
        await pause(0.02, why="there is something to interrupt")

    def observe(record: Record, settlement: Settlement) -> None:
        if settlement.outcome is OutcomeKind.DONE:
            tokens["done"][record.key].append(record.token)

    async def schedule() -> None:
        await app.schedule("work", None, key=f"{next(numbers)}", delay="10ms")
        await pause(0.002, why="the pace of the load")

    async def nothing_is_left() -> bool:
        return (await app.tally()).number() == 0

    try:
        async with app, app.worker(observe=observe):
            await until(lambda: bool(tokens["ready"]), "the other process")
            for _ in range(3):
                before = len(theirs)
                async with asyncio.timeout(PATIENCE):
                    while len(theirs) == before:
                        await schedule()
                child.send_signal(signal.SIGSTOP)
                for _ in range(50):
                    await schedule()
                await until(nothing_is_left, "what it held to be done by the other")
                child.send_signal(signal.SIGCONT)
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.wait_for(child.wait(), PATIENCE)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await reading
    assert set(tokens["done"]) == {f"{number}" for number in range(next(numbers))}
    assert {key for key, ended in tokens["done"].items() if len(ended) > 1} == set(), "done twice"
    late = [key for key, [ended] in tokens["done"].items() if max(tokens["delivered"][key]) > ended]
    assert late == [], "delivered after it was done"


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
