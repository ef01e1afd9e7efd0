"""Data that is damaged, and a server that is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
import redis
from msgspec.structs import replace
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.waiting import until

from bide.core.errors import PartlyFailed, SetupError, StoreCorrupt, StoreFull
from bide.core.events import Event, EventKind
from bide.core.instants import LAST_INSTANT, At, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, Record, Ref, Result, State
from bide.stores.redis import RedisStore
from bide.stores.redis.layout import Layout
from bide.testing.store_suite.base import (
    HOUR,
    LEASE,
    NOW,
    do,
    done,
    extend,
    keys,
    lease,
    listed,
    new,
    put,
    retry,
    settle,
    take,
)


class BackDoor:
    """A client that writes past the store, into the one shard of its namespace."""

    def __init__(self, url: str, namespace: str) -> None:
        self.layout = Layout(namespace, 1)
        self.client: Any = redis.Redis.from_url(url)
        bodies, *indexes = self.layout.topic(0, "t")
        self.bodies = bodies
        self.indexes = indexes

    def lose_body(self, key: str) -> None:
        self.client.hdel(self.bodies.decode(), key)

    def put_entry(self, index: int, key: str, score: float) -> None:
        self.client.zadd(self.indexes[index].decode(), {key: score})

    def entries(self) -> int:
        return sum(self.client.execute_command("ZCARD", index) for index in self.indexes)


@pytest.fixture
def back_door(redis_url: str, redis_namespace: str) -> Iterator[BackDoor]:
    door = BackDoor(redis_url, redis_namespace)
    yield door
    door.client.close()


@pytest_asyncio.fixture
async def store(open_store: OpensStore, redis_url: str) -> RedisStore:
    """With one shard; it goes by the caller's clock."""
    return await open_store(redis_url, query="&shards=1", clock="caller")


async def damaged(store: RedisStore) -> list[str]:
    return [finding.what for finding in await store.diagnose() if "damaged" in finding.what]


async def test_an_entry_without_a_body_is_set_aside_and_counted(store: RedisStore, back_door: BackDoor) -> None:
    await put(store, *(new(key) for key in "abc"))
    assert await damaged(store) == []
    back_door.lose_body("b")
    assert keys((await lease(store, 3)).tasks) == ["a", "c"]
    [found] = await damaged(store)
    assert found.startswith("1 ")
    assert (await lease(store, 3)).next_wake == NOW + LEASE, "it does not keep anybody awake"
    back_door.lose_body("a")
    assert keys((await lease(store, 3, now=NOW + LEASE)).tasks) == ["c"], "that of a lost lease neither"
    [found] = await damaged(store)
    assert found.startswith("2 ")


@pytest.mark.parametrize("index", [0, 1])
async def test_an_entry_in_the_wrong_index_or_at_the_wrong_time_is_put_right(
    store: RedisStore, back_door: BackDoor, index: int
) -> None:
    await put(store, new("later", due=At(NOW + HOUR)), new("held"))
    held = await take(store)
    back_door.put_entry(index, "later", NOW - 1)
    back_door.put_entry(0, "held", NOW - 1)
    assert (await lease(store, 2)).tasks == [], "the body says the state, and when a waiting task wakes"
    assert (await lease(store, 2)).next_wake == NOW + LEASE
    assert back_door.entries() == 2
    assert await settle(store, done(held))
    assert keys((await lease(store, 2, now=NOW + HOUR)).tasks) == ["later"]


@pytest.mark.parametrize(
    ("score", "ends"), [(NOW - 1, NOW - 1), (NOW + 2.5, NOW + 2), (float("inf"), LAST_INSTANT), (-1, 0)]
)
async def test_the_end_of_a_lease_is_that_of_its_entry(
    store: RedisStore, back_door: BackDoor, score: float, ends: int
) -> None:
    """Only for want of one that of its body, from when it began."""
    await put(store, new("held"))
    held = await take(store)
    back_door.put_entry(1, "held", score)
    assert await store.get([held.ref]) == [replace(held, wake_at=ends)]
    moved = await do(store, Move("t", "held", At(NOW)))
    assert (moved.result, moved.record) == (Result.UNDER_WAY, replace(held, wake_at=ends))
    assert keys((await lease(store, 1)).tasks) == ["held"][: ends <= NOW]
    back_door.client.execute_command("DEL", back_door.indexes[1])
    assert (await store.get([held.ref]))[0] is not None
    back_door.put_entry(0, "held", NOW - 1)
    assert (await lease(store, 1)).tasks == []
    assert (await lease(store, 1)).next_wake == NOW + LEASE


