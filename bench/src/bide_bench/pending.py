"""The workloads with pending tasks: `idle`, the cost of a worker while nothing is due; `scale`, of calls as they grow.

Each operation of `scale` is a store call for one task, timed alone; the figure is the median of many. The client's
batcher is left out, since it would hide the cost of one call. So is the flush at each commit, on SQLite
(`synchronous=NORMAL`) and PostgreSQL (`synchronous_commit=off`): it costs more than everything else, at any size, and
would make all growth look small. For the same reason a server's own work is measured, not the time to its answer: Redis
counts the time that it spends on commands; for a database it is the processor time of the processes that serve the
store, if they are visible, else a stopwatch less the time of a `SELECT 1`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from statistics import median_grouped
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bide.app import Bide
from bide.cli.output import current_millis as now
from bide.core.instants import At, Millis
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Leased, Move, NewTask, OutcomeKind, Page, Settlement, State
from bide.ports import all_answers
from bide.settings import Settings
from bide.wiring import store_maker
from bide_bench.plan import Limit, Plan, Report, in_batches, rounded
from bide_bench.processes import resident_bytes
from bide_bench.sql_server import POSTGRES
from bide_bench.target import HOUR
from bide_bench.worker import PAYLOAD, Spec, Work
from bide_bench.workers import fill, stage, worker_process

T = TypeVar("T")
SECONDS = 10.0
"""Duration of the measurement of `idle`."""
SETTLING = 2.0
"""Seconds for a worker to settle after its start, before it is measured."""
TOPIC, LEASED, FLOOD = "bench.scale", "bench.scale.leased", "bench.flood"
OPERATIONS = ("schedule", "move", "cancel", "lease", "page", "next_wake")
REPETITIONS = 400
_WARM_UP = 5
"""Repetitions that do not count: the first opens a connection."""
_BATCH = 5_000
_FLOOD = 100_000
_NOTIFYING = 1.0
"""Seconds within which a notification reaches every listener."""


async def idle(plan: Plan, limit: Limit) -> Report:
    """N tasks due in an hour and one worker process, with no other client.

    For `memory:` the tasks are in the worker's own process. The CPU time is the process's own count, of all its
    threads, in nanoseconds: the system's count for other processes has ticks of a tenth of a percent of ten seconds.

    A server is measured by its own count, first alone and then with the worker, and the first is subtracted; then
    `calls_per_s` counts its requests (a read from a client of Redis, a transaction of a database), otherwise the calls
    of the store. If a server does not count its processor time, and its processes are not visible on this machine,
    `server_cpu_pct` is null.
    """
    count, work, target = plan.count(100_000), Work(topic="bench.idle"), plan.target
    spec = Spec(
        store=target.url, works=(work,), loop=plan.loop, history=plan.history, pending=0 if target.shared else count
    )
    if target.shared:
        async with stage(plan) as on:
            await fill(on.app, work.topic, count, plan=plan, delay="1h")
            if not target.owned:  # the end of the stage removes the tasks
                return Report(fields=await _watch(plan, spec))
    return Report(fields=await _watch(plan, spec))


async def _watch(plan: Plan, spec: Spec) -> dict[str, Any]:
    target = plan.target
    cpu_alone, requests_alone = 0.0, 0.0
    if target.on_server:  # without the worker: others, such as replicas, use it too
        await asyncio.sleep(SETTLING)
        cpu_alone, requests_alone = await watch_server(plan, SECONDS, "watching the server alone")
    async with worker_process(spec) as worker:
        worker.send("go")
        await worker.receive("working")
        await asyncio.sleep(SETTLING)
        before = await worker.ask("usage")
        cpu, requests = await watch_server(plan, SECONDS, "watching an idle worker")
        resident = resident_bytes(Path(f"/proc/{worker.pid}"))
        after = await worker.ask("usage")
    seconds = (after["at"] - before["at"]) / 1e9
    calls = requests - requests_alone if target.on_server else (after["calls"] - before["calls"]) / seconds
    return {
        "worker_cpu_pct": rounded((after["cpu"] - before["cpu"]) / 1e9 / seconds * 100),
        "server_cpu_pct": None if math.isnan(cpu) else rounded(max(0.0, cpu - cpu_alone)),
        "worker_rss_mb": rounded(resident / 2**20),
        "calls_per_s": rounded(max(0.0, calls)),
    }


async def watch_server(plan: Plan, seconds: float, what: str) -> tuple[float, float]:
    """The server's processor use in percent (NaN: unknown), and its requests a second, over so many seconds."""
    before = await plan.target.load()
    for tenth in range(10):
        plan.progress(what, tenth, 10)
        await asyncio.sleep(seconds / 10)
    after = await plan.target.load()
    lasted = after.at - before.at
    return (after.cpu - before.cpu) / lasted * 100, (after.requests - before.requests) / lasted


