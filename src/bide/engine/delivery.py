"""One lease on its way through a handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from bide.core.errors import LeaseLost, SetupError
from bide.core.records import Lease, Record, Settlement, State, Verdict
from bide.core.tasks import Task
from bide.engine.joining import joining
from bide.ports import JoinsTransaction

if TYPE_CHECKING:
    from bide.engine.worker import Worker


class Delivery(Task[Any]):
    """The task that a handler is given, and what the worker knows of its lease.

    `over` is set once the outcome is settled or discarded, whatever the handler does from then on.
    """

    __slots__ = ("_worker", "expires", "lane", "over", "timer")

    def __init__(self, record: Record, worker: Worker, expires: float) -> None:
        super().__init__(record)
        self._worker = worker
        self.expires = expires
        """When the lease runs out, by the loop's clock; counted from before it was asked for, so never too late."""
        self.over = False
        self.lane: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def lease(self) -> Lease:
        record = self.record
        return Lease(record.topic, record.key, record.token)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """See `Task.transaction`."""
        store = self._worker.store
        if not isinstance(store, JoinsTransaction):
            raise SetupError(f"{type(store).__name__} shares no database with handlers; sqlite: does")
        record = self.record
        async with store.transaction() as joined:
            with joining(store, joined):
                yield joined.connection
            now = self._worker.clock.now()
            keep_until = self._worker.terms.retention_of(record.topic).keep_until(State.DONE, now)
            settled = await joined.settle(
                [Settlement(record.topic, record.key, record.token, Verdict.DONE, None, keep_until)], now=now
            )
            if self.over or not settled[0]:
                raise LeaseLost(f"{record.topic}/{record.key} is no longer ours: rolled back")
        self._worker.completed(self)

    async def extend(self, millis: int) -> bool:
        """See `Task.extend`."""
        now = self._worker.clock.now()
        kept = (await self._worker.store.extend([self.lease], now=now, until=now + millis))[0]
        if kept:
            self.expires = max(self.expires, asyncio.get_running_loop().time() + self._worker.clock.seconds(millis))
        return kept
