"""The strategies on Redis: what each claims, what it is known for, and what it leaves on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
from tests.lab.playing import keeps_its_word, named, setting_of, shows
from tests.servers.redis_server import RedisServer

from bide.lab.stage import Stage, keys_of
from bide.lab.strategies.s04_zset_poll import RemoveAfter, RemoveBefore, RemoveRange, SmallestOnly
from bide.lab.strategies.s05_zset_shards import HashedShards, WeightedShards
from bide.lab.strategies.s06_bucket_queue import BucketAndReady
from bide.lab.strategies.s07_head_publish import HeadPublish
from bide.lab.strategies.s08_expiry_events import ExpiryEvents
from bide.lab.strategies.s18_in_memory_eta import InMemoryEta
from bide.lab.strategy import Flaw, Strategy, now
from bide.lab.workloads.load import batches

pytestmark = pytest.mark.real_time

STRATEGIES: list[type[Strategy]] = [
    RemoveAfter, RemoveBefore, SmallestOnly, RemoveRange, HashedShards, WeightedShards, BucketAndReady, HeadPublish,
    ExpiryEvents, InMemoryEta,
]  # fmt: skip
KNOWN: list[tuple[type[Strategy], Flaw]] = [
    (one, flaw) for one in STRATEGIES for flaw in one.flaws if flaw.workload != "uneven"
]
MINUTE = 0.3
"""Seconds that six minutes of nobody being there are scaled by."""
_AT_ONCE = 3
"""Cells that are played at the same time: they mostly wait."""
_EVENTS = "notify-keyspace-events"


@contextmanager
def server_for(strategy: type[Strategy], shared: str, folder: Path) -> Iterator[str]:
    """Its URL. One strategy changes a setting of its server, and is late by how many keys others have on it."""
    with ExitStack() as started:
        if strategy is ExpiryEvents:
            yield started.enter_context(RedisServer(folder / "redis")).url
        else:
            yield shared


@contextmanager
def connected(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def seen(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """By strategy and flaw: what of it is to be seen."""

    async def all_of_them() -> dict[tuple[str, str], str]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(strategy: type[Strategy], flaw: Flaw) -> str:
            folder = tmp_path_factory.mktemp("cell")
            async with room:
                with server_for(strategy, redis_url, folder) as url:
                    more = {"minute": MINUTE} if flaw.workload == "away" else {}
                    return (await shows(strategy, flaw, {"redis": url}, folder, **more))[0]

        words = await asyncio.gather(*(one(*known) for known in KNOWN))
        return {(strategy.name, flaw.text): what for (strategy, flaw), what in zip(KNOWN, words, strict=True)}

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
async def test_it_does_what_it_claims(strategy: type[Strategy], redis_url: str, tmp_path: Path) -> None:
    with server_for(strategy, redis_url, tmp_path) as url:
        await keeps_its_word(strategy, {"redis": url}, tmp_path)


@pytest.mark.parametrize(("strategy", "flaw"), KNOWN, ids=named)
def test_its_flaw_is_seen(strategy: type[Strategy], flaw: Flaw, seen: Mapping[tuple[str, str], str]) -> None:
    assert seen[strategy.name, flaw.text]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
async def test_nothing_of_it_stays_on_the_server(strategy: type[Strategy], redis_url: str, tmp_path: Path) -> None:
    with server_for(strategy, redis_url, tmp_path) as url, connected(url) as client:
        setting = setting_of(strategy, {"redis": url}, tmp_path)
        before = client.config_get(_EVENTS)
        async with Stage(strategy, setting) as stage:
            scheduler = await stage.client()
            stage.sound(await scheduler.play(now(), batches([(key, 3_600_000) for key in keys_of(10)])))
            assert list(client.scan_iter(match=f"{setting.prefix}:*"))
        assert not list(client.scan_iter(match=f"{setting.prefix}:*"))
        assert client.config_get(_EVENTS) == before


async def test_a_reserved_job_whose_worker_died_is_ready_again_after_its_time_to_run(
    redis_url: str, tmp_path: Path
) -> None:
    setting = setting_of(BucketAndReady, {"redis": redis_url}, tmp_path, options={"hold": "0.5"})
    async with Stage(BucketAndReady, setting) as stage:
        [_, worker] = await stage.start(seconds=30.0)  # it would take that long, but dies in the middle
        client = await stage.client()
        begin = now()
        stage.sound(await client.play(begin, batches([("only", 100)])))
        while not stage.firings():
            await stage.rest(0.05)
        worker.kill()
        await stage.start("worker")
        assert await stage.until_fired(1, by=begin / 1000 + 10)
        begun = [firing.at for firing in stage.firings() if firing.begun]
    assert len(begun) == 2
    assert begun[1] - begun[0] >= 500_000_000


async def test_shards_grow_uneven_and_weights_keep_them_evener(redis_url: str, tmp_path: Path) -> None:
    spreads = []
    for strategy in (HashedShards, WeightedShards):
        folder = tmp_path / strategy.name
        folder.mkdir()
        seen, figures = await shows(strategy, strategy.flaws[-1], {"redis": redis_url}, folder)
        assert seen
        sizes = [size for name, size in figures.counts.items() if name.startswith("waiting_")]
        assert sum(sizes) == 2_400
        spreads.append(max(sizes) / (sum(sizes) / 4))
    by_hash, by_weight = spreads
    assert by_weight < by_hash
