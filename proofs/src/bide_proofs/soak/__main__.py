"""Run a store for a long time, and check that nothing grows: see the package."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_high
from typing import Any

import msgspec

from bide import __version__
from bide.app import Bide
from bide.core.events import Event, EventKind
from bide.core.names import new_id
from bide.core.records import OutcomeKind
from bide.engine.delivery.lease_extender import PAGE, PURGE_EVERY
from bide.settings import Settings
from bide_bench.plan import rounded
from bide_bench.target import Target
from bide_proofs import soak
from bide_proofs.harness.command import (
    PATIENCE,
    POLL_EVERY,
    WrongByKind,
    add_seed,
    live_tasks,
    own_place,
    parser_of,
    positive,
    progress,
    tried,
)
from bide_proofs.harness.processes import ChildSpec, ProcessGroup
from bide_proofs.servers.process import free_port
from bide_proofs.servers.server import ServiceProcess
from bide_proofs.soak import measure, worker
from bide_proofs.soak.load import Load
from bide_proofs.soak.measure import EVENTS, GROWS, LEAST, judged, remains, too_much
from bide_proofs.soak.worker import FAILING, KEPT, ON_PURPOSE, Ids

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Variables for all processes, as in deploy/: without them glibc's resident memory grows slowly while the memory in use
stays the same. By default glibc gives threads separate heaps, and a block that moves between threads takes new pages
from each in turn: a megabyte a minute with 32 threads. It also starts to place large blocks in the heap, between small
ones; every read from a socket allocates 256 KiB and returns nearly all of it: 0.2 MB a minute at 6,000 tasks a
second."""
SERVICE, WORKER = "service", "worker"
_UNDER_WAY = 2_000
"""Concurrent tasks while the maximum is measured: enough that no part waits for the others."""


