"""The workloads of unusual shapes: `topics` (many topics), `workers` (many workers), `payload` (large payloads).

Each measures the ordinary shape and the unusual one in one run, and prints how much the unusual one is of the other:
what costs little with one topic, one worker or 100 bytes may still grow with their number.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from bide.app import Bide
from bide.cli.bench.plan import Limit, Plan, Report, random_keys, rounded
from bide.cli.bench.processes import BenchFault
from bide.cli.bench.target import stopwatch
from bide.cli.bench.worker import PAYLOAD, Log, Spec, Work, make_app, paced, percentile
from bide.cli.bench.workers import NANOSECONDS, Findings, ProcessGroup, Workers, examine, fill, stage, wait_settled
from bide.core.instants import as_datetime
from bide.core.records import Lease

RATE, TASKS = 40.0, 200
"""The tasks a second, and their number, whose lateness is measured."""
SETTLING, IDLE = 2.0, 5.0
"""Seconds for workers to settle, and for which they are then watched while they are idle."""
BUSY = 20_000
"""The tasks of the only busy topic."""
LEAD = 3.0
"""Seconds in which tasks that are due at one instant are scheduled."""
_LEASES = 256
_HELD = 5.0
"""Seconds that the handlers of `payload` run: longer than the measurement."""


async def topics(plan: Plan, limit: Limit) -> Report:
    """A worker process with one topic, then with N: idle, with 40 tasks a second over them, and with one busy topic."""
    by_number: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    for number in (1, plan.count(1_000)):
        work = Work(topic="bench.topics", many=number)
        async with stage(plan, work) as on, on.workers() as workers:
            await workers.go()
            figures = await _idle(plan, workers)
            chosen = random.Random(1).choices(work.topics, k=TASKS)
            expected = await _trickle(plan, on.app, chosen, ahead=500)
            await wait_settled(workers, TASKS, plan=plan, within=30, what=f"{number} topics")
            figures["lease_p50_ms"] = rounded((await workers.figures())[0]["lease_p50_ms"] or 0.0)
            due = time.time_ns() // NANOSECONDS + int(LEAD * 1000)
            keys = await fill(on.app, work.topic, BUSY, plan=plan, at=as_datetime(due))
            await wait_settled(workers, TASKS + BUSY, plan=plan, within=90, what=f"one busy of {number} topics")
            await workers.stop()
            log = workers.log()
        late, busy = examine(expected, log), examine(dict.fromkeys(keys, due * NANOSECONDS), log)
        figures |= _lateness(late)
        figures["busy_per_s"] = rounded((BUSY - busy.lost) / max(1e-3, busy.last_settled / 1e9 - due / 1000))
        faults += [*late.faults(), *busy.faults(), *_lost(late), *_lost(busy)]
        by_number[str(number)] = figures
    return _report("topics", by_number, faults)


async def _idle(plan: Plan, workers: Workers) -> dict[str, float]:
    """The processor time of an idle worker process, and the requests of its server; nothing without a process."""
    if not isinstance(workers, ProcessGroup):
        return {}
    await asyncio.sleep(SETTLING)
    before, load = (await workers.figures())[0], await plan.target.load()
    await asyncio.sleep(IDLE)
    after, loaded = (await workers.figures())[0], await plan.target.load()
    figures = {"idle_cpu_pct": rounded((after["cpu"] - before["cpu"]) / (after["at"] - before["at"]) * 100)}
    if plan.target.on_server:
        figures["idle_requests_per_s"] = rounded((loaded.requests - load.requests) / (loaded.at - load.at))
    return figures


async def _trickle(plan: Plan, app: Bide, topics: Sequence[str], *, ahead: int) -> dict[str, int]:
    """Schedule a task of each of these topics, `ahead` milliseconds before it is due, at the rate; see `examine`."""
    expected: dict[str, int] = {}
    calls = []
    keys = random_keys(len(topics))
    async for number in paced(len(topics), RATE):
        expected[keys[number]] = time.time_ns() + ahead * NANOSECONDS
        call = app.schedule(topics[number], PAYLOAD, key=keys[number], delay=f"{ahead}ms")
        calls.append(asyncio.create_task(call))
        plan.progress("scheduling", number, len(topics))
    await asyncio.gather(*calls)
    return expected


def _lateness(found: Findings) -> dict[str, float]:
    return {f"p{part}_ms": rounded(percentile(found.lateness or [0.0], part / 100)) for part in (50, 99)}


def _lost(found: Findings) -> list[str]:
    return [f"{found.lost} tasks were lost"] if found.lost else []


async def workers(plan: Plan, limit: Limit) -> Report:
    """One idle worker of 100 topics, then N in this process: what a trickle of tasks costs all of them together."""
    if not plan.target.shared:
        raise BenchFault("workers: memory: is seen by one process; give another store")
    by_number: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    work = Work(topic="bench.workers", many=100)
    for number in (1, plan.count(20)):
        async with stage(plan, work) as on, _workers_here(on.spec, number) as logs:
            await asyncio.sleep(SETTLING)
            stall = await _longest_stall()
            leases, cpu, load = _leases(logs), time.process_time(), await plan.target.load()
            expected = await _trickle(plan, on.app, [work.topic] * TASKS, ahead=0)
            await _settled(logs)
            loaded = await plan.target.load()
            used = {"leases": _leases(logs) - leases, "cpu_ms": (time.process_time() - cpu) * 1000}
            if plan.target.on_server:
                used["requests"] = loaded.requests - load.requests
        found = examine(expected, [entry for log in logs for entry in log.entries()])
        each = {f"{name}_per_task": rounded(value / TASKS) for name, value in used.items()}
        by_number[str(number)] = {"idle_stall_ms": rounded(stall), **each, **_lateness(found)}
        faults += [*found.faults(), *_lost(found)]
    return _report("workers", by_number, faults)


@asynccontextmanager
async def _workers_here(spec: Spec, number: int) -> AsyncIterator[list[Log]]:
    """So many workers in this process, each with a store of its own; their logs."""
    async with AsyncExitStack() as stack:
        logs = [Log() for _ in range(number)]
        for log in logs:
            app = await stack.enter_async_context(make_app(spec, log, watched=True))
            await stack.enter_async_context(app.worker(observe=log.observe))
        yield logs


async def _settled(logs: Sequence[Log]) -> None:
    """Wait until all tasks are settled, at most half a minute."""
    for _ in range(600):
        if sum(log.number for log in logs) >= TASKS:
            break
        await asyncio.sleep(0.05)


def _leases(logs: Sequence[Log]) -> int:
    return sum(log.lease_calls for log in logs)


async def _longest_stall() -> float:
    """The longest time in milliseconds for which the loop was late, while everything is idle."""
    longest, ends = 0.0, time.monotonic() + IDLE
    while (began := time.monotonic()) < ends:
        await asyncio.sleep(0.002)
        longest = max(longest, time.monotonic() - began - 0.002)
    return longest * 1000


async def payload(plan: Plan, limit: Limit) -> Report:
    """256 due tasks of 100 bytes, then of N KiB: another's calls while this process leases them, and one extend."""
    by_size: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    for size in (len(PAYLOAD), plan.count(200) * 1024):
        work = Work(topic=f"bench.payload.{size}", seconds=_HELD)
        async with stage(plan, work) as on, AsyncExitStack() as working:
            due = time.time_ns() // NANOSECONDS + int(LEAD * 1000)
            tasks = [on.app.new(work.topic, b"x" * size, at=as_datetime(due)) for _ in range(_LEASES)]
            await on.app.schedule_many(tasks)
            await asyncio.sleep(max(0.0, due / 1000 - 0.2 - time.time()))
            worker = await working.enter_async_context(on.app.worker())
            working.push_async_callback(worker.stop, grace=0)
            longest = 0.0
            while worker.stats.leased < _LEASES and time.time() < due / 1000 + _HELD:
                began = time.perf_counter()
                await on.app.schedule("bench.others", PAYLOAD, delay="1h")
                longest = max(longest, time.perf_counter() - began)
                await asyncio.sleep(0.001)
            extended, microseconds = await _extend(on.app, work.topic)
        by_size[str(size)] = {"others_max_ms": rounded(longest * 1000), "extend_ms": rounded(microseconds / 1000)}
        if extended < _LEASES:
            faults.append(f"of {_LEASES} leases of {size} bytes {extended} were extended")
    return _report("bytes", by_size, faults)


async def _extend(app: Bide, topic: str) -> tuple[int, float]:
    """Extend all leases of the topic by one call. Returns the number extended, and the time in microseconds."""
    held = [Lease(topic, task.key, task.token) async for task in app.find(topic=topic, state="leased")]
    now = time.time_ns() // NANOSECONDS
    stop = stopwatch()
    extended = sum(await app.store.extend(held, now=now, until=now + 60_000))
    return extended, stop()


def _report(what: str, by_number: Mapping[str, dict[str, float]], faults: list[str]) -> Report:
    """The figures of both shapes, and each figure of the second as a multiple of the first."""
    first, last = next(iter(by_number.values())), list(by_number.values())[-1]
    growth = {name: rounded(last[name] / max(first[name], 1e-3)) for name in first}
    figures: dict[str, Any] = {what: by_number, "growth": growth}
    return Report(fields=figures, faults=faults)
