"""bide in the lab, on each of its stores: it has to do what every other strategy is asked, and show no flaw."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.playing import keeps_its_word, named, setting_of

from bide.lab.catalogue import chosen
from bide.lab.stage import Stage
from bide.lab.strategies.s20_bide import OnRedis
from bide.lab.strategy import Strategy
from bide.lab.workloads import WORKLOADS

pytestmark = pytest.mark.real_time

STORES = chosen(["bide"])


@pytest.fixture
def urls(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the servers that the strategy under test needs."""
    strategy: type[Strategy] = request.getfixturevalue("strategy")
    return {kind: request.getfixturevalue(f"{kind}_url") for kind in strategy.needs}


@pytest.mark.parametrize("strategy", STORES, ids=named)
async def test_it_does_what_it_claims(strategy: type[Strategy], urls: dict[str, str], tmp_path: Path) -> None:
    await keeps_its_word(strategy, urls, tmp_path)


@pytest.mark.parametrize("strategy", [one for one in STORES if not one.in_process], ids=named)
async def test_two_workers_do_each_task_once(strategy: type[Strategy], urls: dict[str, str], tmp_path: Path) -> None:
    async with Stage(strategy, setting_of(strategy, urls, tmp_path)) as stage:
        figures = await WORKLOADS["two"].play(stage, quick=True)
    assert (figures.expected, figures.fired, figures.lost) == (300, 300, 0)
    assert (figures.duplicated, figures.early, figures.revived) == (0, 0, 0)


async def test_nothing_is_left_on_the_server(redis_url: str, tmp_path: Path) -> None:
    from redis.asyncio import Redis

    setting = setting_of(OnRedis, {"redis": redis_url}, tmp_path)
    async with Redis.from_url(redis_url) as redis:
        async with Stage(OnRedis, setting) as stage:
            client = await stage.client()
            await client.fill(100, ahead=3_600_000)
            assert [key async for key in redis.scan_iter(match=f"*{setting.prefix}*")]
        assert not [key async for key in redis.scan_iter(match=f"*{setting.prefix}*")]
