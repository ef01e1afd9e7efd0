"""Workloads in which the one who schedules is the one who dies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

from bide_lab.actor import Step
from bide_lab.cast import Player
from bide_lab.figures import Figures
from bide_lab.journal import Call, whole_lines
from bide_lab.judge import judge
from bide_lab.stage import Stage, keys_of
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Workload

_CALLERS = 32
"""Calls of one client at a time."""
_KEYS = 5_000
"""More than a client schedules until it is killed."""
_AHEAD = 1_000
"""Milliseconds from a client's first call until its tasks are due; it lives for a quarter of that."""
_PER_SECOND = 3_000
"""Tasks that a strategy is given a second for, since many of them come due at once."""


class Writer(Workload):
    """Clients schedule as fast as they can, and are killed by SIGKILL one after another in the middle of it.

    The tasks of each are due together, some time after its death. What a client was never answered may have been done
    or not: where the strategy keeps the caller's own data (`Strategy.committed`), those decide. What is committed is
    owed.
    """

    name = "writer"
    about = "clients are killed -9 while they schedule; what they had committed has to fire"
    alone = False
    kills, quick_kills = 12, 4

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("it is one process: see restarted" if strategy.in_process else "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        writers = self.quick_kills if quick else self.kills
        chance = random.Random(7)
        await stage.start()
        clients = [await stage.client() for _ in range(writers)]
        begin = now()
        for number, client in enumerate(clients):
            begin = now()
            steps = [Step(0, "schedule", [(key, _AHEAD)]) for key in keys_of(_KEYS, f"w{number}-")]
            playing = asyncio.create_task(client.play(begin, steps, callers=_CALLERS))
            await _warm(client)
            await asyncio.sleep(0.1 * chance.random())
            client.kill()
            await playing
        due = begin + _AHEAD
        promised = (await _owed(stage))[0]
        await _until_fired(stage, promised, by=due / 1000 + stage.patience + len(promised) / _PER_SECOND)
        await stage.rest()
        promised, calls, rows = await _owed(stage)  # again: a server may finish what a dead client had sent
        firings = stage.firings()
        figures = judge(calls, firings, until=due * 1_000_000).figures()
        figures.counts = {
            **await stage.counts(), "kills": writers, "committed": len(promised),
            "unanswered": sum(call.answered is None for call in stage.calls()),
        }  # fmt: skip
        if rows:
            figures.counts["fired_without_a_row"] = len({one.key for one in firings} - rows.keys())
        return figures


async def _owed(stage: Stage) -> tuple[set[str], list[Call], Mapping[str, int]]:
    """The keys that have to fire, the calls as the rows that are there answer them, and these rows."""
    rows = await stage.director.committed()
    calls = [_as_committed(call, rows) for call in stage.calls()]
    return {call.key for call in calls if call.done}, calls, rows


async def _warm(client: Player) -> None:
    """Until each of its callers has been answered twice: connecting takes longer than a call, and is no call's part."""
    for _ in range(200):
        if whole_lines(client.spec.journal).count(b"\n< ") >= 2 * _CALLERS:
            return
        await asyncio.sleep(0.01)


async def _until_fired(stage: Stage, keys: set[str], *, by: float) -> None:
    """Until all of these have; it does not help that others did, which should not."""
    while keys - {firing.key for firing in stage.firings()}:
        if time.time() > by:
            return
        await asyncio.sleep(0.1)


def _as_committed(call: Call, committed: Mapping[str, int]) -> Call:
    """A call whose row is there has been done, though nobody was left to hear of it."""
    if call.answered is None and call.key in committed:
        return call._replace(answered=call.begun, done=True)
    return call
