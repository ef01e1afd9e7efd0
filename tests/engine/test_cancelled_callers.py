"""A caller that is cancelled at any of its awaits harms nobody else: every verb, every store, connected or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.cancelling import each_await
from tests.engine.conftest import stores
from tests.waiting import PATIENCE

from bide import Bide, Task
from bide.core.answers import Answer
from bide.testing.proxy import Act, FaultProxy

Verb = Callable[[Bide, str], Coroutine[Any, Any, Any]]
TOPIC = "mail"


async def schedule(app: Bide, key: str) -> Any:
    return await app.schedule(TOPIC, key, key=key, delay="1h")


async def schedule_many(app: Bide, key: str) -> Any:
    return await app.schedule_many([app.new(TOPIC, key, key=f"{key}/{n}", delay="1h") for n in range(12)])


async def reschedule(app: Bide, key: str) -> Any:
    return await app.reschedule(TOPIC, "known", delay="2h")


async def cancel(app: Bide, key: str) -> Any:
    return await app.cancel(TOPIC, key)


async def shift(app: Bide, key: str) -> Any:
    return await app.shift("family", "1h")


async def get(app: Bide, key: str) -> Any:
    return await app.get(TOPIC, "known")


async def find(app: Bide, key: str) -> Any:
    return [task async for task in app.find(group="family")]


VERBS: tuple[Verb, ...] = (schedule, schedule_many, reschedule, cancel, shift, get, find)


async def everybody_is_answered(app: Bide, key: str) -> None:
    """The next callers of each kind get their answers."""
    async with asyncio.timeout(PATIENCE):
        assert (await app.schedule(TOPIC, key, key=key, delay="1h")).ok
        many = [app.new(TOPIC, None, key=f"{key}:{n}", delay="1h") for n in range(8)]
        assert len(await app.schedule_many(many)) == 8
        assert (await app.reschedule(TOPIC, key, delay="2h")).ok
        assert await app.get(TOPIC, key) is not None


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Bide]:
    """An app with some tasks. Whatever hangs within it, its close too, ends with a TimeoutError."""
    async with asyncio.timeout(5 * PATIENCE), Bide(url) as app:
        await app.schedule(TOPIC, None, key="known", group="family", delay="1h")
        await app.schedule(TOPIC, None, key="brother", group="family", delay="1h")
        yield app


@stores("memory", "sqlite", "redis", "postgres", "mysql")
@pytest.mark.parametrize("verb", VERBS)
async def test_the_next_callers_are_answered(store_url: str, verb: Verb) -> None:
    async with opened(store_url) as app:
        for point in each_await():
            ended = await point.cancel(verb(app, f"{point}"))
            assert not isinstance(ended, Exception), f"{point}: {ended!r}"
            await everybody_is_answered(app, f"after {point}")


@stores("redis", "postgres", "mysql")
@pytest.mark.parametrize("verb", VERBS)
async def test_the_next_callers_are_answered_though_a_connection_was_lost_just_then(store_url: str, verb: Verb) -> None:
    parts = urlsplit(store_url)
    assert parts.hostname is not None
    assert parts.port is not None
    async with FaultProxy(parts.hostname, parts.port) as proxy:
        place = parts.netloc.replace(f":{parts.port}", f":{proxy.port}")
        async with opened(urlunsplit(parts._replace(netloc=place))) as app:
            for point in each_await():
                proxy.fault(Act.LOSE_REPLY)
                await point.cancel(verb(app, f"{point}"))
                await proxy.heal()
                await everybody_is_answered(app, f"after {point}")


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_what_they_asked_for_is_done_once_or_not_at_all(store_url: str) -> None:
    """Of callers that were cancelled somewhere in `schedule`, whose tasks are due at once."""
    async with opened(store_url) as app:
        seen: list[str] = []

        @app.handler("now")
        async def deliver(task: Task[str]) -> None:
            seen.append(task.key)

        ends = {
            f"{point}": await point.cancel(app.schedule("now", "", key=f"{point}", delay=timedelta(0)))
            for point in each_await()
        }
        async with app.worker() as worker:
            await worker.until_empty()
        assert len(seen) == len(set(seen))
        assert {key for key, ended in ends.items() if isinstance(ended, Answer)} <= set(seen)
