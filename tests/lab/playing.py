"""The processes of a strategy, all played within this one, so that it can be said what each of them has done when
another does something. How fast that is decides nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.waiting import not_before, pause, until

from bide_lab.strategies.expiry.s08_expiry_events import ExpiryEvents
from bide_lab.strategy import Flaw, Item, Setting, Strategy, now

FAR = 3_600_000
"""Milliseconds."""
S = TypeVar("S", bound=Strategy)


def setting_of(strategy: type[Strategy], urls: Mapping[str, str], folder: Path, **more: Any) -> Setting:
    """With names of its own; `more` are further fields."""
    return Setting(
        urls={kind: urls[kind] for kind in strategy.needs}, prefix=f"lab_{secrets.token_hex(5)}", folder=folder, **more
    )


class Effects:
    """The firings by key: each time, in nanoseconds since the epoch."""

    def __init__(self) -> None:
        self.at: dict[str, list[int]] = {}

    async def __call__(self, key: str, due: int) -> None:
        self.blocking(key, due)

    def blocking(self, key: str, due: int) -> None:
        self.at.setdefault(key, []).append(time.time_ns())


class Held(Effects):
    """Effects that end only when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def __call__(self, key: str, due: int) -> None:
        await super().__call__(key, due)
        await self.let_go.wait()


class Company(Generic[S]):
    """A client of the strategy and its consumers. At the end they have ended, and what the strategy made is gone."""

    def __init__(self, strategy: type[S], setting: Setting) -> None:
        self.client = strategy(setting)
        self._strategy, self._setting = strategy, setting
        self._consumers: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Company[S]:
        self._stack.push_async_callback(self.client.close)
        await self.client.open()
        self._stack.push_async_callback(self.client.clear)
        await self.client.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def another(self) -> S:
        """As another process has it."""
        one = self._strategy(self._setting)
        self._stack.push_async_callback(one.close)
        await one.open()
        return one

    async def start(self, effect: Effects, *roles: str, one: S | None = None) -> list[asyncio.Task[None]]:
        """Consumers, each as a process of its own unless it is `one`; of each role unless `roles` are given."""
        started = []
        for role in roles or self._strategy.roles:
            own = one or (self.client if self._strategy.in_process else await self.another())
            task = asyncio.create_task(own.run(role, effect))
            self._stack.push_async_callback(die, task)
            started.append(task)
        self._consumers += started
        await asyncio.sleep(0)
        if isinstance(self.client, ExpiryEvents):  # what expires before they listen they are never told of
            await until(self._is_heard, "the subscription")
        return started

    async def _is_heard(self) -> bool:
        assert isinstance(self.client, ExpiryEvents)
        return bool(await self.client.redis.pubsub_channels("__keyevent@*__:expired"))

    def is_sound(self) -> bool:
        """Raises what a consumer failed with."""
        for task in self._consumers:
            if task.done() and not task.cancelled():
                task.result()
        return True

    async def until_fired(self, effects: Effects, *keys: str) -> None:
        await until(lambda: self.is_sound() and effects.at.keys() >= set(keys), f"the effects of {keys}")


async def die(consumer: asyncio.Task[Any]) -> None:
    """It is cancelled until it ends: a driver loses a cancellation that comes just as an answer does."""
    while not consumer.done():
        consumer.cancel()
        await asyncio.wait([consumer], timeout=1)
    if not consumer.cancelled():
        consumer.result()


async def keeps_its_word(strategy: type[Strategy], setting: Setting, *, ahead: int = 300, count: int = 20) -> None:
    """Tasks `ahead` milliseconds from now fire once each and not early; and whatever of move, cancel and fire now the
    strategy claims does what it says: a moved one fires at its new time alone, a cancelled one cannot be made to fire.
    """
    has = [verb for verb in ("cancel", "fire_now", "reschedule") if verb not in strategy.cannot]
    async with Company(strategy, setting) as company:
        client, effects = company.client, Effects()
        await company.start(effects)
        due = {f"k{number}": now() + ahead + 5 * number for number in range(count)}
        await client.schedule([Item(*one) for one in due.items()])
        for verb in has:
            await client.schedule([Item(verb, now() + FAR)])
        if "reschedule" in has:
            due["reschedule"] = now() + ahead + 200
            assert await client.reschedule(Item("reschedule", due["reschedule"]))
        if "cancel" in has:
            assert await client.cancel("cancel")
            assert "reschedule" not in has or not await client.reschedule(Item("cancel", now()))
            assert "fire_now" not in has or not await client.fire_now("cancel")
        if "fire_now" in has:
            due["fire_now"] = now()
            assert await client.fire_now("fire_now")
        await company.until_fired(effects, *due)
        await pause(0.2 + setting.span(strategy.again), why="what is met twice, or was cancelled, must not fire")
        company.is_sound()
    assert effects.at.keys() == due.keys()
    for key, times in effects.at.items():
        assert len(times) == 1, key
        not_before(times[0], due[key] * 1_000_000, key)


def named(given: object) -> str | None:
    """The id of a parameter: strategies by name, flaws by workload."""
    if isinstance(given, type) and issubclass(given, Strategy):
        return given.name
    return given.workload if isinstance(given, Flaw) else None
