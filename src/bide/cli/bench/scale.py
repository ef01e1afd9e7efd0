"""The workload `scale`: what one operation costs as more and more waits.

Each operation is a store call for one task, timed alone; the figure is the median of many. The client's batcher is left
out, for it would hide the cost of one call; and on SQLite so is the flush at each commit (`synchronous=NORMAL`), for it
costs more than everything else together, whatever the size, and would make any growth look small.
"""

from __future__ import annotations

import random
import time
from collections.abc import Coroutine
from hashlib import blake2b
from statistics import median
from typing import Any, TypeVar

from bide.app import Bide
from bide.cli.bench.crew import clear
from bide.cli.bench.limits import limit_of
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.worker import PAYLOAD
from bide.core.names import new_id
from bide.core.records import At, Cancel, Filter, Move, NewTask, Page, Settlement, State, Verdict
from bide.ports import Store
from bide.settings import Settings

TOPIC = "bench.scale"
LEASED = "bench.scale.leased"
FLOOD = "bench.flood"
REPETITIONS = 400
_BATCH = 5_000
_HOUR = 3_600_000
_FLOOD = 100_000
OPERATIONS = ("schedule", "move", "cancel", "lease", "page", "next_wake")

T = TypeVar("T")


async def scale(plan: Plan) -> Report:
    """At each size, 10^3 and upward to N (10^6), and once more with a flood of a topic that nobody works on."""
    most = plan.count(1_000_000)
    flood = min(_FLOOD, max(1, most // 10))
    sizes = [size for power in range(3, 10) if (size := 10**power) < most]
    sizes.append(most)
    costs: dict[str, dict[str, float]] = {name: {} for name in OPERATIONS}
    app = Bide(plan.place.url, settings=Settings(store=plan.place.url, sqlite_synchronous="normal"))
    with limit_of(plan) as limit:
        limit.measure(5)
        async with app:
            bench = _Bench(app.store, plan)
            if not plan.place.owned:
                await clear(app)
            try:
                for size in sizes:
                    await bench.grow(size)
                    for name, microseconds in (await bench.measure(size)).items():
                        costs[name][str(size)] = microseconds
                await bench.flood(flood)
                for name, microseconds in (await bench.measure(most)).items():
                    costs[name][f"{most}+{flood}_due"] = microseconds
            finally:
                if not plan.place.owned:
                    await clear(app)
        growth = {name: rounded(_last(by_size) / _first(by_size)) for name, by_size in costs.items()}
        return Report(fields={"us": costs, "growth": growth, **limit.fields({})}, faults=bench.faults)


def _first(by_size: dict[str, float]) -> float:
    return next(iter(by_size.values()))


def _last(by_size: dict[str, float]) -> float:
    return list(by_size.values())[-1]


class _Bench:
    """One store that grows, and the means to time single calls of it."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._size = 0
        self._random = random.Random(1)
        self.faults: list[str] = []

    async def grow(self, size: int) -> None:
        while self._size < size:
            self._plan.progress(f"filling to {size}", self._size, size)
            count = min(_BATCH, size - self._size)
            await self._store.add(
                [self._task(TOPIC, key_of(self._size + number), self._some_time()) for number in range(count)],
                now=_now(),
            )
            self._size += count

    async def flood(self, count: int) -> None:
        for first in range(0, count, _BATCH):
            self._plan.progress("flooding", first, count)
            some = range(first, min(first + _BATCH, count))
            await self._store.add([self._task(FLOOD, key_of(number), _now()) for number in some], now=_now())

    async def measure(self, size: int) -> dict[str, float]:
        """Microseconds of each operation, the median over all repetitions; operations take turns."""
        store, taken = self._store, {name: list[int]() for name in OPERATIONS}
        await store.add([self._task(LEASED, f"due-{number}", _now()) for number in range(REPETITIONS)], now=_now())
        held: list[Settlement] = []
        until = _now() + _HOUR
        for number in range(REPETITIONS):
            if number % 50 == 0:
                self._plan.progress(f"measuring at {size}", number, REPETITIONS)
            fresh = self._task(TOPIC, key_of(-1 - number), self._some_time())
            chosen = key_of(self._random.randrange(size))
            move = Move(TOPIC, chosen, At(self._some_time()))
            cancel = Cancel(TOPIC, fresh.key)
            where = Filter(topic=TOPIC, state=State.WAITING, wake_from=self._some_time() - _HOUR // 100)
            added = await self._timed(taken["schedule"], store.add([fresh], now=_now()))
            moved = await self._timed(taken["move"], store.change([move], now=_now()))
            cancelled = await self._timed(taken["cancel"], store.change([cancel], now=_now()))
            leased = await self._timed(taken["lease"], store.lease({LEASED: 1}, now=_now(), until=until, holder="b"))
            found = await self._timed(taken["page"], store.find(where, Page(limit=100)))
            asked = await self._timed(taken["next_wake"], store.lease({TOPIC: 0}, now=_now(), until=until, holder="b"))
            held += [Settlement(LEASED, task.key, task.token, Verdict.DONE) for task in leased.tasks]
            if not (added[0].ok and moved[0].ok and cancelled[0].ok and found.tasks and asked.next_wake):
                self.faults.append(f"at {size} tasks an operation did not do what it was asked")
        if len(held) != REPETITIONS or not all(await store.settle(held, now=_now())):
            self.faults.append(f"at {size} tasks {len(held)} of {REPETITIONS} leases were given and settled")
        return {name: rounded(median(times) / 1000) for name, times in taken.items()}

    async def _timed(self, times: list[int], call: Coroutine[Any, Any, T]) -> T:
        began = time.perf_counter_ns()
        answer = await call
        times.append(time.perf_counter_ns() - began)
        return answer

    def _task(self, topic: str, key: str, due: int) -> NewTask:
        return NewTask(topic, key, new_id(), At(due), PAYLOAD)

    def _some_time(self) -> int:
        """Anywhere in the hour that begins in an hour."""
        return _now() + _HOUR + self._random.randrange(_HOUR)


def key_of(number: int) -> str:
    """A key that falls anywhere in an index, and need not be remembered."""
    return blake2b(number.to_bytes(8, "big", signed=True), digest_size=16).hexdigest()


def _now() -> int:
    return time.time_ns() // 1_000_000
