"""A facade for a store, to observe, time or disturb its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, Lease, Leased, NewTask, Page, Record, Ref, Settlement, Tally, Topic
from bide.ports.store import COUNTED, Features, Store
from bide.ports.verbs import Pending

Answered = TypeVar("Answered")
Feature = TypeVar("Feature")


class StoreFacade:
    """A store that forwards each call to `inner`. Override `around` for all calls alike, or single operations.

    The nine operations, the event log and the registry of workers go through it; the other features are those of the
    inner store. It costs less than a microsecond per call, whatever the size of the batch.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def features(self) -> Features:
        inner = self.inner.features
        return replace(
            inner, workers=None if inner.workers is None else self, events=None if inner.events is None else self
        )

    async def around(self, operation: str, call: Callable[[], Awaitable[Answered]]) -> Answered:
        """Call `call`, the named operation of the inner store, and return its answer."""
        return await call()

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self.around("add", partial(self.inner.add, tasks, now=now))

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        return await self.around("change", partial(self.inner.change, changes, now=now))

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self.around("get", partial(self.inner.get, refs))

    async def find(self, where: Filter, page: Page) -> Found:
        return await self.around("find", partial(self.inner.find, where, page))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await self.around("tally", partial(self.inner.tally, edges, upto=upto, topics=topics))

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        return await self.around("lease", partial(self.inner.lease, wants, now=now, until=until, holder=holder))

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        return await self.around("extend", partial(self.inner.extend, leases, now=now, until=until))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        return await self.around("settle", partial(self.inner.settle, outcomes, now=now))

    async def purge(self, *, now: Millis, limit: int) -> int:
        return await self.around("purge", partial(self.inner.purge, now=now, limit=limit))

    # --- features.workers, events

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        workers = _present(self.inner.features.workers)
        return await self.around("announce", partial(workers.announce, holder, topics, until, now=now))

    async def record(self, events: Sequence[Event]) -> None:
        log = _present(self.inner.features.events)
        await self.around("record", partial(log.record, events))

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        log = _present(self.inner.features.events)
        return await self.around("events", partial(log.events, ref, limit=limit))


def _present(feature: Feature | None) -> Feature:
    """The inner store's feature, which exists if the facade has it."""
    assert feature is not None
    return feature