class Soak:
    """The soak of one store."""

    def __init__(self, given: argparse.Namespace, place: Target, folder: Path) -> None:
        self.wrong: dict[str, list[str]] = {kind: [] for kind in ("lost", "early", "left", "failed", "grows")}
        self._given = given
        self._place = place
        self._seconds = 60.0 * given.minutes
        self._long = self._seconds >= LEAST
        self._keep = min(20.0, max(1.0, self._seconds / 10))
        self._samples = folder / "samples.jsonl"
        """Samples are kept in a file, since the memory of this process is measured."""
        self._before: tuple[float, int] | None = None
        self._service = ServiceProcess(folder / SERVICE, port=free_port()) if given.service else None
        self._url = place.url if self._service is None else self._service.url
        self._group = ProcessGroup(folder, self._spec_of)
        self._app = Bide(self._url, settings=Settings(keep_done=0, keep_cancelled=0))
        self._app.retain(KEPT, done=f"{self._keep}s", cancelled=f"{self._keep}s")
        self._app.retain(FAILING, dead=f"{self._keep}s")
        self._load = Load(self._app, given.seed, int(given.soon * 1000))

    def _spec_of(self, kind: str, slot: int, name: str) -> ChildSpec:
        spec = worker.Spec(url=self._url, keep=self._keep, leak=self._given.leak)
        return ChildSpec(module="bide_proofs.soak.worker", spec=spec)

    async def go(self) -> dict[str, Any]:
        """Run the soak; return the report. Raises ChildFailed, ServerFailed."""
        given, place, group, service, begun = self._given, self._place, self._group, self._service, datetime.now(UTC)
        async with Bide(place.url, settings=Settings(keep_done=0, keep_cancelled=0)) as app:
            await _fill_events(app)
        async with AsyncExitStack() as entered:
            if service is not None:
                service.store = place.url
                entered.push_async_callback(asyncio.to_thread, service.stop)
                await asyncio.to_thread(service.start)
            entered.push_async_callback(group.abandon)
            async with self._app:
                await group.start(WORKER, given.workers)
                report = await self._soak()
                await group.end(WORKER)
            if service is not None:
                if not service.running:
                    self.wrong["failed"].append("the service has ended by itself")
                await asyncio.to_thread(service.halt)
        self.wrong["failed"] += group.wrong
        left = await remains(place)
        minutes = (datetime.now(UTC) - begun).total_seconds() / 60
        self.wrong["left"] += too_much(left, minutes=minutes, processes=group.started + 1 + (service is not None))
        machine = {"cpus": os.cpu_count() or 1, "python": platform.python_version(), "system": platform.system()}
        return {
            **({"store": place.kind} if service is None else {"store": "http", "behind": place.kind}),
            "version": __version__, "at": begun.isoformat(timespec="seconds"), "machine": machine,
            **report, "left": left,
        }  # fmt: skip

    async def _soak(self) -> dict[str, Any]:
        """Run the part that needs the store open; return its report."""
        given, load = self._given, self._load
        most = await self._maximum()
        rate = given.rate or max(1.0, rounded(most / 2))
        progress(f"{most:.0f} tasks a second at the most; {rate:.0f} from now on, for {self._seconds:.0f} s")
        reached = await self._run(rate)
        drained, forgotten = await self._drain(), await self._forget()
        counted = await self._ask_all()
        missing = self._balance(counted)
        samples = [msgspec.json.decode(line) for line in self._samples.read_bytes().splitlines()]
        slopes = judged(samples)
        if self._long:
            self.wrong["grows"] += [f"{name}: {slope}" for name, slope in slopes.items() if slope.verdict == GROWS]
        late = {
            part: rounded(median_high([one[name] for one in samples if name in one] or [0.0]))
            for part, name in (("p50", "late_p50_ms"), ("p99", "late_p99_ms"))
        }
        sums = {name: sum(one[name] for one in counted) for name in ("begun", "early", "redelivered")}
        return {
            "seconds": round(self._seconds), "seed": given.seed, "workers": given.workers,
            "maximum_per_s": round(most), "rate_asked": rounded(rate), "rate": rounded(reached),
            "load": dict(sorted(load.answers.items())), "deliveries": sums["begun"],
            "verdicts": {verdict: sum(one["verdicts"][verdict] for one in counted) for verdict in OutcomeKind},
            "lost": max(0, missing), "duplicated": max(0, -missing), "early": sums["early"],
            "redelivered": sums["redelivered"], "failed": load.failed,
            "drained_seconds": round(drained, 1), "forgotten_seconds": round(forgotten, 1),
            "lateness_ms": {**late, "most": rounded(max(one["latest_ms"] for one in counted))},
            "judged": self._long, "samples": len(samples),
            "slopes": {name: slope.rounded() for name, slope in slopes.items()},
        }  # fmt: skip

    async def _ask_all(self) -> list[dict[str, Any]]:
        """Ask each worker for its counts. Raises ChildFailed if one has ended."""
        return list(await asyncio.gather(*(child.ask("counts") for child in self._group.of(WORKER))))

    async def _maximum(self) -> float:
        """Measure the maximum: ended lives a second, without the first third of the time."""
        load, seconds = self._load, self._given.measure

        def ended() -> int:
            return sum(child.settled for child in self._group.of(WORKER)) + load.cancelled.number

        flood = asyncio.create_task(load.flood(seconds, lambda: load.begun.number - ended() - load.far, _UNDER_WAY))
        await asyncio.sleep(seconds / 3)
        before, began = ended(), time.monotonic()
        await flood
        return (ended() - before) / (time.monotonic() - began)

    async def _run(self, rate: float) -> float:
        """Run the load at `rate`, and take samples; return the tasks scheduled a second."""
        await self._ask_all()  # discards the lateness of the flood
        running = asyncio.create_task(self._load.run(self._seconds, rate))
        began = due = time.monotonic()
        with self._samples.open("wb") as file:
            while not running.done():
                due += self._given.every
                await asyncio.wait([running], timeout=max(0.0, due - time.monotonic()))
                if not running.done():
                    line = msgspec.json.encode(await self._sample(time.monotonic() - began)) + b"\n"
                    file.write(line)
                    if self._given.samples:
                        with self._given.samples.open("ab") as copy:
                            copy.write(line)
        return await running

    async def _sample(self, at: float) -> dict[str, Any]:
        live, known = await live_tasks(self._app), (await self._app.tally()).number()
        counted = await self._ask_all()
        ended = sum(one["ended"]["number"] for one in counted)
        before, self._before = self._before, (at, ended)
        sample: dict[str, Any] = {
            "at": round(at, 3), "live": live, "remembered": known - live,
            "completed_per_s": 0.0 if before is None else (ended - before[1]) / (at - before[0]),
            **await measure.store(self._place),
        }  # fmt: skip
        processes = {"client": {"blocks": sys.getallocatedblocks(), **measure.process(os.getpid())}}
        for child, one in zip(self._group.of(WORKER), counted, strict=True):
            processes[f"worker-{child.slot + 1}"] = {"blocks": one["blocks"], **measure.process(child.pid)}
        if self._service is not None and self._service.running:
            processes[SERVICE] = measure.process(self._service.pid)
        for whose, figures in processes.items():
            sample |= {f"{whose}_{name}": value for name, value in figures.items()}
        for name in ("late_p50_ms", "late_p99_ms"):
            if found := [one[name] for one in counted if name in one]:
                sample[name] = max(found)
        return sample

    async def _drain(self) -> float:
        """Wait until no task is live; return the seconds."""
        began = time.monotonic()
        await self._load.finish()
        while alive := await live_tasks(self._app):
            if time.monotonic() > began + PATIENCE:
                self.wrong["left"].append(f"{alive} tasks were still alive after {PATIENCE:.0f} s")
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def _forget(self) -> float:
        """Wait until ended tasks are forgotten, in a long run by the workers' purge; return the seconds."""
        app, began = self._app, time.monotonic()
        until = began + self._keep + (PURGE_EVERY if self._long else 0.0) + PATIENCE
        while kept := (await app.tally()).number() - await live_tasks(app):
            if time.monotonic() > until:
                self.wrong["left"].append(f"{kept} ended tasks are remembered longer than they should be")
                break
            while not self._long and await app.store.purge(now=app.clock.now(), limit=PAGE) == PAGE:
                pass
            await asyncio.sleep(POLL_EVERY)
        return time.monotonic() - began

    def _balance(self, counted: Sequence[Mapping[str, Any]]) -> int:
        """Compare the lives that began with those that ended; return the number missing."""
        load, ended = self._load, self._load.cancelled
        for one in counted:
            ended += msgspec.convert(one["ended"], Ids)
        if load.begun != ended:
            same = ", but they are not the same" if load.begun.number == ended.number else ""
            self.wrong["lost"].append(f"{load.begun.number} lives were begun, and {ended.number} ended{same}")
        if early := sum(one["early"] for one in counted):
            self.wrong["early"].append(f"{early} deliveries began before they were planned")
        if load.failed:
            self.wrong["failed"].append(f"{load.failed} calls failed, such as {'; '.join(load.errors)}")
        return load.begun.number - ended.number