async def test_the_index_of_topics_heals(store: RedisStore, back_door: BackDoor) -> None:
    """It is only a copy of the heads: a worker checks some entries with each reading, in turn."""
    topics = [f"{number}" for number in range(20)]
    await put(store, *(new("one", topic=topic) for topic in topics))
    back_door.client.execute_command("DEL", back_door.layout.topics[0])
    found: set[str] = set()
    for _ in range(3):
        leased = await store.lease(dict.fromkeys(topics, 1), now=NOW, until=NOW + LEASE, holder="w")
        found |= {task.topic for task in leased.tasks}
    assert found == set(topics)


@contextmanager
def wrong(back_door: BackDoor, key: bytes) -> Iterator[None]:
    """The key is there already, as a list."""
    back_door.client.rpush(key.decode(), "of another program")
    yield
    back_door.client.delete(key.decode())


async def test_keys_of_another_kind_are_reported_as_such(store: RedisStore, back_door: BackDoor) -> None:
    bodies, waiting, *_ = back_door.layout.topic(0, "t")
    for key, read in (
        (bodies, lambda: store.get([Ref("t", "k")])),
        (waiting, lambda: listed(store, Filter(topic="t", state=State.WAITING))),
        (waiting, lambda: lease(store, 1)),
    ):
        with wrong(back_door, key):
            with pytest.raises(StoreCorrupt, match="something else"):
                await store.add([new()], now=NOW)
            with pytest.raises(StoreCorrupt, match="something else"):
                await read()
    assert keys(await put(store, new())) == ["k"], "and it goes on once they are gone"
    assert len((await lease(store, 1)).tasks) == 1


async def test_what_is_no_worker_does_not_stop_one(store: RedisStore, back_door: BackDoor) -> None:
    for odd in (b"\xff\xfe", b"\x92\xcf" + b"\x7f" * 8 + b"\x91\xa1\xff"):
        back_door.client.execute_command("HSET", back_door.layout.common("workers"), odd, odd)
    assert await store.announce("w", ["t"], until=NOW + 1, now=NOW) == {"w": ["t"]}


async def test_entries_that_are_no_tasks_do_not_make_a_list_endless(store: RedisStore, back_door: BackDoor) -> None:
    await put(store, *(new(key) for key in "abc"))
    index = back_door.indexes[0].decode()
    for member, score in ((b"", NOW), (b"\xff\xfe", NOW), (b"b", NOW + 0.5), (b"far", float("inf"))):
        back_door.client.zadd(index, {member: score})
    for where in (Filter(topic="t"), Filter(topic="t", state=State.WAITING), Filter(topic="t", wake_from=0)):
        assert set(keys(await listed(store, where, limit=1))) == {"a", "c"}, "and b where its entry says so"
    assert set(keys((await lease(store, 9, now=NOW + 1)).tasks)) == {"a", "b", "c"}


@pytest.mark.parametrize("counter", ["x", "", "1e400", "-5", "nan"])
async def test_a_counter_that_is_no_number_goes_by_the_clock(
    store: RedisStore, back_door: BackDoor, counter: str
) -> None:
    await put(store, new("a"))
    back_door.client.set(back_door.layout.fixed(0, b"")[0].decode(), counter)
    assert (await lease(store, 1, topic="other")).tasks == []
    [held] = (await lease(store, 1)).tasks
    assert held.token >= NOW * 1000
    assert await settle(store, done(held))


async def test_a_layout_that_cannot_be_read_is_said_to_be_damaged(
    open_store: OpensStore, redis_url: str, store: RedisStore, back_door: BackDoor
) -> None:
    for field, value in (("shards", "x"), ("version", "1\xff"), ("shards", "0")):
        before = back_door.client.execute_command("HGET", back_door.layout.common("layout"), field)
        back_door.client.execute_command("HSET", back_door.layout.common("layout"), field, value)
        with pytest.raises(StoreCorrupt, match="its layout cannot be read"):
            await open_store(redis_url)
        back_door.client.execute_command("HSET", back_door.layout.common("layout"), field, before)