async def scale(plan: Plan, limit: Limit) -> Report:
    """At each size from 10^3 to N (10^6), and once more with a flood of a topic without a worker."""
    sizes = plan.sizes()
    most, flood = sizes[-1], min(_FLOOD, max(1, sizes[-1] // 10))
    costs: dict[str, dict[str, float]] = {name: {} for name in OPERATIONS}
    async with stage(plan, url=_unflushed(plan.target.url), sqlite_synchronous="normal") as on:
        growing = _Growing(on.app, plan)
        async with growing.listening():
            for size in sizes:
                await growing.grow(size)
                for name, microseconds in (await growing.measure(size)).items():
                    costs[name][str(size)] = microseconds
            await growing.flood(flood)
            for name, microseconds in (await growing.measure(most)).items():
                costs[name][f"{most}+{flood}_due"] = microseconds
    growth = {name: rounded(list(each.values())[-1] / next(iter(each.values()))) for name, each in costs.items()}
    return Report(fields={"us": costs, "growth": growth}, faults=growing.faults)


def _unflushed(url: str) -> str:
    """The URL, for PostgreSQL without a flush at each commit; a pooling proxy does not take the option."""
    parts = urlsplit(url)
    if parts.scheme not in POSTGRES or "pooler=" in parts.query:
        return url
    return f"{url}{'&' if parts.query else '?'}synchronous_commit=off"


class _Growing:
    """A store that grows, and the timing of single calls."""

    def __init__(self, app: Bide, plan: Plan) -> None:
        self._store = app.store
        self._plan = plan
        self._target = plan.target
        self._size = 0
        self._random = random.Random(1)
        self._notified = asyncio.Event()
        self.faults: list[str] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Subscribe, as a worker does before it leases: some stores ask for heads only after a notification."""
        wakes = self._store.features.wakes
        if not self._target.on_server or wakes is None:
            yield
            return
        listening = await wakes.listen([LEASED], lambda topic, wake: self._notified.set())
        try:
            yield
        finally:
            await listening.close()

    async def grow(self, size: int) -> None:
        await self._add(TOPIC, range(self._size, size), self._some_time)
        self._size = size

    async def flood(self, count: int) -> None:
        await self._add(FLOOD, range(count), now)

    async def _add(self, topic: str, numbers: range, due: Callable[[], Millis]) -> None:
        for some in in_batches(numbers, _BATCH):
            self._plan.progress(f"filling {topic}", some[0], numbers.stop)
            await self._store.add([self._task(topic, key_of(number), due()) for number in some], now=now())

    async def measure(self, size: int) -> dict[str, float]:
        """Microseconds of each operation, the median over all repetitions; operations take turns."""
        store, taken, times = self._store, {name: list[float]() for name in OPERATIONS}, _WARM_UP + REPETITIONS
        self._notified.clear()
        await store.add([self._task(LEASED, f"due-{number}", now()) for number in range(times)], now=now())
        if self._target.on_server:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._notified.wait(), _NOTIFYING)
            await asyncio.sleep(_NOTIFYING / 10)  # the rest of the notifications
        held: list[Settlement] = []
        until = now() + HOUR
        for number in range(times):
            if number % 50 == 0:
                self._plan.progress(f"measuring at {size}", number, times)
            fresh = self._task(TOPIC, key_of(-1 - number), self._some_time())
            move = Move(TOPIC, key_of(self._random.randrange(size)), At(self._some_time()))
            cancel = Cancel(TOPIC, fresh.key)
            where = Filter(topic=TOPIC, state=State.WAITING, wake_from=self._half_way())
            added = await self._timed(taken["schedule"], store.add([fresh], now=now()))
            moved = await self._timed(taken["move"], store.change([move], now=now()))
            cancelled = await self._timed(taken["cancel"], store.change([cancel], now=now()))
            leased = await self._timed(taken["lease"], store.lease({LEASED: 1}, now=now(), until=until, holder="b"))
            found = await self._timed(taken["page"], store.find(where, Page(limit=100)))
            held += [Settlement(LEASED, task.key, task.token, OutcomeKind.DONE) for task in leased.tasks]
            answers = await all_answers([*added, *moved, *cancelled])
            if not (all(one.ok for one in answers) and found.tasks):
                self.faults.append(f"at {size} tasks an operation did not do what it was asked")
        for _ in range(times):  # separately: opening a store each time would disturb the other measurements
            if not (await self._ask(taken["next_wake"], until)).next_wake:
                self.faults.append(f"at {size} tasks nothing was said to wake next")
                break
        if len(held) != times or not all(await all_answers(await store.settle(held, now=now()))):
            self.faults.append(f"at {size} tasks {len(held)} of {times} leases were given and settled")
        return {name: rounded(median_grouped(each[_WARM_UP:], self._target.step)) for name, each in taken.items()}

    async def _timed(self, times: list[float], call: Coroutine[Any, Any, T]) -> T:
        stop = await self._target.measure()
        answer = await call
        times.append(stop())
        return answer

    def _task(self, topic: str, key: str, due: int) -> NewTask:
        return NewTask(topic, key, new_id(), At(due), PAYLOAD)

    async def _ask(self, times: list[float], until: Millis) -> Leased:
        """Ask for the next wake, of a fresh store if an open one may know it from notifications."""
        asking = {TOPIC: 0}
        if not self._target.remembers_heads:
            return await self._timed(times, self._store.lease(asking, now=now(), until=until, holder="b"))
        fresh = store_maker(self._target.url, Settings())()
        await fresh.open()
        try:
            return await self._timed(times, fresh.lease(asking, now=now(), until=until, holder="b"))
        finally:
            await fresh.close()

    def _half_way(self) -> Millis:
        """A random instant in the first half of that hour: a full page follows it at every size."""
        return now() + HOUR + self._random.randrange(HOUR // 2)

    def _some_time(self) -> int:
        """A random instant within the hour that begins in an hour."""
        return now() + HOUR + self._random.randrange(HOUR)


def key_of(number: int) -> str:
    """A key that falls anywhere in an index, computed from its number."""
    return blake2b(number.to_bytes(8, "big", signed=True), digest_size=16).hexdigest()
