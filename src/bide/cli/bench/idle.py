"""The workload `idle`: what a worker costs while nothing is due."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from bide.cli.bench.crew import WorkerProcess, stage
from bide.cli.bench.filling import fill
from bide.cli.bench.limits import limit_of
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.server import Load, Server
from bide.cli.bench.worker import Spec, Work

SECONDS = 10.0
SETTLING = 2.0
"""Seconds that a worker is left alone before it is measured: it has just started."""


async def idle(plan: Plan) -> Report:
    """N tasks due in an hour and one worker process, with nobody else connected.

    For `memory:` the tasks are in the worker's own process. The CPU time is the process's own count, of all its
    threads, in nanoseconds: a tenth of a percent of ten seconds is one tick of what the system shows of others.

    A server is measured by its own count too, first alone and then with the worker, and the first is taken off;
    `calls_per_s` is then how often it was asked something (a read from a client of Redis, a transaction of a database),
    and otherwise the calls of the store. Where a server does not count its processor time, and its processes are not to
    be seen on this machine, `server_cpu_pct` is null.
    """
    count = plan.count(100_000)
    work = Work(topic="bench.idle")
    with limit_of(plan) as limit, tempfile.TemporaryDirectory(prefix="bide-bench-log-") as directory:
        limit.measure(5)
        if plan.place.shared:
            async with stage(plan) as (app, _):
                await fill(app, work.topic, count, delay="1h", plan=plan)
                if not plan.place.owned:  # its end would take the tasks away again
                    return _report(await _watch(plan, _spec(plan, work, directory, 0)), limit.fields({}))
        pending = 0 if plan.place.shared else count
        return _report(await _watch(plan, _spec(plan, work, directory, pending)), limit.fields({}))


def _spec(plan: Plan, work: Work, directory: str, pending: int) -> Spec:
    log = str(Path(directory) / "worker.log")
    return Spec(store=plan.place.url, works=(work,), log=log, loop=plan.loop, pending=pending, history=plan.history)


async def _watch(plan: Plan, spec: Spec) -> dict[str, Any]:
    server = plan.place.server
    alone = await _alone(plan, server) if server else (None, 0.0)
    worker = await WorkerProcess.start(spec)
    try:
        worker.tell("go")
        await worker.said("working")
        await asyncio.sleep(SETTLING)
        worker.tell("usage")
        before = await worker.said("usage")
        load_before = server.load() if server else None
        await _pass_time(plan, "watching an idle worker")
        load_after = server.load() if server else None
        resident = _resident_megabytes(worker.pid)
        worker.tell("usage")
        after = await worker.said("usage")
    finally:
        await worker.stop()
    seconds = (after["at"] - before["at"]) / 1e9
    server_cpu: float | None = 0.0
    calls = (after["calls"] - before["calls"]) / seconds
    if load_before and load_after:
        busy, requests = _rates(load_before, load_after)
        server_cpu = None if busy is None or alone[0] is None else max(0.0, busy - alone[0])
        calls = max(0.0, requests - alone[1])
    return {
        "worker_cpu_pct": rounded((after["cpu"] - before["cpu"]) / 1e9 / seconds * 100),
        "server_cpu_pct": None if server_cpu is None else rounded(server_cpu),
        "worker_rss_mb": rounded(resident),
        "calls_per_s": rounded(calls),
    }


async def _alone(plan: Plan, server: Server) -> tuple[float | None, float]:
    """What the server takes with nobody connected, and how much it is asked, by its replicas for example."""
    await asyncio.sleep(SETTLING)
    before = server.load()
    await _pass_time(plan, "watching the server alone")
    return _rates(before, server.load())


def _rates(before: Load, after: Load) -> tuple[float | None, float]:
    """Percent of a processor (None where the server is not to be looked into), and requests a second."""
    seconds = after.at - before.at
    cpu = None if after.cpu is None or before.cpu is None else (after.cpu - before.cpu) / seconds * 100
    return cpu, (after.requests - before.requests) / seconds


async def _pass_time(plan: Plan, what: str) -> None:
    for tenth in range(10):
        plan.progress(what, tenth, 10)
        await asyncio.sleep(SECONDS / 10)


def _report(figures: dict[str, Any], limit: dict[str, Any]) -> Report:
    return Report(fields={**figures, **limit})


def _resident_megabytes(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0
