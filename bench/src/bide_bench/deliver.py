"""The workloads of workers: `burst`, `throughput`, `recurring` and `crash` (many due at once), `lateness` (a rate)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from statistics import median
from typing import Any

from bide.app import Bide
from bide.cli.output import current_millis
from bide.core.answers import Answer
from bide.core.instants import Millis, as_datetime, duration
from bide.core.options import recurrence_of
from bide.core.recurrence.rules import Cron, Every, Rule
from bide.settings import Settings
from bide_bench.plan import Limit, Plan, Report, in_batches, random_keys, rounded, uncollected
from bide_bench.processes import BenchFault
from bide_bench.worker import PAYLOAD, Start, Timers, Work, percentile
from bide_bench.workers import (
    NANOSECONDS,
    Findings,
    ProcessGroup,
    Stage,
    Workers,
    child,
    examine,
    fill,
    stage,
    trickle,
    wait_settled,
)

_SLOWEST = 1_000
"""Completions a second below which a run is given up, so that every run ends."""
_SECONDS = 15
"""Seconds of `lateness`."""
AHEAD = {"2s": "2s", "20ms": "20ms", "0": "0s", "fire": ""}
"""By the word of `--ahead`: how long before its due time a task is scheduled. `fire`: due in an hour, then fired."""
_LATE = Work(topic="bench.lateness")
_FLOOD = Work(topic="bench.flood", seconds=3600.0, concurrency=1)
"""A topic whose only slot is busy for an hour: due tasks without a free worker."""
_ZONES = (
    "Pacific/Auckland", "Australia/Sydney", "Australia/Lord_Howe", "Asia/Tokyo", "Asia/Shanghai", "Asia/Kolkata",
    "Asia/Karachi", "Asia/Dubai", "Asia/Tehran", "Europe/Istanbul", "Africa/Nairobi", "Africa/Cairo", "Europe/Helsinki",
    "Europe/Rome", "Africa/Casablanca", "Europe/London", "Atlantic/Azores", "America/Sao_Paulo", "America/St_Johns",
    "America/New_York", "America/Chicago", "America/Denver", "America/Los_Angeles", "Pacific/Honolulu",
)  # fmt: skip
LEAD = 2_000
"""Milliseconds before the instant of a burst, besides those in which its tasks are stored."""
ROUNDS = 5
"""Pairs of bursts of `recurring`."""


async def throughput(plan: Plan, limit: Limit) -> Report:
    """N due tasks, P worker processes: the rate from their start to the last acknowledged settle."""
    count, work = plan.count(300_000), Work(topic="bench.throughput")
    async with stage(plan, work) as on:
        keys = await fill(on.app, work.topic, count, plan=plan, limit=limit, delay="0s")
        async with on.workers() as workers:
            began = await workers.go()
            found = await _finish(workers, plan, dict.fromkeys(keys, 0))
    fields = {"completed_per_s": found.per_second(count, began), **_counted(found)}
    return Report(fields=fields, faults=found.faults())


async def burst(plan: Plan, limit: Limit) -> Report:
    """N tasks due at one instant: when the first and the last begin, and the rate until all are settled."""
    count, work = plan.count(100_000), Work(topic="bench.burst")
    async with stage(plan, work) as on:
        due, found = await _burst(
            on, count, lambda due: fill(on.app, work.topic, count, plan=plan, limit=limit, at=as_datetime(due))
        )
    fields = {
        "first_ms": rounded(found.first_start / NANOSECONDS - due),
        "last_ms": rounded(found.last_start / NANOSECONDS - due),
        "completed_per_s": found.per_second(count, due * NANOSECONDS),
        **_counted(found),
    }
    return Report(fields=fields, faults=found.faults())


async def _burst(
    on: Stage, count: int, filled: Callable[[Millis], Coroutine[Any, Any, Sequence[str]]]
) -> tuple[Millis, Findings]:
    """Let `count` tasks come due at one instant; `filled` stores them for that instant and returns their keys."""
    async with on.workers() as workers:
        await workers.go()
        due = current_millis() + LEAD + count // 8
        keys = await filled(due)
        if current_millis() >= due:
            raise BenchFault(f"{count} tasks could not be scheduled before they were due; give a smaller --n")
        await asyncio.sleep(due / 1000 - time.time())
        return due, await _finish(workers, on.plan, dict.fromkeys(keys, due * NANOSECONDS))


async def recurring(plan: Plan, limit: Limit) -> Report:
    """N tasks at 08:00 in 24 zones: adding them, a step of a rule, and N / 4 in bursts, in turn with ordinary tasks."""
    count, found, rates = plan.count(100_000), list[Findings](), dict[str, list[float]](once=[], recurring=[])
    some, once, again = max(1, count // 4), Work(topic="bench.once", keep_done=3_600_000), Work(topic="bench.recurring")
    async with stage(plan, once, again) as on:
        verbs = on.app.recurring

        async def add(rules: Sequence[Rule]) -> list[str]:
            keys = random_keys(len(rules))
            for pairs in in_batches([*zip(keys, rules, strict=True)]):
                await verbs.add_many([verbs.new(again.topic, rule, PAYLOAD, key=key) for key, rule in pairs])
            return keys

        began = time.perf_counter()
        await add([Cron("0 8 * * *", zone=_ZONES[number % 24]) for number in range(count)])
        seconds = time.perf_counter() - began
        ways: dict[str, Callable[[Millis], Coroutine[Any, Any, Sequence[str]]]] = {
            "once": lambda due: fill(on.app, once.topic, some, plan=plan, limit=limit, at=as_datetime(due)),
            "recurring": lambda due: add([Every("1d", start=as_datetime(due))] * some),
        }
        for turn in range(ROUNDS):
            for way in sorted(ways, reverse=turn % 2 == 1):  # neither is always the first of a pair
                due, one = await _burst(on, some, ways[way])
                rates[way].append(one.per_second(some, due * NANOSECONDS))
                found.append(one)
        rules = [Cron(f"{number % 60} {number // 60} * * *", zone=_ZONES[number % 24]) for number in range(1_440)]
        options = [verbs.new(again.topic, rule).options for rule in rules]
    fields = {
        "added_per_s": rounded(count / seconds),
        "step_us": _step_us(options),
        "step_shared_us": _step_us(options[:1] * len(options)),
        **{f"{way}_per_s": median(rates[way]) for way in ways},
        "recurring_to_once": rounded(median(map(truediv, rates["recurring"], rates["once"]))),
        **{name: sum(_counted(one)[name] for one in found) for name in ("lost", "duplicated")},
    }
    return Report(fields=fields, faults=[fault for one in found for fault in one.faults()])


def _step_us(options: Sequence[bytes]) -> float:
    """The microseconds in which a task with such options finds its next instant, which no other task has looked up."""
    now = current_millis()
    with uncollected():
        began = time.perf_counter()
        for number, one in enumerate(options):
            recurrence = recurrence_of(one)
            assert recurrence is not None
            recurrence.rule.after(now + number)
        return rounded((time.perf_counter() - began) / len(options) * 1e6)


async def _finish(workers: Workers, plan: Plan, expected: Mapping[str, int]) -> Findings:
    """Wait until all are settled, and examine the deliveries."""
    await wait_settled(workers, len(expected), plan=plan, within=30 + len(expected) / _SLOWEST)
    await workers.stop()
    return examine(expected, workers.log())


def _counted(found: Findings) -> dict[str, int]:
    return {"lost": found.lost, "duplicated": found.duplicated}


async def crash(plan: Plan, limit: Limit) -> Report:
    """5000 tasks due over three seconds, two workers, and a `kill -9` of one in the middle."""
    if not plan.target.shared:
        raise BenchFault("crash: memory: ends with its process, so nothing can be recovered; give another store")
    count, lease = plan.count(5_000), Settings().lease
    # done tasks are remembered: a worker may die between an acknowledged settle and logging it
    work = Work(topic="bench.crash", seconds=0.05, keep_done=120_000)
    async with stage(replace(plan, processes=2), work, journal=True) as on, on.workers() as workers:
        assert isinstance(workers, ProcessGroup)
        await workers.go()
        begun = current_millis()
        expected = {f"task-{number}": begun + 3_000 + number * 3_000 // count for number in range(count)}
        await on.app.schedule_many(
            [on.app.new(work.topic, PAYLOAD, key=key, at=as_datetime(due)) for key, due in expected.items()]
        )
        await asyncio.sleep(begun / 1000 + 4.0 - time.time())
        workers.members[0].kill()
        live = await _live_after(on.app, work.topic, 13 + lease / 1000, workers, plan, count)
        await workers.stop()
        entries = workers.log()
        found = examine({key: at * NANOSECONDS for key, at in expected.items()}, entries)
        lost = found.lost
        if lost:
            acknowledged = {entry.key for entry in entries if not isinstance(entry, Start)}
            records = await on.app.get_many([(work.topic, key) for key in expected if key not in acknowledged])
            lost = sum(1 for task in records if task is None or task.state != "done")
    recovered = max(found.lateness, default=0.0)
    fields = {
        "lost": lost,
        "duplicated": found.duplicated,
        "redelivered": found.redelivered,
        "recovered_ms": rounded(recovered),
    }
    faults = found.faults(crash=True)
    if recovered > lease + 1000:
        faults.append(f"recovered only after {recovered:.0f} ms")
    if live:
        faults.append(f"{live} tasks were still live at the end")
    return Report(fields=fields, faults=faults)


async def _live_after(app: Bide, topic: str, seconds: float, workers: Workers, plan: Plan, count: int) -> int:
    """The number of live tasks after `seconds`; 0 as soon as there are none."""
    ends, live = time.monotonic() + seconds, count
    while live and time.monotonic() < ends:
        plan.progress("settled", workers.settled, count)
        await asyncio.sleep(0.25)
        live = 0
        for state in ("waiting", "leased"):
            live += len([task async for task in app.find(topic=topic, state=state, page=1)])
    return live


async def lateness(plan: Plan, limit: Limit) -> Report:
    """R tasks a second, scheduled by this process and delivered by another, among pending ones."""
    ways = list(AHEAD) if plan.ahead == "all" else [plan.ahead]
    fields: dict[str, Any] = {}
    faults: list[str] = []
    async with stage(plan, _LATE, _FLOOD) as on:
        await fill(on.app, _LATE.topic, plan.pending, plan=plan, delay="1h")
        await fill(on.app, _FLOOD.topic, plan.flood, plan=plan, delay="0s")
        if plan.pending or plan.flood:
            await plan.target.flush()
        for way in ways:
            suffix = f"_{way}" if plan.ahead == "all" and way != "2s" else ""
            found, call_at = await _late(plan, on, way)
            fields |= {f"{name}{suffix}": value for name, value in _figures(found, call_at).items()}
            faults += found.faults()
    return Report(fields=fields, faults=faults)


async def _late(plan: Plan, on: Stage, way: str) -> tuple[Findings, list[float]]:
    """Measure tasks scheduled one way, and the lateness of `loop.call_at` at the same time."""
    count = plan.count(round(plan.rate * _SECONDS))
    ahead = duration(AHEAD[way] or "0s")
    keys = await fill(on.app, _LATE.topic, count, plan=plan, delay="1h") if way == "fire" else random_keys(count)
    timers = Timers(count=count, rate=plan.rate, ahead=ahead, loop=plan.loop)

    def call(key: str) -> Coroutine[Any, Any, Answer]:
        if way == "fire":
            return on.app.fire_now(_LATE.topic, key)
        return on.app.schedule(_LATE.topic, PAYLOAD, key=key, delay=AHEAD[way])

    # started before, so that its start does not disturb the measurement
    async with on.workers() as workers, child("the process for loop.call_at", timers) as call_at:
        await workers.go()
        await asyncio.sleep(0.5)
        before = workers.settled
        call_at.send("go")
        expected = await trickle(plan, f"ahead {way}: scheduling", keys, call, rate=plan.rate, ahead=ahead)
        await wait_settled(workers, before + count, plan=plan, within=ahead / 1000 + 20, what=f"ahead {way}")
        late = sorted(await call_at.receive("late"))
        await workers.stop()
        return examine(expected, workers.log()), late


def _figures(found: Findings, call_at: list[float]) -> Mapping[str, float]:
    parts = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    sides = {"": found.lateness, "after_wake_": found.after_wake, "call_at_": call_at}
    figures = {
        f"{side}{name}": rounded(percentile(values, part)) if values else 0.0
        for side, values in sides.items()
        for name, part in parts.items()
        if not side or part in (0.5, 0.99)
    }
    return {**figures, "early": found.early, **_counted(found)}
