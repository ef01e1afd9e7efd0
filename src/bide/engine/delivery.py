"""One lease on its way through a handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bide.core.errors import LeaseLost, SetupError
from bide.core.instants import Length, Millis, When, duration
from bide.core.outcomes import Done
from bide.core.records import Lease, Record
from bide.core.tasks import Task
from bide.engine.joining import joining
from bide.engine.verdicts import completion
from bide.ports import JoinsTransaction

if TYPE_CHECKING:
    from bide.engine.worker import Worker


class Delivery(Task[Any]):
    """The task that a handler is given, and what the worker knows of its lease.

    `over` is set once the outcome is settled or discarded, whatever the handler does from then on.
    """

    __slots__ = ("_began", "_worker", "expires", "lane", "over", "timer")

    def __init__(self, record: Record, worker: Worker, expires: float, began: Millis) -> None:
        super().__init__(record)
        self._worker = worker
        self._began = began
        self.expires = expires
        """When the lease runs out, by the loop's clock; counted from before it was asked for, so never too late."""
        self.over = False
        self.lane: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def lease(self) -> Lease:
        record = self.record
        return Lease(record.topic, record.key, record.token)

    @property
    def lateness(self) -> timedelta:
        """See `Task.lateness`."""
        return timedelta(milliseconds=self._began - self.record.planned_at)

    @asynccontextmanager
    async def transaction(self, *, again_at: When | None = None, again_in: Length | None = None) -> AsyncIterator[Any]:
        """See `Task.transaction`."""
        store, record = self._worker.store, self.record
        if not isinstance(store, JoinsTransaction):
            raise SetupError(f"{type(store).__name__} shares no database with handlers; sqlite: does")
        done, committing = Done(again_at=again_at, again_in=again_in), False
        try:
            async with store.transaction() as joined:
                with joining(store, joined):
                    yield joined.connection
                clock, keep = self._worker.clock, self._worker.terms.retention_of(record.topic)
                settled = await joined.settle([completion(record, done, keep, clock)], now=clock.now())
                if self.over or not settled[0]:
                    raise LeaseLost(
                        f"{record.topic}/{record.key} is no longer ours: rolled back. The lease ended, the task was "
                        "cancelled or replaced, or the transaction scheduled this very key (use again_in= for that)"
                    )
                # From here the keeper must not ask to extend what the commit is about to end: it would be refused, and
                # the handler cancelled after its commit.
                self.over = committing = True
        except BaseException:
            if committing:
                self.over = False
            raise
        self._worker.completed(self)

    async def extend(self, by: Length) -> bool:
        """See `Task.extend`."""
        clock, length = self._worker.clock, duration(by, field="by")
        now = clock.now()
        kept = (await self._worker.store.extend([self.lease], now=now, until=now + clock.span(length)))[0]
        if kept:
            self.expires = max(self.expires, asyncio.get_running_loop().time() + length / 1000)
        return kept
