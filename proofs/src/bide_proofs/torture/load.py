"""The load of a client: random verbs at a given rate, over keys that are used again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from bide.core.errors import PartlyFailed, StoreError
from bide.core.names import new_id
from bide.core.records import NewTask, Token
from bide.testing.history.recording import RecordedClient
from bide_proofs.torture.clock import SharedClock
from bide_proofs.torture.topics import DYING, FAILING, TOPICS, WEIGHTS

KEYS = 40
"""Keys of each topic that are used again."""
GROUPS = 12
CALLERS = 6
"""Coroutines of one client process, each of which asks one thing at a time."""
NEAR = 5.0
"""Seconds: most delays are at most this, and none is longer than what a client is told."""
_CONFLICTS = ("replace", "replace", "replace", "keep", "earliest", "latest", "refuse")
_HASTY, _HASTE = 0.06, 0.02
"""The part of the verbs whose caller is cancelled, and the most seconds after which."""
_FRESH = 0.4
"""The part of the schedules that are of a key which nobody has used."""


class Caller:
    """One coroutine of a client."""

    def __init__(self, client: RecordedClient, clock: SharedClock, chance: random.Random, farthest: float) -> None:
        self._client = client
        self._clock = clock
        self._chance = chance
        self._farthest = farthest
        self._tokens: dict[tuple[str, str], Token] = {}
        verbs: Mapping[Callable[[], Awaitable[list[Any]]], int] = {
            self._schedule: 42, self._schedule_many: 4, self._reschedule: 10, self._fire: 8, self._cancel: 9,
            self._redrive: 8, self._get: 8, self._shift: 2, self._cancel_group: 1,
        }  # fmt: skip
        self._verbs, self._weights = list(verbs), list(verbs.values())

    async def run(self, rate: float, over: asyncio.Event) -> None:
        """Ask so many times a second, less what the store makes it wait, until it is over."""
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._chance.expovariate(rate))
                return
            [verb] = self._chance.choices(self._verbs, self._weights)
            patience = self._chance.uniform(0, _HASTE) if self._chance.random() < _HASTY else None
            # it is in the history, and the next one is asked all the same, as by people
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(patience):
                    self._remember(await verb())

    # the verbs; what they answer is remembered

    async def _schedule(self) -> list[Any]:
        return [await self._client.schedule(self._new())]

    async def _schedule_many(self) -> list[Any]:
        try:
            return list(await self._client.schedule_many([self._new() for _ in range(self._chance.randint(2, 10))]))
        except PartlyFailed as partly:
            return list(partly.answers)

    async def _reschedule(self) -> list[Any]:
        (topic, key), options = self._aim()
        delay = self._delay()
        when: dict[str, Any] = {"delay": delay} if self._chance.random() < 0.7 else {"at": self._at(delay)}
        return [await self._client.reschedule(topic, key, **when, **options)]

    async def _fire(self) -> list[Any]:
        (topic, key), options = self._aim()
        return [await self._client.fire_now(topic, key, **options)]

    async def _cancel(self) -> list[Any]:
        (topic, key), options = self._aim()
        return [await self._client.cancel(topic, key, **options)]

    async def _redrive(self) -> list[Any]:
        topic, key = self._pair(self._chance.choice((DYING, DYING, FAILING)))
        delay = timedelta(milliseconds=self._chance.choice((0, 50, 700)))
        return [await self._client.redrive(topic, key, delay=delay)]

    async def _get(self) -> list[Any]:
        return [await self._client.get(*self._pair())]

    async def _shift(self) -> list[Any]:
        return list(await self._client.shift(self._group(), timedelta(seconds=self._chance.uniform(-4, 4))))

    async def _cancel_group(self) -> list[Any]:
        [topic] = self._chance.choices(TOPICS, WEIGHTS)
        return list(await self._client.cancel_group(self._group(), topic=topic))

    # what they are about

    def _new(self) -> NewTask:
        chance = self._chance
        topic, key = self._pair(fresh=_FRESH)
        delay = self._delay()
        when: dict[str, Any] = {"delay": delay} if chance.random() < 0.8 else {"at": self._at(delay)}
        return self._client.new(
            topic, key, key=key, on_conflict=chance.choice(_CONFLICTS),
            group=self._group() if chance.random() < 0.3 else None,
            deadline=self._at(delay + timedelta(seconds=chance.uniform(5, 20))) if chance.random() < 0.1 else None,
            **when,
        )  # fmt: skip

    def _delay(self) -> timedelta:
        chance = self._chance
        kind = chance.random()
        if kind < 0.2:
            return timedelta(0)
        return timedelta(
            milliseconds=round(1000 * chance.uniform(0, min(NEAR, self._farthest) if kind < 0.93 else self._farthest))
        )

    def _at(self, delay: timedelta) -> datetime:
        """So far from now by the store's clock: this process's own may be wrong."""
        return datetime.fromtimestamp(self._clock.now() / 1000, UTC) + delay

    def _pair(self, topic: str | None = None, *, fresh: float = 0.0) -> tuple[str, str]:
        chance = self._chance
        if topic is None:
            [topic] = chance.choices(TOPICS, WEIGHTS)
        return topic, new_id() if chance.random() < fresh else f"k{chance.randrange(KEYS)}"

    def _group(self) -> str:
        return f"g{self._chance.randrange(GROUPS)}"

    def _aim(self) -> tuple[tuple[str, str], dict[str, Any]]:
        """At any key; or at one that an answer has shown, and then also with its token, which may be an old one."""
        if not self._tokens or self._chance.random() < 0.5:
            return self._pair(), {}
        pair, token = self._chance.choice(list(self._tokens.items()))
        return pair, {"if_token": token} if self._chance.random() < 0.3 else {}

    def _remember(self, answers: Sequence[Any]) -> None:
        """The newest tokens of fifty tasks; an answer may be an error, or nothing."""
        for answer in answers:
            record = getattr(answer, "record", None)
            if record is not None:
                self._tokens[record.topic, record.key] = record.token
                if len(self._tokens) > 50:
                    self._tokens.pop(next(iter(self._tokens)))
