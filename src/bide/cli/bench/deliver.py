"""The workloads `burst`, `throughput` and `crash`: many tasks due together, and what becomes of them."""

from __future__ import annotations

import asyncio
import time

from bide.cli.bench.check import NANOSECONDS, Findings, examine
from bide.cli.bench.crew import BenchFault, ProcessCrew, crew_of, settled, stage
from bide.cli.bench.filling import fill
from bide.cli.bench.limits import BATCH, limit_of, random_keys
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.worker import PAYLOAD, Work
from bide.core.instants import as_datetime
from bide.settings import Settings

_SLOWEST = 1_000
"""Completions a second below which a run is given up: so every run is bounded in time."""


async def throughput(plan: Plan) -> Report:
    """N tasks that are due already, P worker processes, from their start to the last acknowledged settle."""
    count = plan.count(300_000)
    work = Work(topic="bench.throughput")
    with limit_of(plan) as limit:
        async with stage(plan, work) as (app, log):
            keys = await fill(app, work.topic, count, delay="0s", plan=plan, limit=limit)
            async with crew_of(plan, app, log, [work]) as crew:
                began = await crew.go()
                await settled(crew, count, plan=plan, within=30 + count / _SLOWEST, what="settled")
                await crew.stop()
                found = examine(dict.fromkeys(keys, 0), *crew.log())
        figures = {"completed_per_s": _rate(count, found, began)}
        counted = {"lost": found.lost, "duplicated": found.duplicated}
        return Report(fields={**figures, **counted, **limit.fields(figures)}, faults=found.faults())


async def burst(plan: Plan) -> Report:
    """N tasks due at one instant: when the first and the last of them begin, and when all are settled."""
    count = plan.count(100_000)
    work = Work(topic="bench.burst")
    with limit_of(plan) as limit:
        async with stage(plan, work) as (app, log), crew_of(plan, app, log, [work]) as crew:
            await crew.go()
            due = time.time_ns() // 1_000_000 + 2_000 + count // 8
            at = as_datetime(due)
            keys: list[str] = []
            while len(keys) < count:
                plan.progress("scheduling", len(keys), count)
                limit.measure()
                some = random_keys(min(BATCH, count - len(keys)))
                await app.schedule_many([app.new(work.topic, PAYLOAD, key=key, at=at) for key in some])
                keys += some
            if time.time_ns() // 1_000_000 >= due:
                raise BenchFault(f"{count} tasks could not be scheduled before they were due; give a smaller --n")
            await asyncio.sleep(due / 1000 - time.time())
            await settled(crew, count, plan=plan, within=30 + count / _SLOWEST, what="settled")
            await crew.stop()
            found = examine(dict.fromkeys(keys, due * NANOSECONDS), *crew.log())
        figures = {
            "first_ms": _since(found.first_start, due),
            "last_ms": _since(found.last_start, due),
            "completed_per_s": _rate(count, found, due * 1_000_000),
        }
        counted = {"lost": found.lost, "duplicated": found.duplicated}
        return Report(fields={**figures, **counted, **limit.fields(figures)}, faults=found.faults())


async def crash(plan: Plan) -> Report:
    """5000 tasks due over three seconds, two workers, and `kill -9` for one of them in the middle."""
    if not plan.place.shared:
        raise BenchFault("crash: memory: ends with its process, so that nothing can be recovered; give another store")
    count = plan.count(5_000)
    # what was done is remembered, for a worker may die between an acknowledged settle and writing it down
    work = Work(topic="bench.crash", seconds=0.05, keep_done=120_000)
    two = Plan(place=plan.place, processes=2, loop=plan.loop, progress=plan.progress)
    with limit_of(plan) as limit:
        limit.measure(5)
        async with stage(plan, work) as (app, log), crew_of(two, app, log, [work], journal=True) as crew:
            assert isinstance(crew, ProcessCrew)
            await crew.go()
            begun = time.time_ns() // 1_000_000
            expected: dict[str, int] = {}
            tasks = []
            for number in range(count):
                key = f"task-{number}"
                expected[key] = begun + 3_000 + number * 3_000 // count
                tasks.append(app.new(work.topic, PAYLOAD, key=key, at=as_datetime(expected[key])))
            await app.schedule_many(tasks)
            await asyncio.sleep(begun / 1000 + 4.0 - time.time())
            crew.members[0].kill()
            lease = Settings().lease
            still_live = 0
            ends = time.monotonic() + 3 + lease / 1000 + 10
            while time.monotonic() < ends:
                plan.progress("settled", crew.settled, count)
                await asyncio.sleep(0.25)
                live = [task async for task in app.find(topic=work.topic, state="waiting", page=1)]
                live += [task async for task in app.find(topic=work.topic, state="leased", page=1)]
                still_live = len(live)
                if not live:
                    break
            await crew.stop()
            starts, settles = crew.log()
            found = examine({key: at * NANOSECONDS for key, at in expected.items()}, starts, settles)
            lost = found.lost
            if lost:
                acknowledged = {settle.key for settle in settles}
                records = await app.get_many([(work.topic, key) for key in expected if key not in acknowledged])
                lost = sum(1 for task in records if task is None or task.state != "done")
        recovered = max(((start.at / 1e6) - expected[start.key] for start in starts), default=0.0)
        fields = {
            "lost": lost,
            "duplicated": found.duplicated,
            "redelivered": found.redelivered,
            "recovered_ms": rounded(recovered),
        }
        faults = found.faults(crash=True)
        if recovered > lease + 1000:
            faults.append(f"recovered only after {recovered:.0f} ms")
        if still_live:
            faults.append(f"{still_live} tasks were still live at the end")
        return Report(fields={**fields, **limit.fields({})}, faults=faults)


def _rate(count: int, found: Findings, began: int) -> float:
    return rounded((count - found.lost) / max(1e-9, (found.last_settled - began) / 1e9))


def _since(at: int, due: int) -> float:
    return rounded(at / 1e6 - due)
