"""What a call costs the server and the network, and what it leaves in a trace."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.servers.fixtures import StartsRedis
from tests.servers.keyspace import client_of
from tests.stores.many_topics import asked_of_topics
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.waiting import not_before, pause, until

from bide import Bide, Task
from bide.core.errors import StoreMismatch
from bide.core.instants import NEVER, At, In
from bide.core.records import (
    Cancel,
    Filter,
    Lease,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Ref,
    Settlement,
    State,
)
from bide.stores.redis import RedisStore, reading
from bide.stores.redis.layout import record_of
from bide.stores.redis.leasing import _MOST_BYTES as MOST_BYTES
from bide.stores.redis.leasing import CAP, GRACE, HeadCache, Leaser, owned, owner_of
from bide.stores.redis.script_client import Call
from bide.stores.redis.topology import SharedConnection
from bide.stores.server import LONGEST_PATIENCE
from bide.testing.store_suite.base import (
    HOUR,
    LEASE,
    MINUTE,
    NOW,
    again,
    dead,
    defer,
    do,
    done,
    lease,
    listed,
    new,
    put,
    retry,
    settle,
    take,
)
from bide_proofs.servers.redis import Reply


@pytest.fixture(params=["single", "cluster"])
def deployment(request: pytest.FixtureRequest) -> str:
    """Under Sentinel, too, one server does what it costs a server to do."""
    kind: str = request.param
    return kind


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
    announced = Mock(wraps=store.announce)
    asked: dict[int, list[float]] = defaultdict(list)
    read_heads = Leaser._read_heads

    def noted(leaser: Leaser, shard: int, found: list[bytes], wakes: Mapping[str, int]) -> None:
        asked[shard].append(leaser._read_at[shard])
        read_heads(leaser, shard, found, wakes)

    monkeypatch.setattr(store, "announce", announced)
    monkeypatch.setattr(Leaser, "_read_heads", noted)

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
        assert others <= announced.call_count + 16, "as many may be under way at either moment"
    for shard, times in asked.items():
        for earlier, later in pairwise(times[busy[shard] + 1 :]):
            # a round takes along the heads that are half as old as the oldest
            not_before(later, earlier + CAP / 2, f"asking shard {shard}")


async def test_of_many_topics_a_worker_reads_those_that_wake_soon(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: and finds what others brought forward, without any notification."""
    store, elapsed, read = await open_store(shared_url, query="&shards=1"), 0.0, 0
    read_heads = Leaser._read_heads

    def counted(leaser: Leaser, shard: int, found: list[Any], noted: Mapping[str, int]) -> None:
        nonlocal read
        read = (len(found) - 1) // 2
        read_heads(leaser, shard, found, noted)

    monkeypatch.setattr("bide.stores.redis.leasing.steady", SimpleNamespace(monotonic=lambda: elapsed))
    monkeypatch.setattr(Leaser, "_read_heads", counted)
    topics = [f"{number}" for number in range(200)]
    now = await store.time()
    other = await open_store(shared_url, query="&shards=1")
    await other.add([new("one", topic=topic, due=In(HOUR)) for topic in [*topics, "of another worker"]], now=now)
    wants = dict.fromkeys(topics, 1)
    leased = await store.lease(wants, now=now, until=now + 1_000, holder="w")
    assert (read, len(leased.heads)) == (201, 200), "all are read at first"
    elapsed += 1
    assert len((await store.lease(wants, now=now, until=now + 1_000, holder="w")).heads) == 200
    assert read == 0
    await do(other, Move("77", "one", In(0)), now=now)
    elapsed += 1
    leased = await store.lease(wants, now=now, until=now + 1_000, holder="w")
    assert ([task.topic for task in leased.tasks], read) == (["77"], 1)