async def test_what_a_script_stumbles_over_is_damage(store: RedisStore, back_door: BackDoor) -> None:
    await put(store, new("a"))
    for key in back_door.client.keys(f"{{{back_door.layout.namespace}:0}}:a:*"):
        back_door.client.set(key, b"x")
    with pytest.raises(StoreCorrupt, match="something else"):
        await store.add([new("b")], now=NOW)


async def test_an_event_that_cannot_be_read_hides_no_other(
    open_store: OpensStore, redis_url: str, back_door: BackDoor
) -> None:
    store = await open_store(redis_url, query="&shards=1", clock="caller", events_kept=3)
    event = Event(at=NOW, topic="t", key="k", id=new_id(), kind=EventKind.DEAD, what="bad")
    log = back_door.layout.common("events").decode()
    await store.record([event])
    for fields in ({"x": "y"}, {"t": "t\0k", "e": b"\xc1"}, {"t": "t\0k", "e": b"\xa1\xff"}):
        back_door.client.xadd(log, fields)
    back_door.client.zadd(back_door.layout.common("event-refs").decode(), {b"t\0k\0no id": 0})
    assert await store.events(limit=10) == [event]
    assert await store.events(Ref("t", "k"), limit=10) == [event]
    for _ in range(5):
        await store.record([event])
    assert await store.events(limit=10) == [event] * 3, "what is odd is dropped with the oldest"


NEVER = 10_000_000
"""Milliseconds from now."""


ROOM = 4_000_000
"""Bytes that are left for tasks."""


async def filled(store: RedisStore) -> int:
    """Schedules until every server is full; how many tasks the store took."""
    for batch in range(1_000):
        tasks = [new(f"{batch}-{number}", due=In(0), payload=b"x" * 5_000) for number in range(100)]
        try:
            await store.add(tasks, now=0)
        except StoreFull:
            return (await store.tally()).number()
        except PartlyFailed as partly:
            if all(isinstance(answer, StoreFull) for answer in partly.answers):
                return (await store.tally()).number()
    raise AssertionError("it takes everything")


async def leased(store: RedisStore, count: int) -> list[Record]:
    """So many, in as many calls as it takes: in a Cluster none waits for the slowest server."""
    held: list[Record] = []

    async def enough() -> bool:
        held.extend((await store.lease({"t": count - len(held)}, now=0, until=NEVER, holder="w")).tasks)
        return len(held) == count

    await until(enough, "so many tasks")
    return held


async def test_full_servers_refuse_new_work_and_drain(servers: Servers, open_store: OpensStore) -> None:
    store = await open_store(servers.url)
    with servers.nearly_full(ROOM):
        before = await filled(store)
        assert before > 100
        with pytest.raises(StoreFull, match="maxmemory"):
            await store.add([new("one", payload=b"x" * 100_000)], now=0)

        live = await store.announce("w", ["t"], until=NEVER, now=0)
        assert live == {"w": ["t"]}, "a worker can say that it is there"
        other = await open_store(servers.url, query="&shards=16")
        held = await leased(other, 3)  # one that is opened only now can help
        assert await extend(other, held[0], now=0, until=2 * NEVER)
        assert await other.settle([retry(held[0], In(NEVER)), done(held[1])], now=0) == [True, True]
        assert (await do(store, Move("t", held[0].key, In(0)))).result is Result.MOVED
        assert (await do(store, Cancel("t", held[2].key))).result is Result.CANCELLED_WHILE_LEASED

        left = before - 2
        while left:
            some = await leased(store, min(left, 100))
            assert all(await store.settle([done(one) for one in some], now=0))
            left -= len(some)
        assert await listed(store, Filter()) == []
        [answer] = await store.add([new("after", due=In(0))], now=0)
        assert answer.result is Result.CREATED, "and there is room again"


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_policy_that_throws_tasks_away_is_refused(servers: Servers, redis_namespace: str, policy: str) -> None:
    store = RedisStore(f"{servers.url}?namespace={redis_namespace}")
    with servers.set_up(maxmemory_policy=policy), pytest.raises(SetupError, match=policy):
        await store.open()


async def test_a_policy_that_spares_keys_without_an_end_is_accepted(servers: Servers, open_store: OpensStore) -> None:
    """At its limit it throws away what a resend would be answered from, never a task."""
    with servers.set_up(maxmemory_policy="volatile-ttl"):
        store = await open_store(servers.url)
        with servers.nearly_full(ROOM):
            there = await filled(store)
            assert len(await listed(store, Filter(state=State.WAITING))) == there
