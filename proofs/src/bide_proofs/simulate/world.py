"""Plays a plan: processes with a real client and a real worker each, on a store that the world breaks and mends."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from hashlib import sha256
from itertools import count
from random import Random
from typing import Any

from bide.core.errors import BideError
from bide.testing.history import events as ev
from bide.testing.history.events import Event, encode, seen
from bide_proofs.simulate.loop import SimulatedLoop, run_simulated
from bide_proofs.simulate.plan import (
    TOPICS,
    UNHANDLED,
    Ask,
    Down,
    Drain,
    Full,
    Jump,
    Kill,
    Plan,
    Step,
    Stop,
    Storm,
    room_of,
)
from bide_proofs.simulate.server import Server, WallClock
from bide_proofs.simulate.slot import LOSSES, Slot

_DRAIN = 90.0
"""Seconds after the end within which everything has to be over."""
_LOOK = 1.0
_PLACE = re.compile(r" at /\S+:\d+")
"""Where asyncio says that a callback stands: on this machine, and not what went wrong."""
_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


class Played:
    """The result of a played plan."""

    def __init__(self) -> None:
        self.history: list[Event] = []
        self.calls: dict[str, int] = {}
        """Of each process that lived through the calm: calls to the store in it."""
        self.defects: list[str] = []
        """Errors that should never be raised."""

    def digest(self) -> str:
        """The same for two plays of one plan. Ids are drawn by the system, so they count by their order alone."""
        ids: dict[bytes, bytes] = {}
        sha = sha256()
        for event in self.history:
            sha.update(_ID.sub(lambda found: ids.setdefault(found[0], b"%d" % len(ids)), encode(event)))
        return sha.hexdigest()


def play(plan: Plan) -> Played:
    """The whole of it. Costs about a tenth of a second for each virtual minute."""
    random.seed(plan.seed)  # what the engine itself draws by lot
    played = Played()
    run_simulated(Random(f"turns {plan.seed}"), lambda loop: World(loop, plan, played).run())
    return played


class World:
    def __init__(self, loop: SimulatedLoop, plan: Plan, played: Played) -> None:
        setup = plan.setup
        self.loop = loop
        self.plan = plan
        self.played = played
        self.clock = WallClock(loop, setup.drift)
        self.server = Server(self.clock, setup.shards)
        self.storms: list[Storm] = []
        self.full = 0
        self.down = [0] * setup.shards
        self.again: dict[tuple[str, str], int] = defaultdict(int)
        self.delivered: dict[str, int] = defaultdict(int)
        """Deliveries that began, by life: what a handler does goes by it, lest one defer for ever."""
        self.calls = count(1)
        self.slots = {
            name: Slot(self, name, number)
            for number, name in enumerate(
                [f"client-{n}" for n in range(setup.clients)] + [f"worker-{n}" for n in range(setup.workers)]
            )
        }

    def say(self, event: Event) -> None:
        self.played.history.append(event)

    def time_ns(self) -> int:
        return round(self.loop.time() * 1e9)

    def fault(self, what: str) -> None:
        self.say(ev.Fault(self.time_ns(), what))

    async def run(self) -> None:
        setup = self.plan.setup
        room, own_clock = sum(map(room_of, TOPICS)), not setup.by_caller
        self.say(ev.Header("simulated", 0, setup.cap, LOSSES, room=room, own_clock=own_clock))
        self.loop.set_exception_handler(self._defect)
        for slot in self.slots.values():
            slot.start()
        self._next(0)
        await asyncio.sleep(setup.calm / 1000)
        self._mend()
        before = {name: slot.calls() for name, slot in self.slots.items()}
        await asyncio.sleep((setup.length - setup.calm) / 1000)
        for name, slot in self.slots.items():
            if slot.life == before[name][0]:
                self.played.calls[name] = slot.calls()[1] - before[name][1]
        last = Slot(self, "worker-last", 0, topics=(UNHANDLED,))
        last.start()
        for _ in range(int(_DRAIN / _LOOK)):
            if not any(record.state.live for record in self.server.records()):
                break
            await asyncio.sleep(_LOOK)
        await asyncio.sleep(_LOOK)  # what was answered is noted by whoever asked
        for record in self.server.records():
            self.say(ev.Left(self.time_ns(), self.clock.now(), record.topic, record.key, seen(record)))
        self.say(ev.End(self.time_ns(), self.clock.now(), True))

    def _next(self, place: int) -> None:
        """Take the steps whose time has come, from this one on; then wait for the next."""
        steps = self.plan.steps
        while place < len(steps) and steps[place].at / 1000 <= self.loop.time():
            self._take(steps[place])
            place += 1
        if place < len(steps):
            self.loop.call_at(steps[place].at / 1000, self._next, place)

    def _take(self, step: Step) -> None:
        if isinstance(step, Ask):
            self.slots[f"client-{step.client}"].ask(step)
        elif isinstance(step, Kill):
            self.slots[step.who].kill(step)
        elif isinstance(step, Stop):
            self.slots[step.who].stop(step.lasts)
        elif isinstance(step, Drain):
            self.slots[step.who].drain(step.back)
        elif isinstance(step, Storm):
            self.fault(f"storm over {step.who or 'all'}: {step}")
            self.storms.append(step)
            self._weather()
            self.loop.call_later(step.lasts / 1000, self._over, step)
        elif isinstance(step, Down):
            self.fault(f"shard {step.shard} is down for {step.lasts} ms")
            self.down[step.shard] += 1
            self.server.shards[step.shard].stop()
            self.loop.call_later(step.lasts / 1000, self._up, step.shard)
        elif isinstance(step, Full):
            self.fault(f"full for {step.lasts} ms")
            self.full += 1
            self.loop.call_later(step.lasts / 1000, self._room)
        else:
            assert isinstance(step, Jump)
            self.say(ev.Fault(self.time_ns(), f"the store's clock jumps by {step.by} s", self.clock.now()))
            self.clock.jump(step.by)

    def _over(self, storm: Storm) -> None:
        if storm in self.storms:
            self.storms.remove(storm)
            self._weather()

    def _up(self, shard: int) -> None:
        self.down[shard] -= 1
        if not self.down[shard]:
            self.server.shards[shard].start()

    def _room(self) -> None:
        self.full -= 1

    def _weather(self) -> None:
        """Set the effect of all storms together on each process; the worst of each kind counts."""
        for name, slot in self.slots.items():
            mine = [storm for storm in self.storms if storm.who in ("", name)]
            slot.weather.delay = max((storm.delay for storm in mine), default=0.0)
            slot.weather.loss = max((storm.loss for storm in mine), default=0.0)
            slot.weather.twice = max((storm.twice for storm in mine), default=0.0)
            slot.weather.deaf = any(storm.deaf for storm in mine)

    def _mend(self) -> None:
        """From here on nothing is broken."""
        self.fault("all is mended")
        self.storms.clear()
        self._weather()
        for slot in self.slots.values():
            slot.mend()

    def _defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, BideError):
            message = _PLACE.sub("", str(context.get("message")))
            self.played.defects.append(f"{message}: {error!r}")
