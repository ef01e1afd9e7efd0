"""Every strategy does what it claims, and leaves nothing on its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from tests.lab.playing import FAR, Company, keeps_its_word, named, setting_of

from bide_lab.strategies import catalogue
from bide_lab.strategies.brokers.s11_timed_message import TimedMessage
from bide_lab.strategy import Item, Strategy, now
from bide_proofs.servers.redis import RedisServer

EARLY = {"S13-A", "S16-ring"}
"""Known for that: see test_timer_strategies.py, as for the others of S16, whose only delay is their time-out."""
EVERY = [one for one in catalogue().values() if one.name not in EARLY and not one.unfit]
ON_REDIS = [one for one in EVERY if tuple(one.needs) == ("redis",)]
_EVENTS = "notify-keyspace-events"


@pytest.fixture
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of the servers that the strategy under test needs. S8 changes a setting of its server, and has its own."""
    strategy: type[Strategy] = request.getfixturevalue("strategy")
    if strategy.name == "S8":
        with RedisServer(tmp_path / "redis") as server:
            yield {"redis": server.url}
    else:
        yield {kind: request.getfixturevalue(f"{kind}_url") for kind in strategy.needs}


@pytest.mark.parametrize("strategy", EVERY, ids=named)
async def test_it_does_what_it_claims(
    strategy: type[Strategy], urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bide_lab.strategies.scans.s01_table_scan._WINDOW", 1e6
    )  # seconds, however slow this machine is
    setting = setting_of(strategy, urls, tmp_path, minute=0.3, options={"hold": 600})
    await keeps_its_word(strategy, setting, ahead=3_000 if strategy is TimedMessage else 300)


@pytest.mark.parametrize("strategy", ON_REDIS, ids=named)
async def test_nothing_of_it_stays_on_the_server(
    strategy: type[Strategy], urls: dict[str, str], tmp_path: Path
) -> None:
    setting = setting_of(strategy, urls, tmp_path)
    with Redis.from_url(urls["redis"]) as redis:
        before = redis.config_get(_EVENTS)
        async with Company(strategy, setting) as company:
            await company.client.schedule([Item(f"k{number}", now() + FAR) for number in range(10)])
            assert list(redis.scan_iter(match=f"*{setting.prefix}*"))
        assert not list(redis.scan_iter(match=f"*{setting.prefix}*"))
        assert redis.config_get(_EVENTS) == before
