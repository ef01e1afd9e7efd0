"""Move an app's time by hand and see exactly what fires, in order: no sleeping, no background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from msgspec import Struct

from bide.app import Bide
from bide.core.errors import BadInput
from bide.core.instants import Length, Millis, When, as_datetime, duration, instant
from bide.core.records import OutcomeKind, Record, Settlement, Topic
from bide.core.tasks import Task
from bide.engine.delivery.tables import TableLoop
from bide.engine.delivery.worker import Worker
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.testing.clock import ManualClock

_MOST = 100_000
"""The most deliveries in one `advance`: more mean that a task keeps itself due."""


class Fired(Struct, frozen=True):
    """One delivery."""

    topic: Topic
    key: str
    at: datetime
    """The time of the delivery, by the app's moved clock."""
    outcome: OutcomeKind
    """The outcome of the delivery: done, retry, defer or dead."""
    error: str | None
    attempt: int
    record: Record
    settled: bool
    """False if the task was replaced or cancelled meanwhile, maybe by its own handler: the outcome has no effect."""

    @property
    def payload(self) -> Any:
        return Task[Any](self.record).payload

    def __repr__(self) -> str:
        return f"<Fired {self.topic}/{self.key} {self.outcome.value} at={self.at.isoformat()}>"

    @property
    def ref(self) -> tuple[Topic, str]:
        return (self.topic, self.key)


class TimeMachine:
    """An app under a clock that stands still until `advance` moves it.

    `async with TimeMachine(app) as bide_time:`. While it is open, the app uses a memory store, or `store` (for example
    a `SqliteStore` on a temporary file, for handlers that use `task.transaction()`). Its own store is not touched.
    Entered again, it goes on with the same store and time.
    """

    def __init__(self, app: Bide, *, start: When | None = None, store: Store | None = None) -> None:
        self._app = app
        self._clock = ManualClock() if start is None else ManualClock(instant(start, field="start"))
        self._store: Store = MemoryStore() if store is None else store
        self._fired: list[Fired] = []
        self._tables: list[TableLoop] | None = None

    async def __aenter__(self) -> TimeMachine:
        self._before = self._app.substitute(lambda: self._store, self._clock)
        try:
            await self._app.open()
            _, errors = await self._app.recurring.declare(dict.fromkeys(self._app.declared.values(), False))
            if errors:
                raise errors[0]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for table in self._tables or ():
            await table.stop(0)
        self._tables = None
        await self._app.close()
        self._app.substitute(*self._before)

    @property
    def now(self) -> datetime:
        """The app's time."""
        return as_datetime(self._clock.now())

    async def advance(self, by: Length) -> list[Fired]:
        """Let this much time pass; return all deliveries of that time, including retries, in order.

        Rows of watched tables fire too, each at its time; their outcomes are in the tables.
        """
        return await self._until(self._clock.now() + duration(by, field="by"))

    async def pass_unattended(self, by: Length) -> None:
        """Let this much time pass without a worker: tasks that become due are overdue at the next `advance`."""
        self._clock.advance(duration(by, field="by"))

    async def advance_to(self, at: When) -> list[Fired]:
        """Let time pass until `at`. Raises BadInput for an instant that has passed."""
        end = instant(at, now=self._clock.now)
        if end < self._clock.now():
            raise BadInput("at", at, f"an instant that is not before {self.now.isoformat()}: time does not go back")
        return await self._until(end)

    async def waiting(self, topic: str | None = None) -> Sequence[Task[Any]]:
        """The tasks that have not fired yet, the earliest first."""
        found = [task async for task in self._app.find(topic=topic, state="waiting")]
        return sorted(found, key=lambda task: task.record.wake_at)

    async def _until(self, end: Millis) -> list[Fired]:
        self._fired = []
        worker = Worker(self._app, self._app.routes, observe=self._saw, refused=partial(self._saw, settled=False))
        try:
            while True:
                leased, wake = await worker.run_once()
                for table in await self._watched():
                    fired, due = await table.run_once()
                    leased += fired
                    wake = due if wake is None or (due is not None and due < wake) else wake
                if len(self._fired) > _MOST:
                    raise RuntimeError(f"over {_MOST} deliveries: {self._fired[-1].ref} keeps itself due")
                if leased:
                    continue
                if wake is None or wake > end:
                    break
                self._clock.advance(max(wake - self._clock.now(), 0))
        finally:
            await worker.stop(grace=0)
        self._clock.advance(max(end - self._clock.now(), 0))
        await asyncio.sleep(0)
        return self._fired

    async def _watched(self) -> list[TableLoop]:
        """The app's watched tables that are in this machine's store, opened at the first use."""
        if self._tables is None:
            self._tables = []
            for watch in self._app.watches if self._store.features.tables is not None else ():
                if watch.source.database is None:
                    for table in self._app.loops_of(watch):
                        await table.open()
                        self._tables.append(table)
        return self._tables

    def _saw(self, record: Record, settlement: Settlement, *, settled: bool = True) -> None:
        error, now = None if settlement.error is None else settlement.why, self.now
        self._fired.append(
            Fired(record.topic, record.key, now, settlement.kind, error, record.attempt, record, settled)
        )
