"""What a worker asks of the servers and what it holds, whom it lets wait; what a call costs, however much waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.servers.resp import Reply
from tests.servers.stalls import Stalls
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers

from bide import Bide, Task
from bide.core.records import Cancel, Filter, In, Move, Page, Ref, State
from bide.stores.redis import RedisStore
from bide.testing.store_suite.acts import HOUR, do, new, until


@pytest.fixture
def url(shared_url: str, redis_namespace: str) -> str:
    return f"{shared_url}?namespace={redis_namespace}"


async def test_a_worker_holds_only_what_it_runs(url: str) -> None:
    """P7: nothing is taken in advance, from however many servers."""
    app = Bide(RedisStore(url), concurrency=3)
    running: set[str] = set()
    go_on = asyncio.Event()

    @app.handler("t")
    async def work(task: Task[None]) -> None:
        running.add(task.key)
        await go_on.wait()

    async with app:
        for number in range(40):
            await app.schedule("t", None, key=f"{number}", delay="0s")
        async with app.worker() as worker:
            await until(lambda: len(running) == 3, "its three slots to be taken")
            await asyncio.sleep(0.2)
            tally = await app.tally()
            assert (tally.number("t", State.LEASED), tally.number("t", State.WAITING)) == (3, 37)
            go_on.set()
            await until(lambda: worker.stats.done == 40, "all of them")
        assert worker.stats.leased == 40


async def test_nobody_waits_behind_what_is_slow_strange_or_nobodys(url: str, server_stalls: Stalls) -> None:
    """P6: full slots of another topic, payloads that cannot be read, a flood that nobody works on."""
    client = Bide(RedisStore(url))
    app = Bide(RedisStore(url), concurrency=50)
    busy: set[str] = set()
    late: list[float] = []
    go_on = asyncio.Event()

    @app.handler("slow", concurrency=5)
    async def slow(task: Task[str]) -> None:
        busy.add(task.key)
        await go_on.wait()

    @app.handler("strange")
    async def strange(task: Task[int]) -> None:
        raise AssertionError("its payload is no number")

    @app.handler("quick")
    async def quick(task: Task[None]) -> None:
        late.append((app.clock.now() - task.record.planned_at) / 1_000)

    async with client, app, app.worker() as worker:
        for topic in ("slow", "strange", "nobodys"):
            for number in range(60):
                await client.schedule(topic, "text", key=f"{number}", delay="0s")
        await client.schedule("quick", None, key="far off", delay="1h")
        await until(lambda: len(busy) == 5, "the slow ones to fill their slots")
        for number in range(20):
            await client.schedule("quick", None, key=f"{number}", delay="20ms")
            await asyncio.sleep(0.005)
        await until(lambda: len(late) == 20, "the quick ones")
        assert len(busy) == 5
        assert worker.stats.leased <= 5 + 60 + 20, "nothing that is nobody's, and no more than there is room for"
        assert sorted(late)[10] < 0.1
        assert max(late) < 0.5 + server_stalls.seconds
        go_on.set()


async def test_an_idle_worker_asks_each_shard_once_a_second(servers: Servers, redis_namespace: str) -> None:
    """P8: and nothing else, whatever waits for later."""
    app = Bide(RedisStore(f"{servers.url}?namespace={redis_namespace}"))

    @app.handler("t")
    async def work(task: Task[None]) -> None: ...

    async with app:
        for number in range(200):
            await app.schedule("t", None, key=f"{number}", delay="1h")
        async with app.worker() as worker:
            await app.schedule("t", None, key="first", delay="0s")
            await until(lambda: worker.stats.done == 1, "the worker")
            await asyncio.sleep(0.1)
            before = scripts_run(servers)
            await asyncio.sleep(1.2)
            asked = scripts_run(servers) - before
    assert 16 <= asked <= 2 * 16 + 4


def scripts_run(servers: Servers) -> int:
    return sum(
        int(said.split("calls=")[1].partition(",")[0])
        for master in servers.masters
        for name, said in master.info("commandstats").items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    )


FEW, MANY = 100, 10_000
TRIES = 10


async def test_a_call_costs_the_same_however_much_waits(servers: Servers, open_store: OpensStore) -> None:
    """P11: in the server's own microseconds, with a hundred times as much in the same shard, half of it due."""
    store = await open_store(servers.url, query="&shards=1")
    with servers.set_up(slowlog_log_slower_than=0, slowlog_max_len=1_000):
        await fill(store, 0, FEW)
        little = await costs(servers, store, "few")
        await fill(store, FEW, MANY)
        much = await costs(servers, store, "many")
    assert min(little.values()) > 0, "all of them were seen"
    # O(n) would be a hundred times as much, or milliseconds where there is a constant part
    assert {name: (little[name], cost) for name, cost in much.items() if cost > 3 * little[name] + 100} == {}


async def fill(store: RedisStore, first: int, count: int) -> None:
    """What waits for later, and what is due and nobody works on."""
    for start in range(first, count, 500):
        numbers = range(start, min(start + 500, count))
        later = [new(f"{number}", due=In(24 * HOUR + number), group="g") for number in numbers]
        due = [new(f"{number}", topic="nobodys", due=In(0)) for number in numbers]
        await store.add(later + due, now=0)


async def costs(servers: Servers, store: RedisStore, name: str) -> dict[str, int]:
    """Of each kind of call, the least in microseconds: whatever else the machine does only ever adds."""
    calls: dict[str, Callable[[str], Awaitable[object]]] = {
        "schedule": lambda key: store.add([new(key, due=In(HOUR), group="g")], now=0),
        "get": lambda key: store.get([Ref("t", key)]),
        "move": lambda key: do(store, Move("t", key, In(2 * HOUR)), now=0),
        "fire now": lambda key: do(store, Move("t", key, In(0)), now=0),
        "lease": lambda key: store.lease({"t": 1}, now=0, until=60_000, holder="w"),
        "cancel": lambda key: do(store, Cancel("t", key), now=0),
        "page by time": lambda key: store.find(Filter(topic="t", state=State.WAITING), Page(limit=10)),
        "page of a group": lambda key: store.find(Filter(group="g"), Page(limit=10)),
    }
    least: dict[str, int] = {}
    for number in range(TRIES):
        for kind, call in calls.items():
            servers.ask("SLOWLOG", "RESET")
            await call(f"{name}-{number}")
            cost = sum(spent(reply) for reply in servers.ask("SLOWLOG", "GET", 100))
            least[kind] = min(cost, least.get(kind, cost))
    return least


_OTHERS = ("SLOWLOG", "CONFIG", "PING", "INFO", "PUBLISH", "REPLCONF", "CLUSTER", "CLIENT")
"""What the test itself and the Sentinels ask."""


def spent(log: Reply) -> int:
    """The microseconds of what a server did for the store, begun ones counted."""
    assert isinstance(log, list)
    total = 0
    for entry in log:
        assert isinstance(entry, list)
        _, _, micros, words, *_ = entry
        assert isinstance(words, list)
        assert isinstance(micros, int)
        total += micros + 1 if str(words[0]).upper() not in _OTHERS else 0
    return total
