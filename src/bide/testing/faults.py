"""A store that fails on purpose: before a call (nothing was done) or after it (done, and the answer lost)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.ports import COUNTED, Features, Heard, Listening, Pending, Store
from bide.testing.virtual import VirtualLoop

Answered = TypeVar("Answered")
Fault = Callable[[str], BaseException | None]
"""Asked with "add:before", "add:after", "lease:before", ...: an error to raise there, or None to go on."""


class _Deaf:
    async def close(self) -> None:
        """Nothing was subscribed."""


class FaultyStore:
    """Any store, with faults, delays and lost wake-ups. Holds virtual time still during each call."""

    def __init__(
        self,
        store: Store,
        *,
        fault: Fault | None = None,
        latency: Callable[[str], float] | None = None,
        deaf: bool = False,
    ) -> None:
        self.inner = store
        self.fault: Fault = fault or (lambda _: None)
        self.latency = latency
        self.deaf = deaf
        """True: subscriptions are taken and never served, so every notification is lost."""
        self.calls: dict[str, int] = {}

    @property
    def features(self) -> Features:
        """Of the inner store those that have faults here too: notifications, workers and the event log."""
        inner = self.inner.features
        return Features(
            wakes=None if inner.wakes is None else self,
            workers=None if inner.workers is None else self,
            events=None if inner.events is None else self,
        )

    async def _call(self, name: str, verb: Callable[[], Awaitable[Answered]]) -> Answered:
        self.calls[name] = self.calls.get(name, 0) + 1
        self._raise(f"{name}:before")
        if self.latency is not None:
            await asyncio.sleep(self.latency(name))
        loop = asyncio.get_running_loop()
        with loop.hold() if isinstance(loop, VirtualLoop) else contextlib.nullcontext():
            answer = await verb()
        self._raise(f"{name}:after")
        return answer

    def _raise(self, point: str) -> None:
        error = self.fault(point)
        if error is not None:
            raise error

    async def open(self) -> None:
        await self._call("open", self.inner.open)

    async def close(self) -> None:
        await self.inner.close()

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self._call("add", lambda: self.inner.add(tasks, now=now))

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self._call("change", lambda: self.inner.change(changes, now=now))

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self._call("get", lambda: self.inner.get(refs))

    async def find(self, where: Filter, page: Page) -> Found:
        return await self._call("find", lambda: self.inner.find(where, page))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await self._call("tally", lambda: self.inner.tally(edges, upto=upto, topics=topics))

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        return await self._call("lease", lambda: self.inner.lease(wants, now=now, until=until, holder=holder))

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        return await self._call("extend", lambda: self.inner.extend(leases, now=now, until=until))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        return await self._call("settle", lambda: self.inner.settle(outcomes, now=now))

    async def purge(self, *, now: Millis, limit: int) -> int:
        return await self._call("purge", lambda: self.inner.purge(now=now, limit=limit))

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        workers = self.inner.features.workers
        if workers is None:
            return {}
        return await self._call("announce", lambda: workers.announce(holder, topics, until, now=now))

    async def record(self, events: Sequence[Event]) -> None:
        log = self.inner.features.events
        if log is not None:
            await self._call("record", lambda: log.record(events))

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        log = self.inner.features.events
        if log is None:
            return []
        return await self._call("events", lambda: log.events(ref, limit=limit))

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        wakes = self.inner.features.wakes
        return _Deaf() if self.deaf or wakes is None else await wakes.listen(topics, heard)
