"""A store that fails on purpose: before a call (which then has no effect) or after it (the answer is lost)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from msgspec.structs import replace

from bide.core.records import Topic
from bide.ports import Features, Listening, OnTaken, OnWake, Store, StoreFacade
from bide.testing.virtual import VirtualLoop

Answered = TypeVar("Answered")
Fault = Callable[[str], BaseException | None]
"""Called with "add:before", "add:after", "lease:before", ...; returns an error to raise there, or None to go on."""


class _Deaf:
    async def close(self) -> None:
        """Do nothing: there is no subscription."""


class FaultyStore(StoreFacade):
    """A wrapper that adds faults, delays and lost notifications to a store. It stops virtual time during each call."""

    def __init__(
        self,
        store: Store,
        *,
        fault: Fault | None = None,
        latency: Callable[[str], float] | None = None,
        deaf: bool = False,
    ) -> None:
        super().__init__(store)
        self.fault: Fault = fault or (lambda _: None)
        self.latency = latency
        self.deaf = deaf
        """If true, subscriptions are accepted but every notification is lost."""
        self.calls: dict[str, int] = {}

    @property
    def features(self) -> Features:
        features = super().features
        return replace(features, wakes=None if features.wakes is None else self)

    async def around(self, operation: str, call: Callable[[], Awaitable[Answered]]) -> Answered:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self._raise(f"{operation}:before")
        if self.latency is not None:
            await asyncio.sleep(self.latency(operation))
        loop = asyncio.get_running_loop()
        with loop.hold() if isinstance(loop, VirtualLoop) else contextlib.nullcontext():
            answer = await call()
        self._raise(f"{operation}:after")
        return answer

    def _raise(self, point: str) -> None:
        error = self.fault(point)
        if error is not None:
            raise error

    async def open(self) -> None:
        await self.around("open", self.inner.open)

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        wakes = self.inner.features.wakes
        return _Deaf() if self.deaf or wakes is None else await wakes.listen(topics, on_wake, on_taken)
