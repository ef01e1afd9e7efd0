"""The workers of a benchmark, their store, and the check of their deliveries.

Workers are processes; for `memory:`, which no other process can see, one worker runs in this process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bide.app import Bide
from bide.core.answers import Answer
from bide_bench import worker as worker_module
from bide_bench.plan import Limit, Plan, in_batches, random_keys, rounded
from bide_bench.processes import PATIENCE, BenchFault, Child
from bide_bench.worker import PAYLOAD, Count, Log, Logged, Settled, Spec, Start, Timers, Work, make_app, paced

NANOSECONDS = 1_000_000
"""In a millisecond."""
_LINGER = 0.3
"""Seconds that workers go on after everything is settled, so that a second delivery is seen."""


class LocalWorkers:
    """Workers in this process, each on an app with a log of its own."""

    def __init__(self, apps: Mapping[Bide, Log]) -> None:
        self._apps = apps
        self._working = AsyncExitStack()

    @property
    def settled(self) -> int:
        return sum(log.number for log in self._apps.values())

    @property
    def lease_calls(self) -> int:
        """The calls of their stores that ask for tasks, if these are watched."""
        return sum(log.lease_calls for log in self._apps.values())

    async def go(self) -> int:
        began = time.time_ns()
        for app, log in self._apps.items():
            worker = await self._working.enter_async_context(app.worker(observe=log.observe))
            self._working.push_async_callback(worker.stop, grace=0)
        return began

    async def stop(self) -> None:
        await self._working.aclose()

    async def figures(self) -> list[dict[str, Any]]:
        return [log.figures() for log in self._apps.values()]

    def log(self) -> list[Start | Settled]:
        return [entry for log in self._apps.values() for entry in log.entries()]


class ProcessGroup:
    """Worker processes."""

    def __init__(self) -> None:
        self.members: list[Child] = []
        self._running = AsyncExitStack()

    async def add(self, spec: Spec) -> None:
        self.members.append(await self._running.enter_async_context(worker_process(spec)))

    @property
    def settled(self) -> int:
        """Outcomes that the store has accepted; may lag by 50 ms."""
        return sum(member.settled for member in self.members)

    async def go(self) -> int:
        """Start the work, and return the time in nanoseconds since the epoch."""
        began = time.time_ns()
        for member in self.members:
            member.send("go")
        for member in self.members:
            await member.receive("working")
        return began

    async def stop(self) -> None:
        await self._running.aclose()

    async def figures(self) -> list[dict[str, Any]]:
        """The figures that each of them reports while it works."""
        return list(await asyncio.gather(*(member.ask("usage") for member in self.members)))

    def log(self) -> list[Start | Settled]:
        """All starts and outcomes; after `stop`."""
        lines = (line for member in self.members for line in member.log_lines)
        return [entry for line in lines for entry in msgspec.json.decode(line, type=Logged).log]


Workers = LocalWorkers | ProcessGroup
"""The workers of one run; both have the same methods."""


def child(what: str, spec: Spec | Timers, *, within: float = PATIENCE) -> AbstractAsyncContextManager[Child]:
    """A process that runs worker.py and is ready."""
    order = msgspec.json.encode(spec).decode()
    return Child.running(what, sys.executable, "-P", worker_module.__file__, order, ready="ready", within=within)


def worker_process(spec: Spec) -> AbstractAsyncContextManager[Child]:
    """A worker process with an open store; it starts to work at the word `go`."""
    return child("a worker process", spec, within=PATIENCE + spec.pending / 1000)


async def wait_settled(workers: Workers, count: int, *, plan: Plan, within: float, what: str = "settled") -> None:
    """Wait until so many are settled, at most `within` seconds, and a moment longer for what must not come."""
    ends = time.monotonic() + within
    while workers.settled < count and time.monotonic() < ends:
        plan.progress(what, workers.settled, count)
        await asyncio.sleep(0.05)
    plan.progress(what, min(count, workers.settled), count)
    await asyncio.sleep(_LINGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """An open app on the plan's store, which schedules, and its workers."""

    app: Bide
    log: Log
    plan: Plan
    spec: Spec

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[Workers]:
        """The plan's workers, ready to go."""
        workers: Workers = ProcessGroup() if self.plan.target.shared else LocalWorkers({self.app: self.log})
        try:
            if isinstance(workers, ProcessGroup):
                for _ in range(self.plan.processes):
                    await workers.add(self.spec)
            yield workers
        finally:
            await workers.stop()

    @asynccontextmanager
    async def local_workers(self, number: int) -> AsyncIterator[LocalWorkers]:
        """So many workers in this process, ready to go, each with a store of its own that is watched."""
        async with AsyncExitStack() as stack:
            logs = [Log() for _ in range(number)]
            apps = [await stack.enter_async_context(make_app(self.spec, log, watched=True)) for log in logs]
            workers = LocalWorkers(dict(zip(apps, logs, strict=True)))
            stack.push_async_callback(workers.stop)
            yield workers


