"""The workload `scale`: what one operation costs as more and more waits.

Each operation is a store call for one task, timed alone; the figure is the median of many. The client's batcher is left
out, for it would hide the cost of one call; and on SQLite so is the flush at each commit (`synchronous=NORMAL`), for it
costs more than everything else together, whatever the size, and would make any growth look small (on PostgreSQL it is
`synchronous_commit=off`). For the same reason it is read how long a server was busy, and not how long its answer took:
by Redis's own count of the time that it spent on commands; by the processor time of those processes of PostgreSQL that
serve the store, where they can be seen; where not, a stopwatch is read, and the time of a `SELECT 1` taken off.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from hashlib import blake2b
from statistics import median_grouped
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bide.app import Bide
from bide.cli.bench import postgres_server
from bide.cli.bench.crew import clear
from bide.cli.bench.limits import limit_of
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.server import Stopwatch, Watch
from bide.cli.bench.worker import PAYLOAD
from bide.core.instants import Millis
from bide.core.names import new_id
from bide.core.records import At, Cancel, Filter, Leased, Move, NewTask, Page, Settlement, State, Verdict
from bide.ports import Listening, Notifies, Store
from bide.settings import Settings
from bide.wiring import store_maker

TOPIC = "bench.scale"
LEASED = "bench.scale.leased"
FLOOD = "bench.flood"
REPETITIONS = 400
_WARM_UP = 5
"""Of each operation before those that count: a connection is made for the first."""
_BATCH = 5_000
_HOUR = 3_600_000
_FLOOD = 100_000
_TELLING = 1.0
"""Seconds within which whoever listens has been told."""
OPERATIONS = ("schedule", "move", "cancel", "lease", "page", "next_wake")

T = TypeVar("T")


async def scale(plan: Plan) -> Report:
    """At each size, 10^3 and upward to N (10^6), and once more with a flood of a topic that nobody works on."""
    most = plan.count(1_000_000)
    flood = min(_FLOOD, max(1, most // 10))
    sizes = [size for power in range(3, 10) if (size := 10**power) < most]
    sizes.append(most)
    costs: dict[str, dict[str, float]] = {name: {} for name in OPERATIONS}
    url = _unflushed(plan.place.url)
    app = Bide(
        url,
        settings=Settings(store=url, sqlite_synchronous="normal", history=plan.history, keep_done=0, keep_cancelled=0),
    )
    with limit_of(plan) as limit:
        limit.measure(5)
        async with app:
            bench = _Bench(app.store, plan)
            if not plan.place.owned:
                await clear(app)
            listening = await bench.listen()
            try:
                for size in sizes:
                    await bench.grow(size)
                    for name, microseconds in (await bench.measure(size)).items():
                        costs[name][str(size)] = microseconds
                await bench.flood(flood)
                for name, microseconds in (await bench.measure(most)).items():
                    costs[name][f"{most}+{flood}_due"] = microseconds
            finally:
                if listening is not None:
                    await listening.close()
                if not plan.place.owned:
                    await clear(app)
        growth = {name: rounded(_last(by_size) / _first(by_size)) for name, by_size in costs.items()}
        return Report(fields={"us": costs, "growth": growth, **limit.fields({})}, faults=bench.faults)


def _unflushed(url: str) -> str:
    """Of a PostgreSQL the same, without a flush for each commit; a proxy that pools would not take the option."""
    parts = urlsplit(url)
    if parts.scheme not in postgres_server.SCHEMES or "pooler=" in parts.query:
        return url
    return f"{url}{'&' if parts.query else '?'}synchronous_commit=off"


def _first(by_size: dict[str, float]) -> float:
    return next(iter(by_size.values()))


def _last(by_size: dict[str, float]) -> float:
    return list(by_size.values())[-1]


class _Bench:
    """One store that grows, and the means to time single calls of it."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        server = plan.place.server
        self._watch: Watch = Stopwatch() if server is None else server.watch()
        self._size = 0
        self._random = random.Random(1)
        self._heard = asyncio.Event()
        self.faults: list[str] = []

    async def listen(self) -> Listening | None:
        """As a worker does before it leases: a store on a server may not look again for what nobody told it."""
        if self._plan.place.server is None or not isinstance(self._store, Notifies):
            return None
        return await self._store.listen([LEASED], lambda topic, wake: self._heard.set())

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
        store, taken, times = self._store, {name: list[float]() for name in OPERATIONS}, _WARM_UP + REPETITIONS
        self._heard.clear()
        await store.add([self._task(LEASED, f"due-{number}", _now()) for number in range(times)], now=_now())
        if self._plan.place.server is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), _TELLING)
            await asyncio.sleep(_TELLING / 10)  # the rest of what it was told
        held: list[Settlement] = []
        until = _now() + _HOUR
        for number in range(times):
            if number % 50 == 0:
                self._plan.progress(f"measuring at {size}", number, times)
            fresh = self._task(TOPIC, key_of(-1 - number), self._some_time())
            chosen = key_of(self._random.randrange(size))
            move = Move(TOPIC, chosen, At(self._some_time()))
            cancel = Cancel(TOPIC, fresh.key)
            where = Filter(topic=TOPIC, state=State.WAITING, wake_from=self._half_way())
            added = await self._timed(taken["schedule"], store.add([fresh], now=_now()))
            moved = await self._timed(taken["move"], store.change([move], now=_now()))
            cancelled = await self._timed(taken["cancel"], store.change([cancel], now=_now()))
            leased = await self._timed(taken["lease"], store.lease({LEASED: 1}, now=_now(), until=until, holder="b"))
            found = await self._timed(taken["page"], store.find(where, Page(limit=100)))
            held += [Settlement(LEASED, task.key, task.token, Verdict.DONE) for task in leased.tasks]
            if not (added[0].ok and moved[0].ok and cancelled[0].ok and found.tasks):
                self.faults.append(f"at {size} tasks an operation did not do what it was asked")
        for _ in range(times):  # by itself: opening a store for each would disturb what is measured next
            if not (await self._ask(taken["next_wake"], until)).next_wake:
                self.faults.append(f"at {size} tasks nothing was said to wake next")
                break
        if len(held) != times or not all(await store.settle(held, now=_now())):
            self.faults.append(f"at {size} tasks {len(held)} of {times} leases were given and settled")
        return {name: rounded(median_grouped(each[_WARM_UP:], self._watch.step)) for name, each in taken.items()}

    async def _timed(self, times: list[float], call: Coroutine[Any, Any, T]) -> T:
        self._watch.start()
        answer = await call
        times.append(self._watch.stop())
        return answer

    def _task(self, topic: str, key: str, due: int) -> NewTask:
        return NewTask(topic, key, new_id(), At(due), PAYLOAD)

    async def _ask(self, times: list[float], until: Millis) -> Leased:
        """What wakes next. A store on a server may remember what it was told, so one is asked that knows nothing."""
        asking, server = {TOPIC: 0}, self._plan.place.server
        if server is None or not server.remembers_heads:
            return await self._timed(times, self._store.lease(asking, now=_now(), until=until, holder="b"))
        fresh = store_maker(self._plan.place.url, Settings())()
        await fresh.open()
        try:
            return await self._timed(times, fresh.lease(asking, now=_now(), until=until, holder="b"))
        finally:
            await fresh.close()

    def _half_way(self) -> Millis:
        """Anywhere in the first half of that hour: at every size there is a full page behind it."""
        return _now() + _HOUR + self._random.randrange(_HOUR // 2)

    def _some_time(self) -> int:
        """Anywhere in the hour that begins in an hour."""
        return _now() + _HOUR + self._random.randrange(_HOUR)


def key_of(number: int) -> str:
    """A key that falls anywhere in an index, and need not be remembered."""
    return blake2b(number.to_bytes(8, "big", signed=True), digest_size=16).hexdigest()


def _now() -> int:
    return time.time_ns() // 1_000_000
