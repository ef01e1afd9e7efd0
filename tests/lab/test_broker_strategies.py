"""S9 to S11, on brokers: what each claims, and what it is known for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.lab.playing import keeps_its_word, named, setting_of, shows

from bide.lab.strategies.s09_delay_levels import LEVELS, DelayLevels, level_for
from bide.lab.strategies.s10_ttl_dead_letter import OneQueue, QueuePerDelay
from bide.lab.strategies.s11_timed_message import TimedMessage
from bide.lab.strategy import Flaw, Item, Strategy, now

pytestmark = pytest.mark.real_time

VARIANTS: list[type[Strategy]] = [DelayLevels, OneQueue, QueuePerDelay]


@pytest.mark.parametrize("strategy", VARIANTS, ids=named)
async def test_it_does_what_it_claims(strategy: type[Strategy], rabbitmq_url: str, tmp_path: Path) -> None:
    await keeps_its_word(strategy, {"rabbitmq": rabbitmq_url}, tmp_path)


@pytest.mark.parametrize("strategy", [OneQueue, DelayLevels], ids=named)
async def test_its_flaws_are_seen(strategy: type[Strategy], rabbitmq_url: str, tmp_path: Path) -> None:
    seen, figures = await shows(strategy, strategy.flaws[0], {"rabbitmq": rabbitmq_url}, tmp_path)
    assert seen
    assert all(flaw.seen(figures) for flaw in strategy.flaws if flaw.workload == strategy.flaws[0].workload)
    assert (figures.lost, figures.duplicated, figures.early) == (0, 0, 0)
    if strategy is DelayLevels:
        assert figures.counts["messages_alive_per_task"] == figures.counts["moves_per_task"] + 1


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
    monkeypatch.setattr("bide.lab.strategies.s09_delay_levels.now", lambda: passed)
    strategy = DelayLevels(setting_of(DelayLevels, {"rabbitmq": ""}, tmp_path, minute=60.0))
    item = Item("k", seconds * 1000)
    while passed < item.due:
        await strategy.send_on(item, hop=len(sent) + 1)
    assert (sent, passed) == (hops, item.due)
    await strategy.close()


async def test_a_queue_for_each_delay_cures_the_block_at_the_head(rabbitmq_url: str, tmp_path: Path) -> None:
    flaw = Flaw(text="", workload="head", seen=lambda seen: str(seen.counts["short_late"]))
    seen, figures = await shows(QueuePerDelay, flaw, {"rabbitmq": rabbitmq_url}, tmp_path)
    assert seen == "0"
    assert (figures.expected, figures.lost, figures.early) == (101, 0, 0)


async def test_a_queue_that_was_made_for_a_delay_goes_away_with_it(rabbitmq_url: str, tmp_path: Path) -> None:
    strategy = QueuePerDelay(setting_of(QueuePerDelay, {"rabbitmq": rabbitmq_url}, tmp_path))
    await strategy.open()
    await strategy.prepare()
    try:
        await strategy.schedule([Item("a", now() + 50_000), Item("b", now() + 90_000)])
        assert await strategy.left() == {"messages_left": 2, "queues": 3}
    finally:
        await strategy.clear()
    assert await strategy.left() == {"messages_left": 0, "queues": 0}
    await strategy.close()


async def test_a_message_that_its_row_does_not_want_is_dropped_when_it_arrives(
    rabbitmq_url: str, tmp_path: Path
) -> None:
    setting = setting_of(DelayLevels, {"rabbitmq": rabbitmq_url}, tmp_path)
    due, moved = now() + 1_000, now() + 1_400
    fired: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def effect(key: str, due: int) -> None:
        fired.put_nowait((key, due))

    async with _ready(DelayLevels(setting)) as strategy, _consuming(strategy, effect):
        await strategy.schedule([Item("moved", due), Item("cancelled", due), Item("kept", due)])
        assert await strategy.reschedule(Item("moved", moved))
        assert await strategy.cancel("cancelled")
        assert [await fired.get(), await fired.get()] == [("kept", due), ("moved", moved)]
        assert strategy.counts()["superseded_dropped"] == 2
        assert await strategy.left() == {"messages_left": 0, "queues": 19}
        assert not await strategy.reschedule(Item("kept", moved)), "it is done, so that it is too late"


async def test_a_consumer_whose_connection_is_closed_can_be_cancelled(
    rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would wait for ever for a connection to say goodbye on."""
    monkeypatch.setattr("bide.lab.servers.rabbitmq._GOODBYE", 0.05)
    fired = asyncio.Event()

    async def effect(key: str, due: int) -> None:
        fired.set()

    strategy = DelayLevels(setting_of(DelayLevels, {"rabbitmq": rabbitmq_url}, tmp_path))
    async with AsyncExitStack() as ends:
        ready = await ends.enter_async_context(_ready(strategy))
        async with _consuming(ready, effect):
            await strategy.schedule([Item("k", now())])
            await fired.wait()
            await ends.aclose()


@asynccontextmanager
async def _consuming(strategy: DelayLevels, effect: Any) -> AsyncIterator[None]:
    """It is at work; in the end, whatever happened, it is not any more."""
    consumer = asyncio.create_task(strategy.run("worker", effect))
    try:
        yield
    finally:
        consumer.cancel()
        await asyncio.wait([consumer], timeout=10)
        assert consumer.cancelled()


@asynccontextmanager
async def _ready(strategy: DelayLevels) -> AsyncIterator[DelayLevels]:
    await strategy.open()
    await strategy.prepare()
    try:
        yield strategy
    finally:
        await strategy.clear()
        await strategy.close()


async def test_a_timed_message_does_what_it_claims(rocketmq_url: str, tmp_path: Path) -> None:
    await keeps_its_word(TimedMessage, {"rocketmq": rocketmq_url}, tmp_path, ahead=3_000)


@pytest.mark.parametrize("flaw", TimedMessage.flaws, ids=named)
async def test_the_flaws_of_timed_messages_are_seen(flaw: Flaw, rocketmq_url: str, tmp_path: Path) -> None:
    seen, figures = await shows(TimedMessage, flaw, {"rocketmq": rocketmq_url}, tmp_path)
    assert seen
    assert (figures.lost, figures.revived, figures.early) == (0, 0, 0)


def test_the_level_is_the_largest_not_above_the_rest() -> None:
    assert len(LEVELS) == 18
    assert [level_for(rest) for rest in (5 * 3600, 3 * 3600, 3600, 239, 59, 1)] == [7200, 7200, 3600, 180, 30, 1]
    assert level_for(0) == 1, "what is shorter than every level waits for the smallest"
