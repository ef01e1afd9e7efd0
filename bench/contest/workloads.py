"""The four workloads, each one run of one contestant: the same orders, the same log, the same arithmetic for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from bench.contest.client import now
from bench.contest.report import Figures, Seen, examine
from bench.contest.stage import Run, stage
from bench.contest.tasks import text

from bide_bench.plan import rounded
from bide_bench.processes import BenchFault
from bide_bench.worker import percentile

_HOUR = 3_600_000
_AHEAD = 2_000
_CRASHED = 500
LEASE = 10
"""Seconds that a dead worker's tasks wait, in all libraries that let it be set: what bide has by default."""
_CRASH_SECONDS = 0.05
"""Seconds that a handler of `crash` sleeps, so that the worker that dies is in the middle of something."""
_CRASH_BOUND = 60.0
_SETTLING = 500_000_000
"""Nanoseconds before a burst in which nothing is scheduled any more."""
_SLOWEST = 100
"""Tasks a second below which a run is given up."""


async def schedule(run: Run) -> Figures:
    """`count` tasks due in an hour: a call each from many callers, then in bulk where there is such a call."""
    rates: dict[str, float | None] = {}
    for way in ("concurrent", "bulk"):
        async with stage(run, workers=0) as on:
            if way == "bulk" and not on.producer.bulk:
                rates["bulk_per_s"] = None
                continue
            answer = await on.producer.order(way, count=run.count, due=now() + _HOUR, spread=run.count)
            rates[f"{way}_per_s"] = rounded(run.count / answer["seconds"])
    return rates


async def burst(run: Run) -> Figures:
    """`count` tasks due at one instant (a whole second, which is as fine as some can say), one worker."""
    async with stage(run, workers=1) as on:
        due = (now() + 3_000 + run.count) // 1000 * 1000  # the slowest schedule 3,000 a second
        way = "bulk" if on.producer.bulk else "concurrent"
        answer = await on.producer.order(way, count=run.count, due=due, spread=0)
        if answer["ended"] > due * 1_000_000 - _SETTLING:
            raise BenchFault(f"{run.count} tasks could not be scheduled before they were due")
        await asyncio.sleep(due / 1000 - time.time())
        await on.wait(run.count, within=30 + run.count / _SLOWEST)
        seen = examine(run.count, on.lines())
    found, done = seen.found, run.count - len(seen.missing)
    return {
        "completed_per_s": rounded(done / ((found.last_start - due * 1_000_000) / 1e9)) if done else 0.0,
        "drained_per_s": rounded((done - 1) / ((found.last_start - found.first_start) / 1e9)) if done > 1 else None,
        "first_ms": rounded(found.lateness[0]) if done else None,
        "last_ms": rounded(found.lateness[-1]) if done else None,
        **_counted(seen),
    }


async def lateness(run: Run) -> Figures:
    """`rate` tasks a second for some seconds, each due two seconds after it is scheduled, one worker."""
    count = int(run.rate * run.seconds)
    async with stage(run, workers=1) as on:
        await on.producer.order("pace", count=count, rate=run.rate, ahead=_AHEAD)
        await on.wait(count, within=30 + _AHEAD / 1000)
        seen = examine(count, on.lines())
    late = seen.found.lateness
    return {
        "p50_ms": rounded(percentile(late, 0.5)) if late else None,
        "p99_ms": rounded(percentile(late, 0.99)) if late else None,
        "max_ms": rounded(late[-1]) if late else None,
        **_counted(seen),
    }


async def crash(run: Run) -> Figures:
    """Tasks due in 3 to 6 seconds, two workers, `kill -9` for one at work at 4; then a minute's patience."""
    async with stage(run, workers=2, lease=LEASE, seconds=_CRASH_SECONDS) as on:
        begun = now()
        way = "bulk" if on.producer.bulk else "concurrent"
        due, spread = begun + 3_000, 3_000
        answer = await on.producer.order(way, count=_CRASHED, due=due, spread=spread)
        if answer["ended"] > due * 1_000_000:
            raise BenchFault(f"{_CRASHED} tasks could not be scheduled within 3 s")
        await asyncio.sleep((begun + 4_000) / 1000 - time.time())
        await on.workers[0].kill_at_work(within=2.0)
        await on.wait(_CRASHED, within=2 + _CRASH_BOUND, ended=True)
        seen = examine(_CRASHED, on.lines(), sleeping=True)
        undone = {text(number, due + (number - 1) * spread // _CRASHED) for number in seen.undone}
        kept = run.server.holds(undone)
    return {
        "unfired": len(seen.missing),
        "undone": len(undone),
        "lost": len(undone - kept),
        "duplicated": seen.found.duplicated,
        "redelivered": seen.found.redelivered,
        "early": seen.found.early,
        "recovered_ms": rounded(seen.found.lateness[-1]) if seen.found.lateness else None,
    }


def _counted(seen: Seen) -> dict[str, float]:
    return {
        "missing": len(seen.missing),
        "duplicated": seen.found.duplicated + seen.found.redelivered,
        "early": seen.found.early,
    }


WORKLOADS: Mapping[str, Callable[[Run], Awaitable[Figures]]] = {
    workload.__name__: workload for workload in (schedule, burst, lateness, crash)
}

COMPARED: Mapping[str, Sequence[str]] = {
    "schedule": ("concurrent_per_s", "bulk_per_s"),
    "burst": ("completed_per_s", "drained_per_s"),
    "lateness": ("p50_ms", "p99_ms"),
    "crash": (),
}
"""The figures that a ratio means something for; all others are shown as they are."""