async def test_a_worker_hears_that_another_has_leased_all_that_was_due(shared_url: str, open_store: OpensStore) -> None:
    first, other = await open_store(shared_url), await open_store(shared_url)
    now = await first.time()
    for store, holder in ((first, "first"), (other, "other"), (first, "first")):
        await store.announce(holder, ["t"], now + MINUTE, now=now)
    heard: list[int] = []
    taken: list[tuple[str, int, int, str]] = []
    listening = await other.listen(["t"], lambda topic, wake: heard.append(wake), lambda *said: taken.append(said))
    for store, holder in ((first, "first"), (other, "other")):
        await store.lease({"t": 1}, now=now, until=now + MINUTE, holder=holder)
    heads, owned_by_first = other._open().leaser._heads, first._open().leaser._heads["t"].mine
    shard_of = first._open().layout.shard_of
    key = next(key for key in map(str, range(10_000)) if owned_by_first[shard_of("t", key)])
    await first.add([new(key, topic="t", due=In(0))], now=now)
    await until(lambda: min(heads["t"].wakes) < now + HOUR, "the notification")
    [held] = (await first.lease({"t": 2}, now=now, until=now + 2 * HOUR, holder="first")).tasks
    await until(lambda: taken, "the news that nothing is due")
    assert len(heard) == 1
    assert taken == [("t", NEVER, held.wake_at + GRACE, "")], "then, too, the first is the first to ask"
    await listening.close()


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


async def test_intervals_are_counted_in_one_call_for_each_shard(servers: Servers, open_store: OpensStore) -> None:
    store = await open_store(servers.url, query="&shards=4", clock="caller")
    wakes = [NOW + number * number % 9_973 for number in range(300)]
    tasks = [new(f"{number}", topic="ab"[number % 2], due=At(wake)) for number, wake in enumerate(wakes)]
    await store.add([*tasks, new("far", topic="c", due=At(NOW + 9 * HOUR))], now=NOW - 1)
    edges = [NOW, NOW + 1, NOW + 2_000, NOW + 2_000, NOW + 5_000, NOW + 9_000]

    await store.tally()  # the servers know the script
    before = scripts_run(servers)
    found = await store.tally(edges)
    assert scripts_run(servers) - before == 4, "all topics of a shard together"
    servers.ask("SCRIPT", "FLUSH")
    assert await store.tally(edges) == found, "a server that was restarted knows no script"

    fine = range(NOW, NOW + 2_500)
    many = (await store.tally(fine)).forecast
    expected = Counter(wake for wake in wakes if wake < NOW + 2_499)
    assert [sum(counts) for counts in zip(*([c.number for c in many[t]] for t in "ab"), strict=True)] == [
        expected[wake] for wake in fine[:-1]
    ], "more edges than one call takes"


@pytest.mark.parametrize("deployment", ["single"])  # what is written is the same wherever a shard is
async def test_extending_leases_writes_no_bodies(servers: Servers, open_store: OpensStore) -> None:
    """Neither into the append-only file nor to replicas, which get the same."""
    store = await open_store(servers.url, clock="caller")
    await put(store, *(new(f"{number}", payload=bytes(20_000)) for number in range(256)))
    held = list[Record]()
    while len(held) < 256:
        held += (await lease(store, 256)).tasks
    before = written(servers)
    longer = [Lease(one.topic, one.key, one.token) for one in held]
    assert await store.extend(longer, now=NOW, until=NOW + HOUR) == [True] * 256
    assert 0 < written(servers) - before < 64_000


