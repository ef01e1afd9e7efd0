"""S23: a beat: one process that sends each run to a broker, and keeps its last times in a file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from bide_lab.processes import RedisStrategy
from bide_lab.strategy import RUN_LOST, RUN_TWICE, Effect, Flaw, Harm, Recurrent, now, when

_SYNC = 180.0
"""Seconds of strategy time between two writes of the file."""


class OneBeat(RedisStrategy, Recurrent):
    """The next run is a period after the last was sent; the file is written after that, and not each time."""

    name = "S23-one"
    title = "one beat and a worker"
    roles = ("beat", "worker")
    nodes = 1
    loses = "what came due while the beat was down, and what a worker had popped"
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw("what comes due while the beat is down is never sent", "recurrence", RUN_LOST, Harm.LOST),
        Flaw("a beat that was killed sends again what it has forgotten", "recurrence", RUN_TWICE, Harm.TWICE),
        Flaw("each run is timed by the one before, so that lateness adds up and a restart shifts all that follow",
             "recurrence", when("p50", "half of them {p50:,.0f} ms late by the rule, {most:,.0f} ms at most", over=100),
             Harm.LATE),
    )  # fmt: skip

    async def run(self, role: str, effect: Effect) -> None:
        if role == "worker":
            async for due in self.popped(self.key("queue")):
                await effect("rule", int(due))
        path = self.setting.folder / "beat-schedule"
        path.touch()
        last, written = int(path.read_text() or self.nominal(now())), 0
        while True:
            await asyncio.sleep(max(0, last + self.every - now()) / 1000)
            last = now()
            await self.redis.rpush(self.key("queue"), self.nominal(last))
            self.counted["sent"] += 1
            if last - written >= self.setting.span(_SYNC) * 1000:
                path.write_text(str(last))
                written = last


class TwoBeats(OneBeat):
    """So that one may die."""

    name = "S23-two"
    title = "two beats and a worker"
    nodes = 2
    flaws = (Flaw("each beat sends every run", "recurrence", RUN_TWICE, Harm.TWICE),)
