"""Real apps that live for a while in virtual time, recorded: where histories that are right come from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from random import Random
from typing import Any

from bide.app import Bide
from bide.core.errors import OutcomeUnknown, StoreError, StoreUnavailable
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry
from bide.core.records import Filter, OnConflict, Page
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.ports import Store
from bide.testing.clock import FIRST_INSTANT
from bide.testing.faults import FaultyStore
from bide.testing.history import events as ev
from bide.testing.history.journal import Journal
from bide.testing.history.recording import RecordedClient, Recording
from bide.testing.virtual import VirtualClock, VirtualLoop, run_virtual

TOPICS = ("plain", "rough", "kept")
_STRAYS = ("add:after", "change:after", "settle:after", "lease:after", "extend:after")


class _Shared(FaultyStore):
    """One of several ways to a store, which outlasts them."""

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass


class World:
    """Some clients and workers on one store. `lossy`: how often an answer is lost."""

    def __init__(self, loop: VirtualLoop, chance: Random, store: Store, *, lossy: float = 0.0, keys: int = 12) -> None:
        self.loop = loop
        self.chance = chance
        self.keys = keys
        self.clock = VirtualClock(loop, FIRST_INSTANT)
        self.events: list[ev.Event] = [ev.Header(store=type(store).__name__, losses=2)]
        self.journal = Journal(self.events.append, time_ns=lambda: round(loop.time() * 1e9), clock=self.clock.now)
        self.lossy = lossy
        self.inner = store
        self.hung = False

    def app(self, who: str) -> Bide:
        store = _Shared(self.inner, fault=self.fault, latency=lambda _: self.chance.choice((0.0, 0.001, 0.02)))
        app = Bide(store, clock=self.clock, lease="3s", max_sleep="1s", keep_dead="30s", concurrency=5)
        app.instruments.append(Recording(self.journal, who))

        @app.handler("plain", retry=Fixed("2s", tries=3))
        async def plain(task: Task[Any]) -> Outcome | None:
            return await self.handle(task)

        @app.handler("rough", retry=Fixed("1s", tries=2), concurrency=2, losses=2, timeout="8s")
        async def rough(task: Task[Any]) -> Outcome | None:
            return await self.handle(task)

        @app.handler("kept", keep_done="20s", keep_cancelled="10s")
        async def kept(task: Task[Any]) -> Outcome | None:
            return await self.handle(task)

        return app

    def fault(self, point: str) -> BaseException | None:
        if point in _STRAYS and self.chance.random() < self.lossy:
            return OutcomeUnknown(f"{point} lost")
        if point.endswith(":before") and self.chance.random() < self.lossy / 4:
            return StoreUnavailable(f"{point} refused")
        return None

    async def handle(self, task: Task[Any]) -> Outcome | None:
        await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.5, 2.0, 5.0)))
        lot = self.chance.random()
        if lot < 0.1:
            raise ValueError("no luck")
        if lot < 0.2:
            return Defer("3s")
        if lot < 0.25:
            return Retry(delay="1s")
        if lot < 0.3:
            return Dead("no use")
        if lot < 0.35 and task.attempt == 1:
            return Done(again_in="4s")
        return None

    async def ask(self, client: RecordedClient) -> None:
        chance = self.chance
        topic, key = chance.choice(TOPICS), f"k{chance.randrange(self.keys)}"
        delay = timedelta(milliseconds=chance.choice((0, 1, 500, 2_000, 7_000)))
        lot = chance.random()
        with suppress(StoreError):
            if lot < 0.5:
                deadline = self.clock.now() + 9_000 if chance.random() < 0.2 else None
                new = client.new(
                    topic, delay=delay, key=key, on_conflict=chance.choice(list(OnConflict)), group=f"g{key[-1]}",
                    deadline=None if deadline is None else timedelta(seconds=9),
                )  # fmt: skip
                await client.schedule(new)
            elif lot < 0.62:
                seen = await client.get(topic, key)
                token = None if seen is None or chance.random() < 0.5 else seen.token
                await client.reschedule(topic, key, delay=delay, if_token=token)
            elif lot < 0.68:
                await client.fire_now(topic, key)
            elif lot < 0.8:
                await client.cancel(topic, key)
            elif lot < 0.85:
                await client.redrive(topic, key, delay=delay)
            elif lot < 0.95:
                await client.get(topic, key)
            elif lot < 0.98:
                await client.shift(f"g{key[-1]}", timedelta(seconds=1))
            else:
                await client.cancel_group(f"g{key[-1]}", topic=topic)

    async def live(self, seconds: float, rate: float, drained: bool) -> None:
        client_apps = [self.app(f"client-{number}") for number in range(2)]
        worker_apps = [self.app(f"worker-{number}") for number in range(2)]
        async with AsyncExitStack() as living:
            for app in client_apps:
                await living.enter_async_context(app)
            for number, app in enumerate(worker_apps):
                await living.enter_async_context(app.worker(name=f"w{number}"))
            clients = [RecordedClient(app, self.journal, f"client-{n}") for n, app in enumerate(client_apps)]

            async def play(client: RecordedClient) -> None:
                while self.loop.time() < seconds:
                    await self.ask(client)
                    await asyncio.sleep(self.chance.expovariate(rate))

            await asyncio.gather(*(play(client) for client in clients for _ in range(2)))
            self.lossy = 0.0
            if drained:
                await asyncio.sleep(200)
        cursor: str | None = None
        now = self.journal.time_ns()
        while True:
            found = await self.inner.find(Filter(), Page(limit=500, cursor=cursor))
            self.events += [ev.Left(now, self.clock.now(), one.topic, one.key, ev.seen(one)) for one in found.tasks]
            cursor = found.cursor
            if cursor is None:
                break
        self.events.append(ev.End(self.journal.time_ns(), self.clock.now(), drained))


def played(
    seed: int,
    make: Callable[[], Store],
    *,
    seconds: float = 30,
    rate: float = 4,
    lossy: float = 0.0,
    keys: int = 12,
    drained: bool = True,
) -> list[ev.Event]:
    """The history of one world."""

    async def main(loop: VirtualLoop) -> list[ev.Event]:
        store = make()
        await store.open()
        world = World(loop, Random(seed), store, lossy=lossy, keys=keys)
        await world.live(seconds, rate, drained)
        await store.close()
        return world.events

    random.seed(seed)  # when workers sweep, is no matter of the seed otherwise
    return run_virtual(main)
