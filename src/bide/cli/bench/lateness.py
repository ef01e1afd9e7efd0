"""The workload `lateness`: how long after its time a handler begins, with `loop.call_at` beside it."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bide.app import Bide
from bide.cli.bench import call_at as call_at_module
from bide.cli.bench.call_at import Load
from bide.cli.bench.check import NANOSECONDS, Findings, examine
from bide.cli.bench.crew import BenchFault, crew_of, settled, stage
from bide.cli.bench.filling import fill
from bide.cli.bench.limits import limit_of, random_keys
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.worker import PAYLOAD, Log, Work, percentile
from bide.core.answers import Answer
from bide.core.instants import duration

TOPIC = "bench.lateness"
FLOOD = "bench.flood"
SECONDS = 15
AHEAD = {"2s": "2s", "20ms": "20ms", "0": "0s", "fire": ""}
"""By the word of `--ahead`: how long before it is due a task is scheduled. `fire`: due in an hour, then fired."""
_AFTER_WAKE = {"p50_ms": 0.5, "p99_ms": 0.99}
_WORKS = (Work(topic=TOPIC), Work(topic=FLOOD, seconds=3600.0, concurrency=1))
"""The flood has one worker, and that one is busy for an hour: due tasks with no free worker."""


async def lateness(plan: Plan) -> Report:
    """R tasks a second, scheduled by this process and worked on by another, among what waits already."""
    words = list(AHEAD) if plan.ahead == "all" else [plan.ahead]
    fields: dict[str, Any] = {}
    faults: list[str] = []
    with limit_of(plan) as limit:
        limit.measure(5)
        async with stage(plan, *_WORKS) as (app, log):
            await fill(app, TOPIC, plan.pending, delay="1h", plan=plan)
            await fill(app, FLOOD, plan.flood, delay="0s", plan=plan)
            if plan.pending or plan.flood:
                plan.place.flush()
            for word in words:
                suffix = f"_{word}" if plan.ahead == "all" and word != "2s" else ""
                found, late = await _one(plan, app, log, word)
                fields |= {f"{name}{suffix}": value for name, value in _figures(found, late).items()}
                faults += found.faults()
        limit.measure(5)
        return Report(fields={**fields, **limit.fields({})}, faults=faults)


async def _one(plan: Plan, app: Bide, log: Log, word: str) -> tuple[Findings, list[float]]:
    """One stretch of tasks, all scheduled so far ahead."""
    count = plan.count(round(plan.rate * SECONDS))
    ahead = duration(AHEAD[word] or "0s")
    if word == "fire":
        keys = await fill(app, TOPIC, count, delay="1h", plan=plan)
    else:
        keys = random_keys(count)
    async with crew_of(plan, app, log, _WORKS) as crew, _call_at(plan, count, ahead) as call_at:
        await crew.go()
        await asyncio.sleep(0.5)
        before = crew.settled
        beside = asyncio.create_task(_lateness_of(call_at))
        expected = await _schedule(plan, app, keys, word, ahead)
        await settled(crew, before + count, plan=plan, within=ahead / 1000 + 20, what=f"ahead {word}")
        late = await beside
        await crew.stop()
        return examine(expected, *crew.log()), late


async def _schedule(plan: Plan, app: Bide, keys: list[str], word: str, ahead: int) -> dict[str, int]:
    """Schedule them at the plan's rate, whatever each takes; for each the nanosecond that it must not precede."""
    loop = asyncio.get_running_loop()
    expected: dict[str, int] = {}
    calls: list[asyncio.Task[Answer]] = []
    begun = loop.time()
    for number, key in enumerate(keys):
        pause = begun + number / plan.rate - loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        expected[key] = time.time_ns() + ahead * NANOSECONDS
        calls.append(loop.create_task(_call(app, key, word)))
        if number % 50 == 0:
            plan.progress(f"ahead {word}: scheduling", number, len(keys))
    answers = await asyncio.gather(*calls)
    refused = [answer.result.value for answer in answers if not answer.ok]
    if refused:
        raise BenchFault(f"{len(refused)} calls were not done; the first answer: {refused[0]}")
    return expected


async def _call(app: Bide, key: str, word: str) -> Answer:
    if word == "fire":
        return await app.fire_now(TOPIC, key)
    return await app.schedule(TOPIC, PAYLOAD, key=key, delay=AHEAD[word])


@asynccontextmanager
async def _call_at(plan: Plan, count: int, ahead: int) -> AsyncIterator[Process]:
    """A process that is ready to do the same with `loop.call_at`: its start would hold up what is measured."""
    load = Load(count=count, rate=plan.rate, ahead=ahead, loop=plan.loop)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", call_at_module.__file__, msgspec.json.encode(load).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != call_at_module.READY:
            raise _ended(await process.wait())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _lateness_of(call_at: Process) -> list[float]:
    """Under the same load, from now on; in milliseconds, sorted."""
    said, _ = await call_at.communicate(call_at_module.GO)
    if call_at.returncode:
        raise _ended(call_at.returncode)
    return sorted(msgspec.json.decode(said, type=list[float]))


def _ended(code: int) -> BenchFault:
    return BenchFault(f"the process for loop.call_at ended with {code}; what it wrote is above")


def _figures(found: Findings, call_at: list[float]) -> Mapping[str, float]:
    late, woken = found.lateness, found.after_wake
    parts = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {
        **{name: rounded(percentile(late, part)) if late else 0.0 for name, part in parts.items()},
        **{
            f"after_wake_{name}": rounded(percentile(woken, part)) if woken else 0.0
            for name, part in _AFTER_WAKE.items()
        },
        "early": found.early,
        "lost": found.lost,
        "duplicated": found.duplicated,
        "call_at_p50_ms": rounded(percentile(call_at, 0.5)),
        "call_at_p99_ms": rounded(percentile(call_at, 0.99)),
    }
