"""Play a plan: processes, each with a real client or worker of bide, on a store that breaks and is repaired.

The `World` takes the steps of the plan. A `Slot` is the place of one process in it: when the process dies, another
takes its place.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any

from bide.app import Bide
from bide.core.answers import Answer
from bide.core.errors import BideError, StoreError
from bide.core.instants import Millis
from bide.core.outcomes import Dead, Defer, Done, Retry
from bide.core.records import Result, Token
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.settings import Settings
from bide.testing.history import events as ev
from bide.testing.history.events import Died, Event, seen
from bide.testing.history.recording import Journal, RecordedClient, Recording
from bide_proofs.misuse import misbehave
from bide_proofs.simulate.link import Link, PartedLink, Weather, until_open
from bide_proofs.simulate.loop import Process, SimulatedLoop, run_simulated
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

LOSSES = 10
TIMEOUT: Millis = 3_000
_MOST_AGAIN = 3
"""The number of times that the tasks of one key start their next life themselves."""
_BACK: Millis = 300
_world = copy_context()
"""The world's context, for callbacks that act on a process but do not belong to it."""
_DRAIN = 90.0
"""Seconds after the end within which all tasks must have ended."""
_POLL_EVERY = 1.0
_PLACE = re.compile(r" at /\S+:\d+")
"""A callback's location in asyncio's messages, which depends on the machine."""


@dataclass
class Played:
    """The result of a played plan."""

    history: list[Event] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    """The number of calls to the store during the calm, for each process that lived through it."""
    defects: list[str] = field(default_factory=list)
    """Errors that should never be raised."""


def play(plan: Plan) -> Played:
    """Play the whole plan. Takes about a tenth of a second for each virtual minute."""
    random.seed(plan.seed)  # for the engine's own random choices
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
        """The number of deliveries begun, by life. A handler's act depends on it, so that no task defers endlessly."""
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
        for _ in range(int(_DRAIN / _POLL_EVERY)):
            if not any(record.state.live for record in self.server.records()):
                break
            await asyncio.sleep(_POLL_EVERY)
        await asyncio.sleep(_POLL_EVERY)  # let the callers record their answers
        for record in self.server.records():
            self.say(ev.Left(self.time_ns(), self.clock.now(), record.topic, record.key, seen(record)))
        self.say(ev.End(self.time_ns(), self.clock.now(), True))

    def _next(self, place: int) -> None:
        """Take all due steps from this one on; then wait for the next."""
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
        """Apply all current storms to each process; the worst of each kind counts."""
        for name, slot in self.slots.items():
            mine = [storm for storm in self.storms if storm.who in ("", name)]
            slot.weather.delay = max((storm.delay for storm in mine), default=0.0)
            slot.weather.loss = max((storm.loss for storm in mine), default=0.0)
            slot.weather.twice = max((storm.twice for storm in mine), default=0.0)
            slot.weather.deaf = any(storm.deaf for storm in mine)

    def _mend(self) -> None:
        """Repair everything: from here on nothing is broken."""
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


