"""A load on stores that are being broken: it writes down what was acknowledged, and finds what the store then owes.

async with Load(store, other) as load:
    await load.more(50)
    server.kill()
    ...
assert load.lost == set() and load.again == []
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from types import TracebackType
from typing import Self

from tests.waiting import PATIENCE, pause, until

from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreError
from bide.core.instants import In
from bide.core.records import OnConflict, Record, Settlement
from bide.stores.redis import RedisStore
from bide.testing.store_suite.base import done, new

TOPIC = "t"
_PAUSE = 0.002


class Load:
    """`schedulers` and `workers` for each store. Leaving it stops the scheduling, and works off what is there."""

    def __init__(self, *stores: RedisStore, schedulers: int = 4, workers: int = 2, lasts: int = 1_000) -> None:
        self.acknowledged: set[str] = set()
        """Keys whose schedule was answered."""
        self.delivered: Counter[str] = Counter()
        self.settled: set[str] = set()
        """Keys whose settle was answered with yes."""
        self.again: list[str] = []
        """Leased by a call that was sent when the settle had been acknowledged already."""
        self.early: list[int] = []
        """By how many milliseconds a delivery came before its time."""
        self.errors: Counter[str] = Counter()
        self._stores = stores
        self._schedulers = schedulers
        self._workers = workers
        self._lasts = lasts
        self._numbers = itertools.count()
        self._scheduling: list[asyncio.Task[None]] = []
        self._working: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def lost(self) -> set[str]:
        """Acknowledged, and never delivered."""
        return self.acknowledged - set(self.delivered)

    @property
    def resent(self) -> int:
        """How many calls had to be sent again so far: whether the stores have noticed what befell the servers."""
        return sum(caller.resent for store in self._stores for caller in store._open().clients.values())

    async def more(self, count: int) -> None:
        """Until `count` more schedules are acknowledged."""
        enough = len(self.acknowledged) + count
        await until(lambda: len(self.acknowledged) >= enough, f"{count} more of the load")

    async def noticed(self) -> None:
        """Until a call that met a fault is being sent again."""
        before = self.resent
        await until(lambda: self.resent > before, "the fault to be noticed")

    async def __aenter__(self) -> Self:
        for store in self._stores:
            self._scheduling += [asyncio.create_task(self._schedule(store)) for _ in range(self._schedulers)]
            self._working += [asyncio.create_task(self._work(store, f"w{one}")) for one in range(self._workers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(2 * PATIENCE):
                self._stopping = True
                await asyncio.gather(*self._scheduling)
                if kind is None:
                    await self._empty()
        finally:
            for task in (*self._scheduling, *self._working):
                task.cancel()
            await asyncio.gather(*self._scheduling, *self._working, return_exceptions=True)

    def report(self) -> str:
        return (
            f"{len(self.acknowledged)} scheduled, {len(self.settled)} settled, {len(self.lost)} lost, "
            f"{len(self.again)} delivered again after their settle; errors: {dict(self.errors)}"
        )

    async def _schedule(self, store: RedisStore) -> None:
        while not self._stopping:
            tasks = [
                new(f"{next(self._numbers)}", due=In(random.randrange(40)), on_conflict=OnConflict.KEEP)
                for _ in range(random.choice((1, 1, 5)))
            ]
            try:
                answers = list(await store.add(tasks, now=0))
            except PartlyFailed as partly:
                answers = list(partly.answers)  # type: ignore[arg-type]
            except StoreError as error:
                answers = [error] * len(tasks)  # type: ignore[list-item]
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, StoreError):
                    self.errors[f"schedule: {type(answer).__name__}"] += 1
                else:
                    self.acknowledged.add(task.key)
            await pause(_PAUSE, why="the pace of the load")

    async def _work(self, store: RedisStore, holder: str) -> None:
        while True:
            over = set(self.settled)
            try:
                leased = await store.lease({TOPIC: 20}, now=0, until=self._lasts, holder=holder)
            except StoreError as error:
                self.errors[f"lease: {type(error).__name__}"] += 1
                await pause(10 * _PAUSE, why="the pace of the load")
                continue
            for task in leased.tasks:
                self.delivered[task.key] += 1
                if task.key in over:
                    self.again.append(task.key)
                if task.planned_at > leased.now:
                    self.early.append(task.planned_at - leased.now)
            await self._settle(store, leased.tasks)
            await pause(_PAUSE, why="the pace of the load")

    async def _settle(self, store: RedisStore, held: list[Record]) -> None:
        left: list[tuple[str, Settlement]] = [(one.key, done(one)) for one in held]
        while left:
            answers: list[object]
            try:
                answers = list(await store.settle([outcome for _, outcome in left], now=0))
            except PartlyFailed as partly:
                answers = list(partly.answers)
            except StoreError as error:
                answers = [error] * len(left)
            self.settled |= {key for (key, _), answer in zip(left, answers, strict=True) if answer is True}
            for answer in answers:
                if isinstance(answer, StoreError):
                    self.errors[f"settle: {type(answer).__name__}"] += 1
            left = [one for one, answer in zip(left, answers, strict=True) if isinstance(answer, StoreError)]
            # done or not, it is over: another answer is not to be had
            left = [] if all(isinstance(answer, OutcomeUnknown) for answer in answers) else left

    async def _empty(self) -> None:
        """Until the store has nothing left."""

        async def is_empty() -> bool:
            try:
                return (await self._stores[0].tally()).number() == 0
            except StoreError as error:
                self.errors[f"tally: {type(error).__name__}"] += 1
                return False

        await until(is_empty, "the store to be empty")
