"""S9 and S10, on a broker: hops, messages and queues that go away, and a client that can be cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import FAR, Effects, die, setting_of
from tests.waiting import until

from bide_lab.strategies.brokers.s09_delay_levels import LEVELS, DelayLevels, level_for
from bide_lab.strategies.brokers.s10_ttl_dead_letter import QueuePerDelay
from bide_lab.strategy import Item, now


@pytest.mark.parametrize(
    ("seconds", "hops"),
    [(1, [1]), (60, [60]), (125, [120, 5]), (156, [120, 30, 5, 1]), (239, [180, 30, 10, 10, 5, 1, 1, 1, 1])],
)
async def test_a_delay_is_relayed_over_the_largest_levels_that_fit(
    seconds: int, hops: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is a level takes one hop; by a clock that the levels alone move, since a late machine takes others."""
    passed, sent = 0, []

    async def waited(_: DelayLevels, level: str, __: Item, *, waits: int, hop: int) -> None:
        nonlocal passed
        passed += waits
        sent.append(int(level))
        assert hop == len(sent)

    monkeypatch.setattr(DelayLevels, "send", waited)
    monkeypatch.setattr("bide_lab.strategies.brokers.s09_delay_levels.now", lambda: passed)
    strategy = DelayLevels(setting_of(DelayLevels, {"rabbitmq": ""}, tmp_path, minute=60.0))
    item = Item("k", seconds * 1000)
    while passed < item.due:
        await strategy.send_for(item, hop=len(sent) + 1)
    assert (sent, passed) == (hops, item.due)
    await strategy.close()


def test_the_level_is_the_largest_not_above_the_rest() -> None:
    assert len(LEVELS) == 18
    assert [level_for(rest) for rest in (5 * 3600, 3 * 3600, 3600, 239, 59, 1)] == [7200, 7200, 3600, 180, 30, 1]
    assert level_for(0) == 1, "what is shorter than every level waits for the smallest"


async def test_a_message_that_its_row_does_not_want_is_dropped_when_it_arrives(playing: Plays) -> None:
    """A task that is moved or cancelled leaves its message behind."""
    async with playing(DelayLevels) as company:
        client, consumer, effects, due = company.client, await company.another(), Effects(), now()
        await client.schedule([Item(key, due) for key in ("moved", "cancelled", "kept")])
        assert await client.reschedule(Item("moved", due + 1))
        assert await client.cancel("cancelled")

        async def all_four_arrive() -> bool:
            return await client._messages(client.queue("arrived")) == 4

        await until(all_four_arrive, "a message for each time that any was due")
        await company.start(effects, one=consumer)
        await company.until_fired(effects, "kept", "moved")
        await until(lambda: consumer.counts().get("superseded_dropped") == 2, "the two that nobody wants")
        assert not await client.reschedule(Item("kept", now() + FAR)), "it is done, so that it is too late"
        assert await client.left() == {"messages_left": 0, "queues": 19}
    assert {key: len(times) for key, times in effects.at.items()} == {"kept": 1, "moved": 1}


async def test_a_queue_for_each_delay_cures_that_and_goes_away_with_it(playing: Plays) -> None:
    async with playing(QueuePerDelay) as company:
        client, effects = company.client, Effects()
        [consumer] = await company.start(effects)
        await client.schedule([Item("long", now() + FAR)])
        await client.schedule([Item("short", now())])
        await company.until_fired(effects, "short")
        assert await client.left() == {"messages_left": 1, "queues": 3}
        await die(consumer)  # its client would declare again the queue that it reads
        await client.clear()
        assert await client.left() == {"messages_left": 0, "queues": 0}
    assert list(effects.at) == ["short"]


async def test_a_consumer_whose_connection_is_closed_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, playing: Plays
) -> None:
    """The client would wait for ever for a connection to say goodbye on."""
    monkeypatch.setattr("bide_lab.strategies.brokers.broker._GOODBYE", 0.05)
    async with playing(DelayLevels) as company:
        effects, one = Effects(), await company.another()
        [consumer] = await company.start(effects, one=one)
        await company.client.schedule([Item("k", now())])
        await company.until_fired(effects, "k")
        await one.close()
        consumer.cancel()
        await asyncio.wait([consumer], timeout=60)
        assert consumer.cancelled()
