"""Recurring tasks under faults: for each instant of the rule exactly one task, whatever dies, and when.

Each seed is one play of real workers on the simulated store, with two versions of a program that declare the same rule.
At each instant the fault of the seed strikes, from three seconds before to three seconds after: kill -9, an orderly
end, or a kill in the middle of one of the calls that matter; a successor starts 0.1 to 5 seconds later, as in a deploy.
Meanwhile messages are lost and repeated, and the store's clock jumps. Some seeds add an outage of three hours, or stop
the process for 78 minutes. The judge knows the rule and the policy, and compares tasks with instants.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

from bide.app import Bide
from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.recurrence.rules import Every
from bide.core.tasks import Task
from bide.settings import Settings
from bide.testing.clock import FIRST_INSTANT
from bide_proofs.harness.command import parser_of, tell, whole
from bide_proofs.simulate.link import Link, Weather, until_open
from bide_proofs.simulate.loop import Process, SimulatedLoop, run_simulated
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.server import Server, WallClock

PERIOD: Millis = 30_000
_INSTANTS = 6
_MOST = 5
_MOMENTS = [(operation, stage) for operation in ("lease", "settle", "add") for stage in ("sent", "applied", "answered")]
_OUTAGE, _STOPPED = 3 * 3600.0, 78 * 60.0
_world = copy_context()


class Play:
    """One seed: the faults and their times, and which task each occurrence was given to."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        chance = self.chance = Random(f"recurring {seed}")
        self.loop, self.seed = loop, seed
        self.clock = WallClock(loop)
        self.server = Server(self.clock, 1)
        self.kind = chance.choices(("straddle", "outage", "stop"), (8, 1, 1))[0]
        self.period = 10_000 if self.kind == "stop" else PERIOD
        self.overlap = chance.choice(("skip", "queue", "allow", "cancel_running"))
        self.catch_up = chance.choice(("latest", "all", "none") if self.kind != "straddle" else ("latest", "all"))
        self.jitter = timedelta(seconds=chance.choice((0, 0, 2)))
        self.takes = chance.choice((0.0, 0.0, 0.05, 1.0))
        self.changes = chance.random() < 0.5
        self.weather = Weather(loss=chance.choice((0, 0, 0.1)), twice=chance.choice((0, 0, 0.2)))
        self.seen: dict[Millis, dict[str, float]] = defaultdict(dict)
        """For each occurrence the tasks that were delivered for it, by id, each with its first start."""
        self.early: list[str] = []
        self.before = self.stopped_at = 0.0
        """When the interruption ended, and when the process was stopped, in seconds."""
        self.processes = 0
        self.alive: list[Program] = []

    async def run(self) -> None:
        self.start(version=1)
        for number in range(1, _INSTANTS + 1):
            await self.until(number * PERIOD / 1000 + self.chance.uniform(-3, 3))
            self.strike()
        if self.kind != "straddle":
            await self.interrupt()
        await asyncio.sleep(4 * self.period / 1000)

    async def until(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds - self.loop.time()))

    def start(self, version: int) -> None:
        self.alive = [one for one in self.alive if one.process.alive]
        self.alive.append(Program(self, version))

    def strike(self) -> None:
        """Kill or end a process, or kill it in the middle of a call; a successor takes its place."""
        chance, version = self.chance, 2 if self.changes and self.chance.random() < 0.5 else 1
        if chance.random() < 0.2:
            self.clock.jump(chance.uniform(-2, 2))
        if chance.random() < 0.3:
            self.start(version)  # two versions side by side
        victim = chance.choice(self.alive)
        how = chance.random()
        if how < 0.4:
            victim.process.kill()
        elif how < 0.7:
            victim.drain()
        else:
            victim.dies_at = chance.choice(_MOMENTS)
        self.loop.call_later(chance.uniform(0.1, 5), self.start, version, context=_world)

    async def interrupt(self) -> None:
        """All processes die and another starts three hours later, or the only one stands still for 78 minutes."""
        await asyncio.sleep(self.chance.uniform(10, 20))
        for one in self.alive:
            one.process.kill()
        self.weather.loss = self.weather.twice = 0
        if self.kind == "outage":
            await asyncio.sleep(_OUTAGE)
            self.before = self.loop.time()
            self.start(version=1)
            for _ in range(3):
                await asyncio.sleep(self.chance.uniform(0.1, 3))
                self.alive[-1].process.kill()
                self.start(version=1)
            return
        self.start(version=1)
        await asyncio.sleep(25 + self.chance.uniform(0, 10))
        [one] = [one for one in self.alive if one.process.alive]
        self.stopped_at = self.loop.time()
        one.process.stop()
        await asyncio.sleep(_STOPPED)
        self.before = self.loop.time()
        one.process.go_on()

    # --- judging

    def wrongs(self) -> list[str]:
        """The contradictions to the promise: exactly one task for each instant, never early; old ones by the policy."""
        wrong = list(self.early)
        wrong += [f"occurrence {at}: {len(ids)} tasks" for at, ids in sorted(self.seen.items()) if len(ids) != 1]
        wrong += [f"occurrence {at} is none of the rule's" for at in self.seen if at % self.period]
        start = FIRST_INSTANT
        expected = {start + PERIOD * number for number in range(1, _INSTANTS + 1)}
        if self.kind == "stop":
            expected = {start + self.period * number for number in range(1, 3)}
        if missing := sorted(expected - self.seen.keys()):
            wrong.append(f"occurrences {missing} did not run")
        return wrong + (self._old() if self.kind != "straddle" else [])

    def _old(self) -> list[str]:
        """Check the occurrences of the outage that ran after it."""
        since = self.stopped_at if self.kind == "stop" else self.before - _OUTAGE
        first, last = (FIRST_INSTANT + round(1000 * at) for at in (since, self.before))
        if (self.kind, self.overlap, self.catch_up) == ("stop", "queue", "none"):
            last -= 60_000  # what came while one ran is queued, and may be late by a minute
        old = sorted(
            at for at, ids in self.seen.items() if first < at <= last - 5_000 and min(ids.values()) > self.before - 1
        )
        starts = [at for ids in self.seen.values() for at in ids.values()]
        ran_on = any(at <= self.stopped_at < at + self.takes for at in starts)  # so what came meanwhile overlaps
        most = {"none": 0, "latest": 1, "all": _MOST}[self.catch_up]
        if ran_on and self.overlap == "queue":
            most = _MOST
        if len(old) > most:
            return [f"{self.kind}, {self.catch_up}: {len(old)} old occurrences ran, the first {old[:3]}"]
        if self.catch_up == "all" and len(old) < _MOST - 2 and not (ran_on and self.overlap == "skip"):
            return [f"{self.kind}, all: only {len(old)} old occurrences ran: {old[:3]}"]
        return []