class Slot:
    """The place of a process: when it dies, another takes its place."""

    def __init__(self, world: World, name: str, number: int, topics: tuple[str, ...] = TOPICS) -> None:
        setup = world.plan.setup
        self.world = world
        self.name = name
        self.topics = topics
        self.weather = Weather()
        self.life = 0
        self._wall = WallClock(world.loop)
        self._wall.jump(setup.skews[number % len(setup.skews)])
        self._process: Process
        self._link: Link
        self._client: RecordedClient | None = None
        self._ends: asyncio.Future[None] | None = None
        self._at: Kill | None = None
        self._back: asyncio.TimerHandle | None = None
        self._tokens: dict[tuple[str, str], int] = {}

    def calls(self) -> tuple[int, int]:
        return self.life, self._link.calls

    def start(self) -> None:
        world, setup = self.world, self.world.plan.setup
        self._back = None
        self.life += 1
        self._process = process = Process(world.loop, f"{self.name}.{self.life}")
        make = PartedLink if setup.parted else Link
        self._link = make(
            world.server, process, Random(f"{world.plan.seed} {process.who}"), weather=self.weather,
            wall=world.clock if setup.by_caller else self._wall, by_caller=setup.by_caller,
            full=lambda: world.full > 0, moment=self._moment,
        )  # fmt: skip
        self._client, self._ends = None, None
        process.start(self._work() if self.name.startswith("worker") else self._serve())

    # --- its faults

    def kill(self, step: Kill) -> None:
        if step.operation:
            self._at = step
        else:
            self._die(step.back, "killed")

    def _moment(self, operation: str, moment: str) -> None:
        at = self._at
        if at is not None and at.operation == operation and at.moment == moment:
            self._at = None
            self._die(at.back, f"killed as {operation} was {moment}")

    def _die(self, back: Millis, how: str) -> None:
        process = self._process
        if not process.alive:
            return
        process.kill()
        self.world.fault(f"{process.who} is {how}")
        self.world.say(Died(process.who, self.world.time_ns()))
        self._back = self.world.loop.call_later(back / 1000, self.start, context=_world)

    def stop(self, lasts: Millis) -> None:
        process = self._process
        if process.alive and not process.stopped:
            self.world.fault(f"{process.who} stands still for {lasts} ms")
            process.stop()
            self.world.loop.call_later(lasts / 1000, self._go_on, process, context=_world)

    def _go_on(self, process: Process) -> None:
        if process.stopped:
            self.world.fault(f"{process.who} goes on")
            process.go_on()

    def drain(self, back: Millis) -> None:
        """Ask the process to end in order, and start another later."""
        ends, process = self._ends, self._process
        if ends is None or ends.done() or not process.alive:
            return
        self.world.fault(f"{process.who} is asked to end")
        ends.set_result(None)

        def start() -> None:
            if self._process is not process or not process.alive:
                return  # it was killed meanwhile, and another has taken its place
            if self._client is not None:  # it has not ended yet
                self.world.loop.call_later(0.1, start, context=_world)
                return
            process.kill()
            self.start()

        self.world.loop.call_later(back / 1000, start, context=_world)

    def mend(self) -> None:
        self._at = None
        self._go_on(self._process)
        if self._back is not None:
            self._back.cancel()
            self.start()

    # --- what it does

    def _app(self) -> Bide:
        world, setup = self.world, self.world.plan.setup
        settings = Settings(
            store="memory:", lease=setup.lease, max_sleep=setup.cap, history="off", losses=LOSSES, grace=2_000,
            keep_done=4_000, keep_cancelled=0, keep_dead=20_000,
        )  # fmt: skip
        app = Bide(self._link, settings=settings, clock=world.clock if setup.by_caller else self._wall)
        process = self._process

        def say(event: Event) -> None:
            if process.alive:
                world.say(event)

        journal = Journal(say, time_ns=world.time_ns, clock=world.clock.now, calls=world.calls)
        app.instruments.append(Recording(journal, self._process.who))
        app.retain("beat", done=timedelta(0), cancelled=timedelta(seconds=15))
        self._client = RecordedClient(app, journal, self._process.who)
        return app

    async def _serve(self) -> None:
        """Run a client, which stays open until it dies."""
        app = self._app()
        client, self._client = self._client, None
        await until_open(app.open)
        self._client = client
        await self.world.loop.create_future()

    async def _work(self) -> None:
        app = self._app()
        for topic in self.topics:
            app.handler(
                topic, retry=Fixed("800ms", tries=3), timeout=timedelta(milliseconds=TIMEOUT),
                concurrency=room_of(topic), losses=LOSSES,
            )(self._handle)  # fmt: skip
        await until_open(app.open)
        worker = app.worker(name=self._process.who)
        await until_open(worker.__aenter__)
        self._ends = self.world.loop.create_future()
        await self._ends
        await worker.__aexit__(None, None, None)
        await app.close()
        self._client = None

    async def _handle(self, task: Task[Any]) -> Any:
        """Act as the payload says for this delivery of the life: a word, perhaps with milliseconds."""
        world, client = self.world, self._client
        assert client is not None
        world.delivered[task.id] += 1
        does = task.payload["does"]
        word, _, number = does[min(world.delivered[task.id], len(does)) - 1].partition(":")
        pause = timedelta(milliseconds=int(number or 0))
        seconds, lease = pause / timedelta(seconds=1), world.plan.setup.lease
        app, topic, key = client.app, task.topic, task.key
        if word == "ok":
            if seconds:
                await asyncio.sleep(seconds)
        elif word == "fail":
            await asyncio.sleep(0.01)
            raise OSError("it fails")
        elif word == "retry":
            raise Retry("not now", delay=pause)
        elif word == "defer":
            raise Defer(pause)
        elif word == "dead":
            raise Dead("it will never work")
        elif word == "hang":
            await asyncio.sleep(TIMEOUT / 1000 + 30)
        elif word == "stubborn":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(TIMEOUT / 1000 + 2)
            await asyncio.sleep(1)
        elif word == "long":
            await asyncio.sleep(min(TIMEOUT, 1.5 * lease) / 1000 - 0.05)
        elif word == "kill":
            if self._before_calm(0):
                self._die(_BACK, "killed by its handler")
                await world.loop.create_future()
        elif word == "block":  # a handler that blocks the event loop stops the whole process
            if self._before_calm(lease + lease // 2):
                self.stop(lease + lease // 2)
            await asyncio.sleep(0)
        elif word == "odd":
            await asyncio.sleep(0.01)
            return misbehave(int(number))
        elif word == "again":
            world.again[topic, key] += 1
            if world.again[topic, key] <= _MOST_AGAIN:
                return Done(again_in=pause)
        else:
            with suppress(StoreError):
                if word == "self":
                    await client.schedule(app.new(topic, {"does": ["ok"]}, key=key, delay=pause))
                elif word == "next":
                    new = app.new(topic, {"does": ["ok"]}, key=f"{key}n", delay=pause, on_conflict="keep")
                    await client.schedule(new)
                else:
                    assert word == "cancel"
                    await client.cancel(topic, key)
        return None

    def _before_calm(self, lasts: Millis) -> bool:
        """True if an act that lasts this long ends before the calm, in which no process may die or stand still."""
        return self.world.loop.time() * 1000 + lasts < self.world.plan.setup.calm

    def ask(self, step: Ask) -> None:
        """Let the client make this call, if it is running."""
        if self._client is not None and self._process.alive:
            asking = self._process.start(self._ask(self._client, step))
            if step.patience is not None:
                self.world.loop.call_later(step.patience / 1000, asking.cancel, context=self._process.context.copy())

    async def _ask(self, client: RecordedClient, step: Ask) -> None:
        token = self._tokens.get((step.topic, step.keys[0])) if step.known else None
        with suppress(StoreError):
            for answer in await _answers(client, step, token):
                if answer.record is not None:
                    self._of_its_group(step, answer)
                    self._tokens[answer.record.topic, answer.record.key] = answer.record.token

    def _of_its_group(self, step: Ask, answer: Answer) -> None:
        """Check that a verb over a group changes only tasks of that group."""
        record, changed = answer.record, (Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED)
        if step.verb not in ("shift", "cancel_group") or record is None or answer.result not in changed:
            return
        if record.group != step.group:
            what = f"{step.verb} of {step.group} changed {record.topic}/{record.key}, which is of {record.group}"
            self.world.played.defects.append(what)


async def _answers(client: RecordedClient, step: Ask, token: Token | None) -> Sequence[Answer]:
    """Make the call of `step`. Raises StoreError."""
    topic, key, delay = step.topic, step.keys[0], timedelta(milliseconds=step.delay)
    if step.verb in ("schedule", "many"):
        deadline = None if step.deadline is None else timedelta(milliseconds=max(step.deadline, step.delay + 2))
        how: dict[str, Any] = {"group": step.group, "on_conflict": step.conflict, "deadline": deadline}
        new = [
            # if there are several, each is due before the previous one
            client.new(topic, {"does": step.does}, key=one, delay=delay // place, **how)
            for place, one in enumerate(step.keys, 1)
        ]
        return [await client.schedule(new[0])] if len(new) == 1 else await client.schedule_many(new)
    match step.verb:
        case "move":
            return [await client.reschedule(topic, key, delay=delay, if_token=token)]
        case "fire":
            return [await client.fire_now(topic, key, if_token=token)]
        case "cancel":
            return [await client.cancel(topic, key, if_token=token)]
        case "redrive":
            return [await client.redrive(topic, key, delay=delay, if_token=token)]
        case "shift":
            return await client.shift(step.group or "", delay)
        case "cancel_group":
            return await client.cancel_group(step.group or "")
    assert step.verb == "get"
    await client.get(topic, key)
    return []
