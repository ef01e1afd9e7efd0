"""S1, S2 and S3, the strategies within one database, step by step. `bide lab run` shows flaws."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import Effects, Held, die
from tests.waiting import until

from bide_lab.strategies.scans import s02_cron_batch
from bide_lab.strategies.scans.s01_table_scan import Serial
from bide_lab.strategies.scans.s02_cron_batch import Hourly
from bide_lab.strategies.scans.s03_skip_locked import SkipLocked
from bide_lab.strategy import Item, now

KEYS = [f"k{number}" for number in range(120)]
"""More than a page."""


async def test_two_scanners_look_at_the_same_posts_and_publish_each_once(playing: Plays) -> None:
    async with playing(Serial, minute=600.0) as company:
        effects, both = Effects(), [await company.another() for _ in range(2)]
        await company.client.schedule([Item(key, now()) for key in KEYS])
        [blog] = company.client.blogs
        found = [[page async for page in one.pages(blog)] for one in both]
        for one, pages in zip(both, found, strict=True):
            for page in pages:
                await one.publish_all(blog, page, effects)
    assert [one.counts().get("published", 0) for one in both] == [len(KEYS), 0]
    assert [one.counts().get("looked_at_in_vain", 0) for one in both] == [0, len(KEYS)]
    assert {key: len(times) for key, times in effects.at.items()} == dict.fromkeys(KEYS, 1)


async def test_a_batch_does_all_that_is_due_and_waits_for_its_next_turn(
    monkeypatch: pytest.MonkeyPatch, playing: Plays
) -> None:
    """A task that comes due a moment after a turn is late by a whole period: only the next turn asks for it."""
    turns: list[int] = []

    async def turn(_: float) -> None:
        turns.append(len(effects.at))
        if len(turns) == 3:
            raise asyncio.CancelledError
        present.append(present[-1] + 3_600_000)

    present, effects = [now()], Effects()
    monkeypatch.setattr(s02_cron_batch, "now", lambda: present[-1])
    async with playing(Hourly) as company:
        first = present[0] + 3_600_000
        await company.client.schedule([Item("late", first + 1), *(Item(key, first) for key in KEYS)])
        monkeypatch.setattr("bide_lab.strategy.asyncio", SimpleNamespace(sleep=turn))
        with pytest.raises(asyncio.CancelledError):
            await company.client.run("worker", effects)
    assert turns == [0, len(KEYS), len(KEYS) + 1]


async def test_what_a_dead_worker_had_claimed_is_done_by_the_next(playing: Plays) -> None:
    async with playing(SkipLocked) as company:
        held, effects = Held(), Effects()
        await company.client.schedule([Item(key, now()) for key in KEYS[:30]])
        first = asyncio.create_task((await company.another()).claim(held))  # of a worker, several may share the tasks
        await until(lambda: held.at, "a claim")
        await company.start(effects)
        await die(first)
        await company.until_fired(effects, *KEYS[:30])

        async def nothing_is_left() -> bool:
            return not await company.client.pool.fetch(f"SELECT FROM {company.client.tasks}")

        await until(nothing_is_left, "the last commit")
    assert len(held.at) == 1
    assert all(len(times) == 1 for times in effects.at.values())
