"""The workloads of unusual shapes: `topics` (many topics), `workers` (many workers), `payload` (large payloads).

Each measures the ordinary shape and the unusual one in one run, and prints how much the unusual one is of the other:
what costs little with one topic, one worker or 100 bytes may still grow with their number.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

from bide.app import Bide
from bide.cli.output import current_millis
from bide.core.instants import as_datetime
from bide.core.records import Lease
from bide_bench.pending import SETTLING, watch_server
from bide_bench.plan import Limit, Plan, Report, random_keys, rounded
from bide_bench.processes import BenchFault
from bide_bench.target import stopwatch
from bide_bench.worker import PAYLOAD, Work, percentile
from bide_bench.workers import NANOSECONDS, Findings, ProcessGroup, Workers, examine, fill, stage, trickle, wait_settled

RATE, TASKS = 40.0, 200
"""The tasks a second, and their number, whose lateness is measured."""
IDLE = 5.0
"""Seconds for which idle workers are watched."""
BUSY = 20_000
"""The tasks of the only busy topic."""
LEAD = 3.0
"""Seconds in which tasks that are due at one instant are scheduled."""
_FIRST = 10
"""Tasks before those that count: only when a task has been taken do workers know that they hear of it."""
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
            chosen = dict(zip(random_keys(TASKS), random.Random(1).choices(work.topics, k=TASKS), strict=True))
            expected = await _trickle(plan, on.app, chosen, ahead=500)
            await wait_settled(workers, TASKS, plan=plan, within=30, what=f"{number} topics")
            figures["lease_p50_ms"] = rounded((await workers.figures())[0]["lease_p50_ms"] or 0.0)
            due = current_millis() + int(LEAD * 1000)
            keys = await fill(on.app, work.topic, BUSY, plan=plan, at=as_datetime(due))
            await wait_settled(workers, TASKS + BUSY, plan=plan, within=90, what=f"one busy of {number} topics")
            await workers.stop()
            log = workers.log()
        late, busy = examine(expected, log), examine(dict.fromkeys(keys, due * NANOSECONDS), log)
        by_number[str(number)] = {**figures, **_lateness(late), "busy_per_s": busy.per_second(BUSY, due * NANOSECONDS)}
        faults += [*_faults(late), *_faults(busy)]
    return _report("topics", by_number, faults)


async def _idle(plan: Plan, workers: Workers) -> dict[str, float]:
    """The processor time of an idle worker process, and the requests of its server; nothing without a process."""
    if not isinstance(workers, ProcessGroup):
        return {}
    await asyncio.sleep(SETTLING)
    before = (await workers.figures())[0]
    _, requests = await watch_server(plan, IDLE, "watching an idle worker")
    after = (await workers.figures())[0]
    figures = {"idle_cpu_pct": rounded((after["cpu"] - before["cpu"]) / (after["at"] - before["at"]) * 100)}
    return figures | ({"idle_requests_per_s": rounded(requests)} if plan.target.on_server else {})


async def _trickle(plan: Plan, app: Bide, topics: Mapping[str, str], *, ahead: int) -> dict[str, int]:
    """Schedule the task of each key in its topic, `ahead` milliseconds before it is due, at the rate; see `examine`."""
    return await trickle(
        plan, "scheduling", list(topics), lambda key: app.schedule(topics[key], PAYLOAD, key=key, delay=f"{ahead}ms"),
        rate=RATE, ahead=ahead,
    )  # fmt: skip


def _lateness(found: Findings) -> dict[str, float]:
    return {f"p{part}_ms": rounded(percentile(found.lateness or [0.0], part / 100)) for part in (50, 99)}


def _faults(found: Findings) -> list[str]:
    return [*found.faults(), *([f"{found.lost} tasks were lost"] if found.lost else [])]


async def workers(plan: Plan, limit: Limit) -> Report:
    """One idle worker of 100 topics, then N in this process: what a trickle of tasks costs all of them together."""
    if not plan.target.shared:
        raise BenchFault("workers: memory: is seen by one process; give another store")
    by_number: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    work = Work(topic="bench.workers", many=100)
    for number in (1, plan.count(20)):
        async with stage(plan, work) as on, on.local_workers(number) as workers:
            await workers.go()
            await asyncio.sleep(SETTLING)
            stall = await _longest_stall()
            await _trickle(plan, on.app, dict.fromkeys(random_keys(_FIRST), work.topic), ahead=0)
            await wait_settled(workers, _FIRST, plan=plan, within=30, what="the first")
            leases, cpu, load = workers.lease_calls, time.process_time(), await plan.target.load()
            expected = await _trickle(plan, on.app, dict.fromkeys(random_keys(TASKS), work.topic), ahead=0)
            await wait_settled(workers, _FIRST + TASKS, plan=plan, within=30, what=f"{number} workers")
            loaded = await plan.target.load()
            used = {"leases": workers.lease_calls - leases, "cpu_ms": (time.process_time() - cpu) * 1000}
            if plan.target.on_server:
                used["requests"] = loaded.requests - load.requests
        found = examine(expected, workers.log())
        each = {f"{name}_per_task": rounded(value / TASKS) for name, value in used.items()}
        by_number[str(number)] = {"idle_stall_ms": rounded(stall), **each, **_lateness(found)}
        faults += _faults(found)
    return _report("workers", by_number, faults)


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
            due = current_millis() + int(LEAD * 1000)
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
            held = [Lease(*task.record.ref, task.token) async for task in on.app.find(topic=work.topic, state="leased")]
            now, stop = current_millis(), stopwatch()
            extended = sum(await on.app.store.extend(held, now=now, until=now + 60_000))
            extend_ms = stop() / 1000
        by_size[str(size)] = {"others_max_ms": rounded(longest * 1000), "extend_ms": rounded(extend_ms)}
        if extended < _LEASES:
            faults.append(f"of {_LEASES} leases of {size} bytes {extended} were extended")
    return _report("bytes", by_size, faults)


def _report(what: str, by_number: Mapping[str, dict[str, float]], faults: list[str]) -> Report:
    """The figures of both shapes, and each figure of the second as a multiple of the first."""
    first, last = next(iter(by_number.values())), list(by_number.values())[-1]
    growth = {name: rounded(last[name] / max(first[name], 1e-3)) for name in first}
    return Report(fields={what: by_number, "growth": growth}, faults=faults)
