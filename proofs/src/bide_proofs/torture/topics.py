"""Topics of a run and their handlers: one for each way in which a delivery can go."""

from __future__ import annotations

import asyncio
import random
import select
from typing import Any

from bide.app import Bide
from bide.core.outcomes import Dead, Defer, Done
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.misuse import WAYS, misbehave

STEADY, FAILING, SLOW, HANGING, DEFERRING, DYING, AGAIN, THREADED, MISBEHAVING = TOPICS = (
    "steady", "failing", "slow", "hanging", "deferring", "dying", "again", "threaded", "misbehaving",
)  # fmt: skip
WEIGHTS = (40, 12, 6, 4, 10, 8, 12, 8, 6)
"""How often a client chooses each."""
LEASE = 2.5
"""Seconds. What a dead worker held comes back after this; slow handlers run for longer."""
CAP = 1.0
LOSSES = 10
KEPT = 5.0
"""Seconds for which what ended is remembered, whatever its end; of `again` nothing is."""
LONGEST_WORK = 6.0


def app_on(url: str) -> Bide:
    """An app as every process of a run opens it; the environment gives no more than a token."""
    kept = f"{KEPT:g}s"
    settings = Settings.from_env(
        lease=f"{LEASE:g}s", max_sleep=f"{CAP:g}s", losses=LOSSES, keep_done=kept, keep_cancelled=kept, keep_dead=kept,
        grace=f"{LONGEST_WORK + 2:g}s",
    )  # fmt: skip
    app = Bide(url, settings=settings)
    app.retain(AGAIN, done="0s", cancelled="0s")
    return app


def handle(app: Bide, chance: random.Random) -> None:
    """Give `app` the handlers of all topics."""

    @app.handler(STEADY, keep_done=f"{KEPT:g}s")
    async def steady(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(0, 0.02))

    @app.handler(FAILING, retry=Fixed("300ms", tries=4))
    async def failing(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(0, 0.02))
        if chance.random() < 0.5:
            raise OSError("it fails half of the time")

    @app.handler(SLOW)
    async def slow(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(1, LONGEST_WORK))

    @app.handler(HANGING, timeout="1s", retry=Fixed("200ms", tries=3))
    async def hanging(task: Task[Any]) -> None:
        await asyncio.sleep(chance.choice((0.01, 3600)))

    @app.handler(MISBEHAVING, retry=Fixed("200ms", tries=3))
    async def misbehaving(task: Task[Any]) -> Any:
        await asyncio.sleep(chance.uniform(0, 0.02))
        return misbehave(chance.randrange(WAYS)) if chance.random() < 0.6 else None

    @app.handler(DEFERRING)
    async def deferring(task: Task[Any]) -> Defer | None:
        return Defer(f"{chance.randint(10, 2_000)}ms") if chance.random() < 0.5 else None

    @app.handler(DYING)
    async def dying(task: Task[Any]) -> Dead | None:
        return Dead("it dies more often than not") if chance.random() < 0.7 else None

    @app.handler(AGAIN, keep_done="0s", keep_cancelled="0s")
    async def again(task: Task[Any]) -> Done | None:
        return Done(again_in=f"{chance.randint(20, 1_500)}ms") if chance.random() < 0.6 else None

    @app.handler(THREADED, concurrency=8)
    def threaded(task: Task[Any]) -> None:
        select.select([], [], [], chance.uniform(0, 0.05))  # sleeps, also where libfaketime spoils time.sleep
