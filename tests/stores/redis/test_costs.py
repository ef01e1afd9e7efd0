"""What a worker asks of the servers and what it holds, whom it lets wait; what a call costs, however much waits."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import pytest
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.waiting import not_before, pause, until

from bide import Bide, Task
from bide.core.instants import At, In
from bide.core.records import Cancel, Filter, Move, Page, Ref, State
from bide.stores.redis import RedisStore
from bide.stores.redis.leasing import CAP, HeadCache
from bide.stores.redis.store import LONGEST_PATIENCE
from bide.testing.store_suite.base import HOUR, NOW, do, new
from bide_proofs.servers.redis import Reply


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
            await pause(0.2, why="it might take more")
            tally = await app.tally()
            assert (tally.number("t", State.LEASED), tally.number("t", State.WAITING)) == (3, 37)
            go_on.set()
            await until(lambda: worker.stats.done == 40, "all of them")
        assert worker.stats.leased == 40


async def test_an_idle_worker_asks_each_shard_once_a_second(
    servers: Servers, redis_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: and nothing else, whatever waits for later."""
    store = RedisStore(f"{servers.url}?namespace={redis_namespace}", silence=LONGEST_PATIENCE)
    app = Bide(store)
    announce = store.announce
    announced = 0
    asked: dict[int, list[float]] = defaultdict(list)
    answered = HeadCache.answered

    async def counted(*args: Any, **options: Any) -> dict[str, list[str]]:
        nonlocal announced
        announced += 1
        return await announce(*args, **options)

    def noted(heads: HeadCache, shard: int, waiting: int, leased: int, clock: float, *, plenty: bool) -> None:
        asked[shard].append(clock)
        answered(heads, shard, waiting, leased, clock, plenty=plenty)

    monkeypatch.setattr(store, "announce", counted)
    monkeypatch.setattr(HeadCache, "answered", noted)

    @app.handler("t")
    async def work(task: Task[None]) -> None: ...

    async with app:
        for number in range(200):
            await app.schedule("t", None, key=f"{number}", delay="1h")
        async with app.worker() as worker:
            await app.schedule("t", None, key="first", delay="0s")
            await until(lambda: worker.stats.done == 1, "the worker")
            busy = {shard: len(times) for shard, times in asked.items()}

            async def asks_again(rounds: int) -> int:
                await until(lambda: all(len(asked[one]) > busy[one] + rounds for one in range(16)), "it to ask again")
                return scripts_run(servers) - sent(store)

            others = -await asks_again(1) + await asks_again(3)
        assert others <= announced + 16, "as many may be under way at either moment"
    for shard, times in asked.items():
        for earlier, later in pairwise(times[busy[shard] + 1 :]):
            # a round takes along the heads that are half as old as the oldest
            not_before(later, earlier + CAP / 2, f"asking shard {shard}")


def sent(store: RedisStore) -> int:
    """How many calls the store has sent so far."""
    return sum(sum(caller._numbers) for caller in store._open().clients.values())


def scripts_run(servers: Servers) -> int:
    return sum(
        int(said.split("calls=")[1].partition(",")[0])
        for master in servers.masters
        for name, said in master.info("commandstats").items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    )


FEW, MANY = 100, 10_000
TRIES = 10


@pytest.mark.parametrize("deployment", ["single"])  # one shard is on one server, wherever that is
async def test_a_call_costs_the_same_however_much_waits(
    servers: Servers, redis_namespace: str, open_store: OpensStore
) -> None:
    """P11: in the server's own microseconds, with a hundred times as much in the same shard, half of it due."""
    stores = [await open_store(servers.url, namespace=f"{redis_namespace}{n}", query="&shards=1") for n in (FEW, MANY)]
    for store, count in zip(stores, (FEW, MANY), strict=True):
        await fill(store, count)
    least: list[dict[str, int]] = [{}, {}]
    with servers.set_up(slowlog_log_slower_than=0, slowlog_max_len=1_000):
        for number in range(TRIES):  # one beside the other, so that the machine is as quick for both
            for store, found in zip(stores, least, strict=True):
                for kind, cost in (await costs(servers, store, f"try-{number}")).items():
                    found[kind] = min(cost, found.get(kind, cost))
    little, much = least
    assert min(little.values()) > 0, "all of them were seen"
    # O(n) would be a hundred times as much, or milliseconds where there is a constant part
    assert {name: (little[name], cost) for name, cost in much.items() if cost > 3 * little[name] + 300} == {}


async def fill(store: RedisStore, count: int) -> None:
    """What waits for later, and what is due and nobody works on."""
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        later = [new(f"{number}", due=In(24 * HOUR + number), group="g") for number in numbers]
        due = [new(f"{number}", topic="nobodys", due=In(0)) for number in numbers]
        await store.add(later + due, now=0)


async def costs(servers: Servers, store: RedisStore, key: str) -> dict[str, int]:
    """Of each kind of call, in microseconds; the least of some, since what else the machine does only ever adds."""
    calls: dict[str, Awaitable[object]] = {
        "schedule": store.add([new(key, due=In(HOUR), group="g")], now=0),
        "get": store.get([Ref("t", key)]),
        "move": do(store, Move("t", key, In(2 * HOUR)), now=0),
        "fire now": do(store, Move("t", key, In(0)), now=0),
        "lease": store.lease({"t": 1}, now=0, until=60_000, holder="w"),
        "cancel": do(store, Cancel("t", key), now=0),
        "page by time": store.find(Filter(topic="t", state=State.WAITING), Page(limit=10)),
        "page of a group": store.find(Filter(group="g"), Page(limit=10)),
    }
    found: dict[str, int] = {}
    for kind, call in calls.items():
        servers.ask("SLOWLOG", "RESET")
        await call
        found[kind] = sum(spent(reply) for reply in servers.ask("SLOWLOG", "GET", 100))
    return found


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


async def test_intervals_are_counted_in_one_call_for_each_shard_and_topic(
    servers: Servers, open_store: OpensStore
) -> None:
    store = await open_store(servers.url, query="&shards=4", clock="caller")
    wakes = [NOW + number * number % 9_973 for number in range(300)]
    tasks = [new(f"{number}", topic="ab"[number % 2], due=At(wake)) for number, wake in enumerate(wakes)]
    await store.add([*tasks, new("far", topic="c", due=At(NOW + 9 * HOUR))], now=NOW - 1)
    edges = [NOW, NOW + 1, NOW + 2_000, NOW + 2_000, NOW + 5_000, NOW + 9_000]

    await store.tally()  # the servers know the script
    before = scripts_run(servers)
    found = await store.tally(edges)
    assert scripts_run(servers) - before == 4 + 4 + 1, "each topic, where there is any of it"
    servers.ask("SCRIPT", "FLUSH")
    assert await store.tally(edges) == found, "a server that was restarted knows no script"

    fine = range(NOW, NOW + 2_500)
    many = (await store.tally(fine)).forecast
    expected = Counter(wake for wake in wakes if wake < NOW + 2_499)
    assert [sum(counts) for counts in zip(*([c.number for c in many[t]] for t in "ab"), strict=True)] == [
        expected[wake] for wake in fine[:-1]
    ], "more edges than one call takes"