@pytest.mark.parametrize("shards", [1, 16])
async def test_a_lease_of_large_tasks_is_cut(shared_url: str, open_store: OpensStore, shards: int) -> None:
    """And says that more is due; what got nothing for that reason goes first in the next lease."""
    store = await open_store(shared_url, query=f"&shards={shards}", clock="caller")
    large = [new(f"{number}", topic="large", payload=bytes(MOST_BYTES // 4)) for number in range(20)]
    await put(store, *large, new("huge", topic="large", due=At(NOW + 1), payload=bytes(2 * MOST_BYTES)))
    await put(store, *(new(f"{number}", topic="small") for number in range(2 * shards)))
    wants, found = {"large": 100, "small": 100}, list[Record]()
    while len(found) < 20 + 1 + 2 * shards:
        leased = await store.lease(wants, now=NOW + 1, until=NOW + LEASE, holder="w")
        sizes = sorted(len(task.payload) for task in leased.tasks)
        assert sum(sizes) < 2 * MOST_BYTES + sizes[-1], "in two rounds at most, and always one"
        found += leased.tasks
        assert len(found) == 20 + 1 + 2 * shards or (leased.next_wake or NEVER) <= NOW + 1
    assert len({task.ref for task in found}) == len(found)
    assert {task.topic for task in found[: 8 + 2 * shards]} == {"large", "small"}


def written(servers: Servers) -> int:
    """The bytes in the append-only file, which is flushed before each answer."""
    return int(servers.masters[0].info("persistence")["aof_current_size"])


def first_everywhere(shards: int) -> HeadCache:
    return HeadCache(shards, lambda: [True] * shards)


def test_a_topic_in_which_nothing_waits_never_needs_to_know_who_goes_first() -> None:
    """Nor is anything computed anew while the same workers live."""
    owned = Mock(return_value=[True, False])
    heads = HeadCache(2, owned)
    for shard in (0, 1):
        heads.answered(shard, -1, -1, plenty=False)
    assert heads.next_wake() is None
    assert owned.call_count == 0
    heads.note_wake(1, 500)
    assert heads.next_wake() == heads.next_wake() == 500 + GRACE
    assert owned.call_count == 1
    heads.others_changed()
    assert heads.next_wake() == 500 + GRACE
    assert owned.call_count == 2


def test_what_was_told_while_a_call_was_under_way_counts_whatever_it_answers() -> None:
    heads = first_everywhere(1)
    heads.asking(0)
    heads.note_wake(0, 500)
    heads.answered(0, -1, -1, plenty=False)
    assert heads.next_wake() == 500
    heads.asking(0)
    heads.answered(0, -1, -1, plenty=False)
    assert heads.next_wake() is None, "and once it was asked for after that, the answer is the truth"


def test_what_was_told_only_ever_brings_the_wake_forward() -> None:
    heads = first_everywhere(1)
    heads.answered(0, 300, 700, plenty=False)
    heads.note_wake(0, 500)
    assert heads.next_wake() == 300
    heads.note_wake(0, 100)
    assert heads.next_wake() == 100


def test_who_does_not_go_first_waits_a_moment() -> None:
    heads = HeadCache(2, lambda: [True, False])
    for shard in (0, 1):
        heads.answered(shard, 1_000, -1, plenty=False)
    assert heads.due(1_000) == [0]
    assert heads.due(1_000 + GRACE) == [0, 1]
    heads.answered(1, -1, -1, plenty=False)
    assert heads.wake(1) == NEVER, "and there is nothing to wait for"


def test_the_most_overdue_comes_first() -> None:
    heads = first_everywhere(3)
    for shard, wake in enumerate((30, 10, 20)):
        heads.answered(shard, wake, -1, plenty=False)
    assert heads.due(25) == [1, 2]


def test_room_is_shared_out_and_never_exceeded() -> None:
    heads = first_everywhere(16)
    for room in (1, 5, 16, 100, 1000):
        shares = heads.shares(list(range(16)), room)
        assert sum(shares.values()) == room
        assert all(shares.values())
    heads.plenty[3] = True
    assert len(heads.shares(list(range(16)), 100)) == 1, "where there is plenty, few shards are asked for much"


def test_every_shard_has_one_owner_and_few_change_hands() -> None:
    workers = [f"worker-{number}" for number in range(5)]
    before = {(topic, shard): owner_of(topic, shard, workers) for topic in ("a", "b", "c", "d") for shard in range(64)}
    shares = Counter(before.values())
    assert set(shares) == set(workers)
    assert max(shares.values()) < 2.5 * min(shares.values())
    after = {place: owner_of(*place, workers[:-1]) for place in before}
    moved = [place for place in before if before[place] != after[place]]
    assert all(before[place] == workers[-1] for place in moved), "only what the one that went had"


def test_only_workers_of_the_topic_count_and_oneself_always() -> None:
    of = {worker: owned("a", 32, {"one", "two"}, {worker}) for worker in ("one", "two")}
    assert [one + two for one, two in zip(of["one"], of["two"], strict=True)] == [1] * 32
    assert all(owned("c", 32, (), {"one"}))
    assert any(owned("a", 32, {"one", "two"}, {"newcomer"}))


KEYS = [f"k{number}" for number in range(5)]


async def test_a_late_answer_gives_nothing_that_is_no_longer_held(shared_url: str, open_store: OpensStore) -> None:
    store = await open_store(shared_url, query="&shards=1")
    now = await store.time()
    await store.add([NewTask("t", key, key, In(0), key.encode(), "g", b"options") for key in KEYS], now=now)
    caller = store._open().clients["lease"]
    call = Call(0, ["nobody", "t"], [60_000, "w", 2**20, 2**53, "a", 0, 3, 10])
    replies: list[list[Any]] = []
    await caller.run([call], lambda _, reply: replies.append(reply))
    tokens = {record.key: record.token for record in await store.get([Ref("t", key) for key in KEYS]) if record}

    await store.change([Cancel("t", "k1")], now=now)
    retry = Settlement("t", "k3", tokens["k3"], OutcomeKind.RETRY, In(60_000))
    assert await store.settle([retry], now=now) == [True]
    longer = [Lease("t", "k4", tokens["k4"])]
    assert await store.extend(longer, now=now, until=now + 90_000) == [True]

    caller._numbers[0] -= 1  # the same call once more, as after a lost answer
    await caller.run([call], lambda _, reply: replies.append(reply))
    first, again = replies
    assert again[:9] == first[:9], "the same heads and the same count"
    assert again[-1] == first[-1], "and the same heads of all topics"
    bodies = {key.decode(): body for key, _, body in zip(*[iter(again[9:-1])] * 3, strict=True)}
    assert {key for key, body in bodies.items() if not body} == {"k1", "k3"}
    assert len(bodies) == len(KEYS)
    assert all(key.encode() in bodies[key] for key in ("k0", "k2", "k4"))
    assert [record_of("t", "k4", bodies["k4"])] == await store.get([Ref("t", "k4")]), "with the longer lease"


async def test_what_is_asked_does_not_grow_with_the_topics(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: but by a command for some hundred (topic, shard)."""
    commands = 0
    post = SharedConnection.post

    def counted(self: SharedConnection, asked: Sequence[Any]) -> Any:
        nonlocal commands
        commands += len(asked)
        return post(self, asked)

    monkeypatch.setattr(SharedConnection, "post", counted)
    with client_of(shared_url) as client:
        for script in (reading._PAGE, reading._COUNT):
            client.script_load(script.text)  # else whoever is the first on a server sends them once more
    store = await open_store(shared_url, query="&shards=2", clock="caller")
    asked = await asked_of_topics(store, lambda: commands)
    for none, one, tally in asked.values():
        assert none <= 2 + 2 * (1 + 1_000 // 500), "the topics of both shards, and a script for each 500 of them"
        assert one <= none + 5, "and a page, the task with the end of its lease, and the next page"
        assert tally <= 2 + 2 * (1 + 1_000 // 71)


async def test_a_page_of_what_was_added_as_one_batch_takes_few_reads(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(shared_url, query="&shards=16", clock="caller")
    shard_of = store._open().layout.shard_of
    await put(store, *(new(f"{n}", due=At(NOW + shard_of("t", f"{n}"))) for n in range(2_000)))
    reads, entries = 0, reading._entries

    async def counted(*args: Any, **how: Any) -> Any:
        nonlocal reads
        reads += 1
        return await entries(*args, **how)

    monkeypatch.setattr(reading, "_entries", counted)
    assert len((await store.find(Filter(state=State.WAITING), Page(limit=500))).tasks) == 500
    assert reads <= 6


async def test_a_topic_is_examined_as_a_whole(
    shared_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its shards are more than a list examines at once: else its tasks would be out of order."""
    monkeypatch.setattr(reading, "_PLACES", 3)
    store = await open_store(shared_url, query="&shards=4", clock="caller")
    await put(store, *(new(f"{n}", topic="abc"[n % 3], due=At(NOW + n * 37 % 100)) for n in range(100)))
    shown = [(one.topic, one.wake_at) for one in await listed(store, Filter(state=State.WAITING), limit=7)]
    assert shown == sorted(shown)
    assert len(shown) == 100


async def test_nothing_is_left_behind(servers: Servers, redis_namespace: str, open_store: OpensStore) -> None:
    """Whichever way a task ended: the layout and two numbers for each shard, and answers that end by themselves."""
    store = await open_store(servers.url, query="&shards=2", clock="caller")
    kept = NOW + MINUTE
    everyone = [new(f"{number}", topic=topic, group=f"g{number % 3}", deadline=NOW + HOUR, options=b"o")
                for topic in ("a", "b") for number in range(40)]  # fmt: skip
    await put(store, *everyone)
    await put(store, *everyone[::2])
    await store.add([new("1", topic="a", on_conflict=OnConflict.LATEST, due=At(NOW + 1))], now=NOW)
    for topic in ("a", "b"):
        held = (await lease(store, 30, topic=topic, now=NOW + 1)).tasks
        outcomes = [
            (done(one), done(one, keep_until=kept), dead(one, keep_until=kept), retry(one, At(NOW)),
             defer(one, At(NOW)), again(one, At(NOW)))[number % 6]
            for number, one in enumerate(held)
        ]  # fmt: skip
        assert all(await store.settle(outcomes, now=NOW + 1))
        for one in await listed(store, Filter(topic=topic, state=State.DEAD)):
            await do(store, Redrive(topic, one.key, one.id, At(NOW)), now=NOW + 1)
        for number, one in enumerate(await listed(store, Filter(topic=topic, state=State.WAITING))):
            if number % 3 == 0:
                await do(store, Cancel(topic, one.key, kept if number % 2 else 0), now=NOW + 1)
        await lease(store, 3, topic=topic, now=NOW + 1)
        while held := (await lease(store, 100, topic=topic, now=NOW + 1 + LEASE)).tasks:
            assert all(await store.settle([done(one, keep_until=kept) for one in held], now=NOW + 1 + LEASE))
    assert (await store.tally()).number(state=State.WAITING) == 0
    assert await store.announce("w", ["a"], until=NOW + HOUR, now=NOW) != {}
    assert await store.announce("w", [], until=NOW, now=NOW) == {}
    while await store.purge(now=kept, limit=10):
        pass
    left = {name: ends for name, ends in servers.keys().items() if redis_namespace in name}
    lasting = {name for name, ends in left.items() if ends == -1}
    assert lasting == {f"{{{redis_namespace}}}:layout", f"{{{redis_namespace}:0}}:n", f"{{{redis_namespace}:1}}:n"}
    assert all(":a:" in name and 0 < ends <= 600_000 for name, ends in left.items() if name not in lasting)


@pytest.mark.parametrize(("version", "advice"), [(2, "upgrade bide"), (0, "older bide")])
async def test_a_client_of_another_layout_is_refused(
    redis_server: StartsRedis, open_store: OpensStore, version: int, advice: str
) -> None:
    server = redis_server()
    await open_store(server.url, namespace="ns")
    server.ask("HSET", "{ns}:layout", "version", version)
    with pytest.raises(StoreMismatch, match=advice):
        await open_store(server.url, namespace="ns")


async def test_two_namespaces_share_nothing(redis_url: str, redis_namespace: str, open_store: OpensStore) -> None:
    """Not even where one's name begins like the other's."""
    one = await open_store(redis_url, namespace=redis_namespace)
    other = await open_store(redis_url, namespace=f"{redis_namespace}.1")
    heard: list[str] = []
    await other.listen(["t"], lambda topic, wake: heard.append(topic))
    await put(one, new(group="g", due=In(0)))
    await one.announce("w", ["t"], until=10**15, now=0)
    assert (await lease(other, 1)).tasks == []
    assert await listed(other, Filter(group="g")) == []
    assert (await other.tally()).number() == 0
    assert await other.announce("v", ["t"], until=10**15, now=0) == {"v": ["t"]}
    held = await take(one)
    assert not await settle(other, done(held))
    assert await settle(one, done(held))
    assert heard == []


async def test_twenty_clients_open_a_new_namespace_at_once(redis_url: str, redis_namespace: str) -> None:
    """They agree on whose number of shards it is; those that asked for another are refused."""
    stores = [RedisStore(f"{redis_url}?namespace={redis_namespace}&shards={4 + one % 2}") for one in range(20)]
    results = await asyncio.gather(*(store.open() for store in stores), return_exceptions=True)
    refused = [one for one in results if one is not None]
    assert len(refused) == 10
    assert all(isinstance(one, StoreMismatch) for one in refused)
    assert len({str(one) for one in refused}) == 1, "by the same number"
    same = RedisStore(f"{redis_url}?namespace={redis_namespace}")
    await same.open()
    [shards] = {store._open().layout.shards for store in stores if store._opened is not None}
    assert same._open().layout.shards == shards, "who does not say takes what there is"
    await same.close()
    for store in stores:
        await store.close()


async def test_a_layout_that_was_only_half_written_is_completed(
    redis_server: StartsRedis, open_store: OpensStore
) -> None:
    """By a client that died between the two."""
    server = redis_server()
    server.ask("HSET", "{ns}:layout", "version", 1)
    store = await open_store(server.url, namespace="ns", query="&shards=3")
    assert store._open().layout.shards == 3