@asynccontextmanager
async def stage(
    plan: Plan, *works: Work, url: str = "", journal: bool = False, counted: bool = False, **settings: Any
) -> AsyncIterator[Stage]:
    """Open an app with handlers for `works`, here and in its workers; remove the remaining tasks at the end."""
    spec = Spec(
        store=url or plan.target.url, works=works, journal=journal, counted=counted, loop=plan.loop,
        history=plan.history,
    )  # fmt: skip
    log = Count() if counted else Log()
    async with make_app(spec, log, watched=counted, **settings) as app:
        if not plan.target.owned:
            await clear(app)
        try:
            yield Stage(app=app, log=log, plan=plan, spec=spec)
        finally:
            if not plan.target.owned:
                await clear(app)


async def fill(app: Bide, topic: str, count: int, *, plan: Plan, limit: Limit | None = None, **when: Any) -> list[str]:
    """Store `count` tasks with random keys, due as `when` says (`delay=` or `at=`); return their keys.

    A `limit` is measured in between, batch by batch: a larger index costs more, so that a limit on a small table would
    say nothing about a large one.
    """
    keys: list[str] = []
    for some in in_batches(random_keys(count)):
        plan.progress(f"filling {topic}", len(keys), count)
        if limit is not None:
            await limit.measure()
        await app.schedule_many([app.new(topic, PAYLOAD, key=key, **when) for key in some])
        keys += some
    return keys


async def trickle(
    plan: Plan, what: str, keys: Sequence[str], call: Callable[[str], Coroutine[Any, Any, Answer]], *, rate: float,
    ahead: int,
) -> dict[str, int]:  # fmt: skip
    """Make a call for the task of each key, `rate` a second, `ahead` milliseconds before it is due; see `examine`."""
    expected: dict[str, int] = {}
    calls: list[asyncio.Task[Answer]] = []
    async for number in paced(len(keys), rate):
        expected[keys[number]] = time.time_ns() + ahead * NANOSECONDS
        calls.append(asyncio.create_task(call(keys[number])))
        if number % 50 == 0:
            plan.progress(what, number, len(keys))
    refused = [answer.result.value for answer in await asyncio.gather(*calls) if not answer.ok]
    if refused:
        raise BenchFault(f"{len(refused)} calls were not done; the first answer: {refused[0]}")
    return expected


async def clear(app: Bide) -> None:
    """Remove every task of benchmarks from the store, live or remembered, and no other."""
    counts = (await app.tally()).counts
    for topic in {topic for topic, _ in counts if topic.startswith("bench.")}:
        for refs in in_batches([(task.topic, task.key) async for task in app.find(topic=topic)]):
            answers = await app.cancel_many(refs)
            remembered = [ref for ref, answer in zip(refs, answers, strict=True) if answer.result == "finished"]
            if remembered:  # a new life that is cancelled is forgotten at once
                await app.schedule_many([app.new(topic, key=key, delay="1h") for topic, key in remembered])
                await app.cancel_many(remembered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The deliveries of a run, counted. Times in nanoseconds since the epoch, lateness in milliseconds."""

    lost: int
    """Expected tasks without an acknowledged settle."""
    duplicated: int
    """Starts after an acknowledged settle."""
    redelivered: int
    """Repeated starts before the settle: only a crash may cause them."""
    early: int
    """Starts before the time that the task was leased for, or before the caller's own."""
    first_start: int = 0
    last_start: int = 0
    last_settled: int = 0
    lateness: Sequence[float] = field(default_factory=list)
    """Of every start, sorted: the start of the handler, less the earliest instant that the caller wanted."""
    after_wake: Sequence[float] = field(default_factory=list)
    """The same, less the `wake_at` of the lease, which is a whole millisecond and never before that instant."""

    def per_second(self, count: int, began: int) -> float:
        """The completions a second of `count` tasks, from `began` to the last acknowledged settle."""
        return rounded((count - self.lost) / max(1e-9, (self.last_settled - began) / 1e9))

    def faults(self, *, crash: bool = False) -> list[str]:
        """Faults beyond the counted fields."""
        faults = [f"{self.early} deliveries began too early"] if self.early else []
        if self.redelivered and not crash:
            faults.append(f"{self.redelivered} deliveries were repeated before they were settled, and nothing crashed")
        return faults


def examine(expected: Mapping[str, int], entries: Iterable[Start | Settled]) -> Findings:
    """Compare the deliveries with `expected`: each key, with the nanosecond before which it must not start.

    Other keys (of another run on a shared store) are ignored.
    """
    ordered = sorted((entry for entry in entries if entry.key in expected), key=lambda entry: entry.at)
    starts = [entry for entry in ordered if isinstance(entry, Start)]
    settled: dict[str, int] = {}
    for entry in ordered:
        if isinstance(entry, Settled):
            settled.setdefault(entry.key, entry.at)
    seen: set[str] = set()
    duplicated = redelivered = 0
    for start in starts:
        if start.key in seen:
            again = start.at > settled.get(start.key, start.at)
            duplicated += again
            redelivered += not again
        seen.add(start.key)
    return Findings(
        lost=sum(1 for key in expected if key not in settled),
        duplicated=duplicated,
        redelivered=redelivered,
        early=sum(start.at < max(start.planned_at * NANOSECONDS, expected[start.key]) for start in starts),
        first_start=starts[0].at if starts else 0,
        last_start=starts[-1].at if starts else 0,
        last_settled=max(settled.values(), default=0),
        lateness=sorted((start.at - expected[start.key]) / NANOSECONDS for start in starts),
        after_wake=sorted(start.at / NANOSECONDS - start.planned_at for start in starts),
    )
