"""Workloads in which the one who schedules is the one who dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from bide.lab.actor import Step
from bide.lab.figures import Figures
from bide.lab.journal import Call
from bide.lab.judge import judge
from bide.lab.stage import Stage, keys_of
from bide.lab.strategy import Strategy, now
from bide.lab.workload import Workload


class Writer(Workload):
    """Clients schedule as fast as they can, and are killed by SIGKILL one after another in the middle of it.

    All tasks are due at one instant after the last kill. What a client was never answered may have been done or not:
    where the strategy keeps the caller's own data (`Strategy.committed`), those decide. What is committed is owed.
    """

    name = "writer"
    about = "clients are killed -9 while they schedule; what they had committed has to fire"
    callers = 32

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("it is one process: see restarted" if strategy.in_process else "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        writers, each = (3, 2_000) if quick else (12, 5_000)
        chance = random.Random(7)
        await stage.start()
        clients = [await stage.client() for _ in range(writers)]
        due = now() + writers * 300 + 700
        for number, client in enumerate(clients):
            begin = now()
            steps = [Step(0, "schedule", [(key, due - begin)]) for key in keys_of(each, f"w{number}-")]
            playing = asyncio.create_task(client.play(begin, steps, callers=self.callers))
            # the connections are made first; then at any moment, which is what a deployment or the kernel takes
            await asyncio.sleep(0.15 + 0.15 * chance.random())
            client.kill()
            await playing
        committed = await stage.director.committed()
        calls = [_as_committed(call, committed) for call in stage.calls()]
        owed = sum(call.answered is not None for call in calls)
        await stage.until_fired(owed + 1, by=due / 1000 + stage.patience)
        firings = stage.firings()
        figures = judge(calls, firings, until=due * 1_000_000).figures()
        figures.counts = {
            **await stage.counts(), "kills": writers, "committed": owed,
            "unanswered": sum(call.answered is None for call in stage.calls()),
            **({"fired_without_a_row": len({one.key for one in firings} - committed.keys())} if committed else {}),
        }  # fmt: skip
        return figures


def _as_committed(call: Call, committed: Mapping[str, int]) -> Call:
    """A call whose row is there has been done, though nobody was left to hear of it."""
    if call.answered is None and call.key in committed:
        return call._replace(answered=call.begun, done=True)
    return call
