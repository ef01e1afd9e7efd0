"""The known flaws of the strategies on Redis, step by step: one process acts while another is in the middle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import FAR, Company, Effects, Held, die, setting_of
from tests.waiting import forever, pause, until

from bide_lab.strategies.expiry.s08_expiry_events import ExpiryEvents
from bide_lab.strategies.held.s18_in_memory_eta import InMemoryEta
from bide_lab.strategies.zsets.s04_zset_poll import RemoveAfter, RemoveBefore, RemoveRange, SmallestOnly
from bide_lab.strategies.zsets.s05_zset_shards import HashedShards, WeightedShards
from bide_lab.strategies.zsets.s06_bucket_queue import BucketAndReady
from bide_lab.strategies.zsets.s07_head_publish import HeadPublish
from bide_lab.strategy import Item, now
from bide_proofs.servers.redis import RedisServer

_LOOKS = "what must not fire has the time to"


async def test_two_pollers_do_what_is_removed_after_it_is_done(playing: Plays) -> None:
    async with playing(RemoveAfter) as all_of_them:
        both = Held()
        await all_of_them.start(both)
        await all_of_them.start(both)
        await all_of_them.client.schedule([Item("k", now())])
        await until(lambda: len(both.at.get("k", ())) == 2, "both of them")


async def test_a_poller_that_dies_takes_with_it_what_it_had_removed(playing: Plays) -> None:
    async with playing(RemoveBefore) as all_of_them:
        held = Held()
        [first] = await all_of_them.start(held)
        client: RemoveBefore = all_of_them.client
        await client.schedule([Item("first", now()), Item("second", now())])
        await until(lambda: held.at, "an effect")
        await die(first)
        assert await client.due_until(now()) == []
        assert await client.redis.hgetall(client.bodies) == {}
    assert len(held.at) == 1


async def test_one_slow_task_holds_up_all_others(playing: Plays) -> None:
    async with playing(SmallestOnly) as all_of_them:
        held = Held()
        await all_of_them.start(held)
        await all_of_them.client.schedule([Item("a", now()), Item("b", now())])
        await all_of_them.until_fired(held, "a")
        await pause(0.3, why=_LOOKS)
        assert list(held.at) == ["a"]
        held.let_go.set()
        await all_of_them.until_fired(held, "b")


async def test_what_is_added_between_looking_and_removing_is_removed_undone(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = RemoveRange.due_until

    async def add_after(self: RemoveRange, end: int) -> list[tuple[str, int]]:
        found = await look(self, end)
        if found:
            await self.schedule([Item("between", end)])
        return found

    monkeypatch.setattr(RemoveRange, "due_until", add_after)
    async with playing(RemoveRange) as all_of_them:
        effects, client = Effects(), all_of_them.client
        await client.schedule([Item("first", now())])
        await all_of_them.start(effects)
        await all_of_them.until_fired(effects, "first")
        assert await client.redis.zcard(client.due) == 0
        await pause(0.3, why=_LOOKS)
    assert list(effects.at) == ["first"]


async def test_the_shards_of_a_poller_that_dies_stand_still_until_its_locks_end(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bide_lab.strategies.zsets.s05_zset_shards._LOCK", 600.0)
    async with playing(HashedShards) as all_of_them:
        effects, client = Effects(), all_of_them.client
        locks = [client.key(f"lock:{shard}") for shard in range(4)]

        async def all_locked() -> bool:
            return bool(await client.redis.exists(*locks) == 4)

        [first] = await all_of_them.start(effects, "poller")
        await until(all_locked, "a lock for each shard")
        await die(first)
        await all_of_them.start(effects)
        await client.schedule([Item("k", now())])
        await pause(0.3, why=_LOOKS)
        assert not effects.at
        await client.redis.delete(*locks)
        await all_of_them.until_fired(effects, "k")


async def test_a_large_call_fills_one_shard_and_weights_prefer_the_others(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def choices(shards: Sequence[int], *, weights: Sequence[float]) -> list[int]:
        given.append(weights)
        return [shards[0]]

    monkeypatch.setattr(random, "choices", choices)
    async with playing(WeightedShards) as all_of_them:
        client: WeightedShards = all_of_them.client
        for _ in range(2):
            await client.schedule([Item(f"{len(given)}-{number}", now() + FAR) for number in range(9)])
        assert [await client.redis.zcard(client.key(f"due:{shard}")) for shard in range(4)] == [18, 0, 0, 0]
    assert given == [[1.0] * 4, [0.1, 1.0, 1.0, 1.0]]


async def test_a_reserved_job_whose_worker_died_is_ready_again_after_its_time_to_run(playing: Plays) -> None:
    async with playing(BucketAndReady, options={"hold": 600}) as all_of_them:
        held, effects, client = Held(), Effects(), all_of_them.client
        _, worker = await all_of_them.start(held)
        await client.schedule([Item("only", now())])
        await all_of_them.until_fired(held, "only")
        await die(worker)
        await all_of_them.start(effects, "worker")
        [bucket] = [key async for key in client.redis.scan_iter(match=client.key("bucket:?"))]
        [(key, ready_again)] = await client.redis.zrange(bucket, 0, -1, withscores=True)
        assert (key, await client.redis.hget(client.key("job:only"), "state")) == (b"only", b"reserved")
        assert ready_again > held.at["only"][0] / 1_000_000 + 300_000
        assert not effects.at
        await client.redis.zadd(bucket, {"only": 0})  # as if that time had passed
        await all_of_them.until_fired(effects, "only")


async def test_what_a_consumer_has_popped_dies_with_it(playing: Plays) -> None:
    async with playing(HeadPublish) as all_of_them:
        held, client = Held(), all_of_them.client
        [first] = await all_of_them.start(held)
        await client.schedule([Item("k", now())])
        await all_of_them.until_fired(held, "k")
        await die(first)
        assert [key async for key in client.redis.scan_iter(match=client.key("*"))] == []


async def test_all_listeners_look_at_once_one_of_them_for_something(playing: Plays) -> None:
    async with playing(HeadPublish) as all_of_them:
        effects, two = Effects(), [await all_of_them.another() for _ in range(2)]

        def looks() -> list[float]:
            return [sum(one.counts()[name] for one in two) for name in ("looks", "looks_in_vain")]

        for one in two:
            await all_of_them.start(effects, one=one)
        await until(lambda: looks() == [2, 2], "the first look of each, at its subscription")
        await all_of_them.client.schedule([Item("k", now())])
        await all_of_them.until_fired(effects, "k")
        await until(lambda: looks() == [4, 3], "both")


async def test_a_subscription_that_is_dropped_unnoticed_stops_delivery(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(HeadPublish) as all_of_them:
        effects = Effects()
        with monkeypatch.context() as dropped:
            dropped.setattr(HeadPublish, "_listen", lambda _: forever())
            await all_of_them.start(effects)
        await all_of_them.client.schedule([Item("k", now())])
        await pause(0.3, why=_LOOKS)
        assert not effects.at
        await all_of_them.start(effects)
        await all_of_them.until_fired(effects, "k")


async def test_what_expires_while_no_listener_is_there_is_never_told(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        setting = setting_of(ExpiryEvents, {"redis": server.url}, tmp_path)
        async with Company(ExpiryEvents, setting) as all_of_them:
            effects, client = Effects(), all_of_them.client

            async def expired() -> bool:
                return not await client.redis.exists(client.key("task:k"))

            await client.schedule([Item("k", now())])
            await until(expired, "the key to expire")
            await all_of_them.start(effects)
            await client.schedule([Item("later", now())])
            await all_of_them.until_fired(effects, "later")
            assert list(effects.at) == ["later"]
            assert await client.redis.exists(client.key("body:k")), "its body is left behind"


async def test_a_task_due_later_than_the_time_out_is_held_several_times(playing: Plays) -> None:
    """Each of those is done in the end."""
    async with playing(InMemoryEta, options={"hold": 0.2}) as all_of_them:
        one = await all_of_them.another()
        await all_of_them.client.schedule([Item("k", now() + FAR)])
        await all_of_them.start(Effects(), one=one)
        await until(lambda: one.counts()["held"] >= 2, "the same task twice in its memory")


async def test_what_a_killed_worker_held_comes_only_after_the_time_out(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends in order gives back what it holds; one that is killed does not."""
    async with playing(InMemoryEta, options={"hold": 600}) as all_of_them:
        client, killed = all_of_them.client, await all_of_them.another()
        monkeypatch.setattr(killed, "_give_back", lambda _: pause(0, why="it is killed"))
        await client.schedule([Item("k", now() + 100)])
        monkeypatch.setattr(killed, "_fire", lambda _: forever())
        [worker] = await all_of_them.start(Effects(), one=killed)
        await until(lambda: killed.counts()["held"] == 1, "the only task in its memory")
        await die(worker)
        effects = Effects()
        await all_of_them.start(effects)
        await pause(0.3, why=_LOOKS)
        assert not effects.at
        patient = replace(client.setting, options={"hold": 0.2})  # as if so much of ten minutes had passed
        async with Company(InMemoryEta, patient) as others:
            await others.start(effects)
            await others.until_fired(effects, "k")
