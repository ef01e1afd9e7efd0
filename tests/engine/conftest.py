"""Fixtures of the engine's tests: an app on a memory store, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import pytest
from tests.servers.fixtures import Borrowed
from tests.waiting import elapse, in_virtual_time, virtual_time

from bide import Bide, Handler, Task
from bide.core.instants import Millis
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualClock, VirtualLoop


class Noted:
    """A handler of `topic` that takes so many seconds: the keys of what it was given, and when each began."""

    def __init__(self, world: World, app: Bide, topic: str, takes: float, **options: Any) -> None:
        self.keys: list[str] = []
        self.at: list[Millis] = []
        """In milliseconds since the start of the world."""

        @app.handler(topic, **options)
        async def handle(task: Task[Any]) -> None:
            self.keys.append(task.key)
            self.at.append(world.elapsed)
            await elapse(takes)

        self.handler: Handler[Any] = handle


class World:
    """One virtual timeline: its loop, its clock, a store with faults, and apps on it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.start = self.clock.now()

    def app(self, store: Any = None, **settings: Any) -> Bide:
        return Bide(store or self.store, clock=self.clock, **settings)

    def noted(self, app: Bide, topic: str, *, takes: float = 0.0, **options: Any) -> Noted:
        return Noted(self, app, topic, takes, **options)

    @property
    def elapsed(self) -> Millis:
        """Virtual milliseconds since the start."""
        return self.clock.now() - self.start

    async def until(self, condition: Callable[[], bool], patience: float = 86_400.0) -> None:
        """Let virtual time pass until `condition()`; fail after `patience` virtual seconds."""
        ends, step = virtual_time() + patience, 0.001
        while not condition():
            assert virtual_time() < ends, "it did not happen in time"
            await elapse(step)
            step = min(step * 1.05, 60.0)

    async def pause(self, seconds: float) -> None:
        await elapse(seconds)


P = ParamSpec("P")


def virtual(test: Callable[Concatenate[World, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test runs in virtual time, in the `World` that is its first argument; the others are fixtures."""

    @wraps(test)
    async def in_world(loop: VirtualLoop, /, *fixtures: P.args, **named: P.kwargs) -> None:
        await test(World(loop), *fixtures, **named)

    return in_virtual_time(in_world)


async def nothing(task: Task[Any]) -> None:
    """A handler."""


async def task_of(app: Bide, topic: str, key: str) -> Task[Any]:
    """A task that is there."""
    task = await app.get(topic, key)
    assert task is not None
    return task


def stores(*kinds: str) -> pytest.MarkDecorator:
    """The test runs on an empty store of each of these kinds, which its argument `store_url` names."""
    return pytest.mark.parametrize("store_url", kinds, indirect=True)


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    if request.param == "redis":
        server, name = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_namespace")
        return f"{server}?namespace={name}&shards=4"
    schemas: Borrowed = request.getfixturevalue(f"{request.param}_schemas")
    return schemas.url()
