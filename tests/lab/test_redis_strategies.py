"""The strategies on Redis, step by step: what another process takes over, and how shards are weighed. `bide lab run`
shows flaws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import FAR, Company, Effects, Held, die
from tests.waiting import forever, pause, until

from bide_lab.strategies.held.s18_in_memory_eta import InMemoryEta
from bide_lab.strategies.zsets.s05_zset_shards import HashedShards, WeightedShards
from bide_lab.strategies.zsets.s06_bucket_queue import BucketAndReady
from bide_lab.strategy import Item, now

_LOOKS = "what must not fire has the time to"


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
