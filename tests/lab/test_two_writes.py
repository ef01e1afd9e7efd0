"""S19, the order in one store and its timer in another: what each variant claims, and what a death in between costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.playing import keeps_its_word, named, setting_of
from tests.servers.ports import free_port

from bide.lab.figures import Figures
from bide.lab.stage import Stage
from bide.lab.strategies.s19_two_writes import Async, NoCare, NoTimer, OneTransaction, Open, Outbox, Sync
from bide.lab.strategy import Item, Setting, Strategy, now
from bide.lab.workloads.writes import Writer

pytestmark = pytest.mark.real_time

_PATIENCE = 10.0


class OneDeath(Writer):
    """One writer is killed, with some 32 calls under way."""

    quick_kills = 1


@pytest.fixture
def urls(postgres_url: str, redis_url: str) -> dict[str, str]:
    return {"postgres": postgres_url, "redis": redis_url}


def folder_of(strategy: type[Strategy], folder: Path) -> Path:
    own = folder / strategy.name
    own.mkdir()
    return own


async def written(strategy: type[Strategy], urls: dict[str, str], folder: Path) -> Figures:
    async with Stage(strategy, setting_of(strategy, urls, folder)) as stage:
        figures = await OneDeath().play(stage, quick=True)
    assert figures.counts["unanswered"] > 0, "it was killed in the middle"
    assert figures.expected > 0
    assert (figures.early, figures.duplicated) == (0, 0)
    return figures


@asynccontextmanager
async def opened(strategy: type[NoCare], setting: Setting) -> AsyncIterator[NoCare]:
    one = strategy(setting)
    await one.open()
    try:
        await one.prepare()
        yield one
        await one.clear()
    finally:
        await one.close()


@asynccontextmanager
async def without_redis(strategy: type[NoCare], urls: dict[str, str], folder: Path) -> AsyncIterator[NoCare]:
    """Nobody listens where it expects Redis to be."""
    real = setting_of(strategy, urls, folder)
    async with opened(strategy, real) as one:
        astray = strategy(replace(real, urls={**real.urls, "redis": f"redis://127.0.0.1:{free_port()}/0"}))
        await astray.open()
        try:
            yield astray
        finally:
            await astray.close()
        assert await one.redis.zcard(one.timers) == 0


async def test_they_do_what_they_claim(urls: dict[str, str], tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as together:  # they wait for most of the time
        for strategy in (NoCare, Sync, Async, Open, Outbox, OneTransaction):
            together.create_task(keeps_its_word(strategy, urls, folder_of(strategy, tmp_path)))


async def test_a_death_between_the_two_writes_loses_unless_they_are_one(urls: dict[str, str], tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as together:
        played: dict[type[Strategy], asyncio.Task[Figures]] = {
            strategy: together.create_task(written(strategy, urls, folder_of(strategy, tmp_path)))
            for strategy in (NoCare, Sync, Async, Outbox, OneTransaction)
        }
    for strategy, one in played.items():
        figures = one.result()
        assert figures.counts["fired_without_a_row"] == 0
        if strategy.flaws:
            assert "orders have no timer after 1 writers were killed" in strategy.flaws[0].seen(figures)
        else:
            assert figures.lost == 0, strategy


async def test_a_death_before_the_commit_leaves_a_timer_without_an_order(urls: dict[str, str], tmp_path: Path) -> None:
    class Dies(Open):
        async def set_timers(self, items: Sequence[Item]) -> None:
            await super().set_timers(items)
            raise asyncio.CancelledError

    async with opened(Dies, setting_of(Open, urls, tmp_path)) as strategy:
        with pytest.raises(asyncio.CancelledError):
            await strategy.schedule([Item("1", now())])
        assert await strategy.committed() == {}
        assert await strategy.redis.zrange(strategy.timers, 0, -1) == [b"1"]
    assert "3 timers fired" in Open.flaws[0].seen(Figures(counts={"fired_without_a_row": 3}))


@pytest.mark.parametrize(("strategy", "orders"), [(NoCare, {"1": 7}), (Sync, {}), (Open, {})], ids=named)
async def test_without_redis_the_caller_is_told(
    strategy: type[NoCare], orders: dict[str, int], urls: dict[str, str], tmp_path: Path
) -> None:
    async with without_redis(strategy, urls, tmp_path) as astray:
        with pytest.raises(NoTimer, match="1 timers were not set"):
            await astray.schedule([Item("1", 7)])
        assert await astray.committed() == orders


async def test_without_redis_the_daemon_raises_an_alarm_and_goes_on(urls: dict[str, str], tmp_path: Path) -> None:
    async with without_redis(Async, urls, tmp_path) as astray:
        await astray.schedule([Item("1", now() + 60_000)])
        assert list(await astray.committed()) == ["1"]
        daemon = asyncio.create_task(astray.run("compensator", Never()))
        try:
            await until(astray, "alarms")
            lost, astray.redis = astray.redis, Async(replace(astray.setting, urls=urls)).redis_client()
            await lost.aclose()
            await until(astray, "compensated")
        finally:
            daemon.cancel()
        assert await astray.redis.zrange(astray.timers, 0, -1) == [b"1"]
        await astray.redis.unlink(astray.timers)
        assert astray.counts() == {"alarms": 1, "compensated": 1}


async def until(strategy: Strategy, name: str) -> None:
    """Until it has counted one."""
    by = time.monotonic() + _PATIENCE
    while not strategy.counts().get(name):
        assert time.monotonic() < by, f"no {name}"
        await asyncio.sleep(0.02)


class Never:
    """No effect is to come of it."""

    async def __call__(self, key: str, due: int) -> None:
        raise AssertionError(f"{key} is not due")

    def blocking(self, key: str, due: int) -> None:
        raise AssertionError(f"{key} is not due")