class Program:
    """One process: a worker of an app that declares the rule."""

    def __init__(self, play: Play, version: int) -> None:
        play.processes += 1
        self.play, self.version = play, version
        self.process = Process(play.loop, f"program-{play.processes}")
        self.dies_at: tuple[str, str] | None = None
        self._ends: asyncio.Future[None] = play.loop.create_future()
        wall = WallClock(play.loop)
        wall.jump(play.chance.choice((0.0, 0.0, -90.0, 3_600.0)))
        link = Link(
            play.server, self.process, Random(f"{play.seed} {self.process.who}"), weather=play.weather, wall=wall,
            by_caller=False, full=lambda: False, moment=self._moment,
        )  # fmt: skip
        self.process.start(self._work(link, wall))

    def drain(self) -> None:
        if not self._ends.done():
            self._ends.set_result(None)

    def _moment(self, operation: str, stage: str) -> None:
        if self.dies_at == (operation, stage):
            self.process.kill()

    async def _work(self, link: Link, wall: WallClock) -> None:
        play = self.play
        settings = Settings(store="memory:", lease=10_000, max_sleep=1_000, history="off", grace=500, keep_done=0)
        app = Bide(link, settings=settings, clock=wall)
        payload = self.version
        rule = Every(timedelta(milliseconds=play.period), jitter=play.jitter)
        how: dict[str, Any] = {"overlap": play.overlap, "catch_up": play.catch_up, "most": _MOST}
        app.recurs(rule, topic="tick", payload=payload, **how)(self._handle)
        await until_open(app.open)
        worker = app.worker(name=self.process.who)
        await until_open(worker.__aenter__)
        await self._ends
        with suppress(StoreError):
            await worker.__aexit__(None, None, None)
            await app.close()
        self.process.kill()

    async def _handle(self, task: Task[Any]) -> None:
        play = self.play
        assert task.occurrence is not None
        at = round(task.occurrence.timestamp() * 1000)
        if (leased := task.token // 1000) < at:  # by the store's clock
            play.early.append(f"occurrence {at} was leased at {leased}")
        play.seen[at].setdefault(task.id, play.loop.time())
        await asyncio.sleep(play.takes)


def wrongs(seed: int, mutant: str | None = None) -> list[str]:
    """Play one seed, perhaps of a mutant, and return what is wrong with it."""
    random.seed(seed)
    plays: list[Play] = []

    async def main(loop: SimulatedLoop) -> None:
        loop.set_exception_handler(lambda loop, context: None)
        plays.append(Play(loop, seed))
        await plays[0].run()

    with applied(mutant) if mutant else nullcontext():
        try:
            run_simulated(Random(f"turns {seed}"), main)
        except Exception as error:  # noqa: BLE001 - nothing may stop a play
            return [f"the play ended with {error!r}"]
    return plays[0].wrongs()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("bide_proofs.simulate.recurring", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=whole, default=1_000, help="how many")
    parser.add_argument("--mutant", choices=MUTANTS, help="break bide in this way first")
    parser.add_argument("--processes", type=whole, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    logging.disable()
    seeds = range(given.seed, given.seed + given.seeds)
    with ProcessPoolExecutor(given.processes, initializer=logging.disable) as pool:
        found = dict(zip(seeds, pool.map(partial(wrongs, mutant=given.mutant), seeds, chunksize=10), strict=True))
    return tell({"seeds": given.seeds}, {"seed": [f"{seed}: {said[0][:300]}" for seed, said in found.items() if said]})


if __name__ == "__main__":
    sys.exit(main())
