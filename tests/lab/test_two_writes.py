"""S19, the order in one store and its timer in another: what a death in between costs each variant, and what Redis does
that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import FAR, Effects, die, named
from tests.waiting import until

from bide_lab.strategies.bide.s24_bide import OnPostgres
from bide_lab.strategies.writes.s19_two_writes import Async, NoCare, NoTimer, OneTransaction, Open, Outbox, Sync
from bide_lab.strategy import Item, now
from bide_proofs.servers.process import free_port


async def death(*_: Any) -> None:
    raise asyncio.CancelledError


async def timers(one: NoCare) -> list[bytes]:
    found: list[bytes] = await one.redis.zrange(one.timers, 0, -1)
    return found


async def count(one: NoCare, table: str) -> int:
    found: int = await one.pool.fetchval(f"SELECT count(*) FROM {one.table(table)}")
    return found


async def test_a_relay_that_dies_before_its_commit_relays_again(playing: Plays) -> None:
    class Dies(Outbox):
        dies = True

        async def set_timers(self, items: Sequence[Item]) -> None:
            await super().set_timers(items)
            if self.dies:
                await death()

    async with playing(Dies) as company:
        client, effects = company.client, Effects()
        await client.schedule([Item("1", now())])
        assert (await count(client, "outbox"), await timers(client)) == (1, [])
        with pytest.raises(asyncio.CancelledError):
            await client.catch_up()
        assert (await count(client, "outbox"), await timers(client)) == (1, [b"1"])
        client.dies = False
        assert (await client.catch_up(), await client.catch_up()) == (1, 0)
        await company.start(effects, "poller")
        await company.until_fired(effects, "1")
        assert (await count(client, "outbox"), await timers(client)) == (0, [])
    assert len(effects.at["1"]) == 1


async def test_a_death_within_the_one_transaction_leaves_neither_order_nor_task(
    playing: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = OnPostgres.schedule

    async def dies(self: OnPostgres, items: Sequence[Item]) -> None:
        await schedule(self, items)
        await death()

    async with playing(OneTransaction) as company:
        monkeypatch.setattr(OnPostgres, "schedule", dies)
        with pytest.raises(asyncio.CancelledError):
            await company.client.schedule([Item("1", now() + FAR)])
        assert await company.client.committed() == {}
        assert not await company.client.fire_now("1")


@asynccontextmanager
async def without_redis(strategy: type[NoCare], playing: Plays) -> AsyncIterator[NoCare]:
    """Nobody listens where it expects Redis to be."""
    async with playing(strategy) as company:
        real = company.client.setting
        astray = strategy(replace(real, urls={**real.urls, "redis": f"redis://127.0.0.1:{free_port()}/0"}))
        await astray.open()
        try:
            yield astray
        finally:
            await astray.close()
        assert await timers(company.client) == []


@pytest.mark.parametrize(("strategy", "orders"), [(NoCare, {"1": 7}), (Sync, {}), (Open, {})], ids=named)
async def test_without_redis_the_caller_is_told(strategy: type[NoCare], orders: dict[str, int], playing: Plays) -> None:
    async with without_redis(strategy, playing) as astray:
        with pytest.raises(NoTimer, match="1 timers were not set"):
            await astray.schedule([Item("1", 7)])
        assert await astray.committed() == orders


async def test_without_redis_the_daemon_raises_an_alarm_and_goes_on(playing: Plays, redis_url: str) -> None:
    async with without_redis(Async, playing) as astray:
        await astray.schedule([Item("1", now() + FAR)])
        assert list(await astray.committed()) == ["1"]
        daemon = asyncio.create_task(astray.run("compensator", Effects()))
        try:
            await until(lambda: astray.counts().get("alarms"), "an alarm")
            there = Async(replace(astray.setting, urls={**astray.setting.urls, "redis": redis_url})).redis_client()
            astray.redis = await astray.closing.enter_async_context(there)
            await until(lambda: astray.counts().get("compensated"), "the second write")
        finally:
            await die(daemon)
        assert await timers(astray) == [b"1"]
        await astray.redis.unlink(astray.timers)
        assert astray.counts() == {"alarms": 1, "compensated": 1}