async def _fill_events(app: Bide) -> None:
    """Fill the event log to its cap, with events like those of the handlers, so that it does not grow any more."""
    if (log := app.store.features.events) is not None:
        who = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"  # like the name of a worker
        for _ in range(EVENTS // 500):
            now = app.clock.now()
            new = (
                Event(
                    at=now, topic=FAILING, key=new_id(), id=new_id(), kind=EventKind.RETRY, attempt=1, who=who,
                    what=ON_PURPOSE, was=now, wake_at=now + 200,
                )
                for _ in range(500)
            )  # fmt: skip
            await log.record(list(new))


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run once on the given store; return the report and the failures."""
    async with own_place(given.url) as place:
        one = Soak(given, place, folder)
        return await one.go(), one.wrong


def main() -> int:
    parser = parser_of("bide_proofs.soak", soak.__doc__)
    parser.add_argument("url", help='a store that several processes can share; "sqlite:" is a file of its own')
    parser.add_argument("--minutes", type=positive, default=15.0, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=positive, help="tasks a second; half of the maximum if not given")
    parser.add_argument("--soon", type=positive, default=4.0, help="seconds within which most tasks are due")
    parser.add_argument("--measure", type=positive, default=15.0, help="seconds in which the maximum is measured")
    parser.add_argument("--workers", type=int, choices=range(1, 9), default=1, help="worker processes")
    parser.add_argument("--service", action="store_true", help="all reach the store through a `bide serve`")
    parser.add_argument("--every", type=positive, default=5.0, help="seconds from one sample to the next")
    parser.add_argument("--results", type=Path, help="a file to which the report is added, as one line of JSON")
    parser.add_argument("--samples", type=Path, help="a file to which each sample is added, as one line of JSON")
    parser.add_argument("--leak", type=int, default=0, help="bytes that handlers keep of each task: must be found")
    add_seed(parser)
    given = parser.parse_args()
    return tried("soak", lambda folder: run(given, folder), results=given.results)


if __name__ == "__main__":
    if not ALLOCATOR.keys() <= os.environ.keys():  # glibc reads the variables only when a process starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ALLOCATOR, **os.environ})
    sys.exit(main())
