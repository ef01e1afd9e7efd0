"""One soak: the maximum, the load, the looks, the end, and what is to be said of it."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from bide import __version__
from bide.app import Bide
from bide.cli.bench.place import Place
from bide.cli.bench.plan import rounded
from bide.core.events import Event, EventKind
from bide.core.names import new_id
from bide.core.records import State, Verdict
from bide.engine.sweeper import PAGE, PURGE_EVERY
from bide.ports import KeepsEvents
from bide.settings import Settings
from bide_proofs.soak import slopes
from bide_proofs.soak.crew import FAILING, KEPT, ON_PURPOSE, TOPICS, Crew, Ids, Terms
from bide_proofs.soak.load import Load
from bide_proofs.soak.measure import StoreWatch, process
from bide_proofs.soak.remains import EVENTS, remains, too_much
from bide_proofs.soak.service import Service
from bide_proofs.trial import PATIENCE

LEAST = 300.0
"""Seconds of a run whose slopes count."""
_UNDER_WAY = 2_000
"""Tasks at once while the maximum is measured: enough that nobody waits for the others."""
Wrong = dict[str, list[str]]
"""What was found to be wrong, by kind."""
Say = Callable[[str], None]

_ALLOWED: Mapping[str, Callable[[float], float]] = {
    "resident": slopes.allowed_bytes, "private": slopes.allowed_bytes, "used_bytes": slopes.allowed_bytes,
    "blocks": slopes.allowed_blocks, "descriptors": slopes.allowed_few, "threads": slopes.allowed_few,
    "processes": slopes.allowed_few, "file_bytes": slopes.allowed_files, "wal_bytes": slopes.allowed_files,
    "table_bytes": slopes.allowed_files, "index_bytes": slopes.allowed_files, "bytes": slopes.allowed_files,
    "rows": slopes.allowed_many, "history": slopes.allowed_many, "live": slopes.allowed_many,
    "remembered": slopes.allowed_many, "late_p50_ms": slopes.allowed_ms, "late_p99_ms": slopes.allowed_ms,
}  # fmt: skip
"""By the end of a figure's name, the longest that fits. What is not here is only written down."""


class Soak:
    """Of one place."""

    def __init__(self, given: argparse.Namespace, place: Place, folder: Path, say: Say) -> None:
        self.wrong: Wrong = {kind: [] for kind in ("lost", "early", "left", "failed", "grows")}
        self._given = given
        self._place = place
        self._say = say
        self._seconds = 60.0 * given.minutes
        self._long = self._seconds >= LEAST
        self._keep = min(20.0, max(1.0, self._seconds / 10))
        self._folder = folder
        self._service: Service | None = None
        self._samples = folder / "samples.jsonl"
        """Not in memory, which is what is looked at."""
        self._watch = StoreWatch(place)
        self._before: tuple[float, int] | None = None

    async def go(self) -> dict[str, Any]:
        """The report."""
        given, place = self._given, self._place
        begun = datetime.now(UTC)
        async with AsyncExitStack() as service:
            url, processes = place.url, given.workers + 1
            async with Bide(place.url, settings=Settings(keep_done=0, keep_cancelled=0)) as app:
                await _fill_events(app)
            if given.service:
                self._service = await service.enter_async_context(Service(place.url, self._folder))
                url, processes = self._service.url, processes + 1
            report = await self._soak(url)
        if self._service is not None:
            self.wrong["failed"] += self._service.wrong()
        left = await remains(place)
        minutes = (datetime.now(UTC) - begun).total_seconds() / 60
        self.wrong["left"] += too_much(left, minutes=minutes, processes=processes)
        what = {"store": "http", "behind": place.kind} if given.service else {"store": place.kind}
        return {
            **what, "version": __version__, "at": begun.isoformat(timespec="seconds"), "machine": _machine(),
            **report, "left": left, "wrong": {kind: len(cases) for kind, cases in self.wrong.items()},
        }  # fmt: skip

    async def _soak(self, url: str) -> dict[str, Any]:
        """All of it that needs the store open; what it came to."""
        given = self._given
        app = Bide(url, settings=Settings(keep_done=0, keep_cancelled=0))
        app.retain(KEPT, done=f"{self._keep}s", cancelled=f"{self._keep}s")
        app.retain(FAILING, dead=f"{self._keep}s")
        crew = Crew(Terms(url=url, keep=self._keep, leak=given.leak))
        async with app:
            load = Load(app, given.seed, 1000.0, int(given.soon * 1000))
            try:
                await crew.start(given.workers)
                most = await self._maximum(load, crew)
                rate = given.rate or max(1.0, rounded(most / 2))
                load.at(rate)
                self._say(f"{most:.0f} tasks a second at the most; {rate:.0f} from now on, for {self._seconds:.0f} s")
                reached = await self._run(app, load, crew)
                drained = await self._drain(app, load)
                forgotten = await self._forget(app)
                counted = await crew.look()
            finally:
                self.wrong["failed"] += await crew.stop()
        missing = self._balance(load, counted)
        samples = [msgspec.json.decode(line) for line in self._samples.read_bytes().splitlines()]
        return {
            "seconds": round(self._seconds), "seed": given.seed, "workers": given.workers,
            "maximum_per_s": round(most), "rate_asked": rounded(rate), "rate": rounded(reached),
            "load": _by_verb(load), "deliveries": _sum(counted, "begun"),
            "verdicts": {verdict: sum(one["verdicts"][verdict] for one in counted) for verdict in Verdict},
            "lost": max(0, missing), "duplicated": max(0, -missing), "early": _sum(counted, "early"),
            "redelivered": _sum(counted, "redelivered"), "failed": load.failed,
            "drained_seconds": round(drained, 1), "forgotten_seconds": round(forgotten, 1),
            "lateness_ms": {
                **{part: rounded(_middle([one[name] for one in samples if name in one]))
                   for part, name in (("p50", "late_p50_ms"), ("p99", "late_p99_ms"))},
                "most": rounded(max(one["latest_ms"] for one in counted)),
            },
            "judged": self._long, "samples": len(samples), "slopes": self._slopes(samples),
        }  # fmt: skip

    def _slopes(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As they are written down."""
        found = judged(samples)
        if self._long:
            self.wrong["grows"] += [
                f"{name}: {rounded(one.per_minute)} a minute, from {rounded(one.first)} to {rounded(one.last)}"
                for name, one in found.items()
                if one.verdict == slopes.GROWS
            ]
        return {name: _rounded(one) for name, one in found.items()}

    async def _maximum(self, load: Load, crew: Crew) -> float:
        """Lives that are ended a second; the first third is not counted."""
        seconds = self._given.measure

        def ended() -> int:
            return crew.ended + load.cancelled.number

        def under_way() -> int:
            return load.begun.number - ended() - len(load.far)

        flood = asyncio.create_task(load.flood(seconds, under_way, _UNDER_WAY))
        await asyncio.sleep(seconds / 3)
        before, began = ended(), time.monotonic()
        await flood
        return (ended() - before) / (time.monotonic() - began)

    async def _run(self, app: Bide, load: Load, crew: Crew) -> float:
        """Tasks a second that were asked for."""
        await crew.look()  # whose lateness is of the flood
        running = asyncio.create_task(load.run(self._seconds))
        began, number = time.monotonic(), 0
        with self._samples.open("wb") as file:
            while not running.done():
                number += 1
                due = began + number * self._given.every
                await asyncio.wait([running], timeout=max(0.0, due - time.monotonic()))
                if not running.done():
                    sample = await self._look(app, load, crew, time.monotonic() - began)
                    file.write(msgspec.json.encode(sample) + b"\n")
                    if self._given.samples:
                        with self._given.samples.open("ab") as copy:
                            copy.write(msgspec.json.encode(sample) + b"\n")
        return await running

    async def _look(self, app: Bide, load: Load, crew: Crew, at: float) -> dict[str, Any]:
        tally = await app.tally()
        live = sum(tally.number(topic, state) for topic in TOPICS for state in State if state.live)
        counted = await crew.look()
        ended = sum(one["ended"]["number"] for one in counted)
        before, self._before = self._before, (at, ended)
        sample: dict[str, Any] = {
            "at": round(at, 3), "live": live, "remembered": tally.number() - live,
            "completed_per_s": 0.0 if before is None else (ended - before[1]) / (at - before[0]),
            "client_blocks": sys.getallocatedblocks(), **_named("client", process(os.getpid())),
            **await self._watch.look(),
        }  # fmt: skip
        for number, (pid, one) in enumerate(zip(crew.pids, counted, strict=True), start=1):
            sample |= _named(f"worker-{number}", {"blocks": one["blocks"], **process(pid)})
        if self._service is not None:
            sample |= _named("service", process(self._service.pid))
        for name in ("late_p50_ms", "late_p99_ms"):
            if found := [one[name] for one in counted if name in one]:
                sample[name] = max(found)
        return sample

    async def _drain(self, app: Bide, load: Load) -> float:
        """Until nothing is alive any more; how long that took."""
        began = time.monotonic()
        await load.finish()
        while alive := await _number(app, live=True):
            if time.monotonic() > began + PATIENCE:
                self.wrong["left"].append(f"{alive} tasks were still alive after {PATIENCE:.0f} s")
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def _forget(self, app: Bide) -> float:
        """Until what has ended is forgotten: in a long run by the sweepers; how long that took."""
        began = time.monotonic()
        until = began + self._keep + (PURGE_EVERY if self._long else 0.0) + PATIENCE
        while kept := await _number(app, live=False):
            if time.monotonic() > until:
                self.wrong["left"].append(f"{kept} ended tasks are remembered longer than they should be")
                break
            if not self._long:
                while await app.store.purge(now=app.clock.now(), limit=PAGE) == PAGE:
                    pass
            await asyncio.sleep(0.25)
        return time.monotonic() - began

    def _balance(self, load: Load, counted: Sequence[Mapping[str, Any]]) -> int:
        """Whether every life that was begun has ended, and none twice; how many did not."""
        ended = load.cancelled
        for one in counted:
            ended += msgspec.convert(one["ended"], Ids)
        missing = load.begun.number - ended.number
        if missing > 0:
            self.wrong["lost"].append(f"{load.begun.number} lives were begun, and {ended.number} ended")
        elif missing < 0:
            self.wrong["lost"].append(f"{ended.number} lives were ended, though only {load.begun.number} were begun")
        elif load.begun.total != ended.total:
            self.wrong["lost"].append(f"{ended.number} lives were begun and as many ended, but they are not the same")
        if early := _sum(counted, "early"):
            self.wrong["early"].append(f"{early} deliveries began before they were planned")
        if load.failed:
            self.wrong["failed"].append(f"{load.failed} calls failed, such as {'; '.join(load.errors)}")
        return missing


def judged(samples: Sequence[Mapping[str, Any]]) -> dict[str, slopes.Slope]:
    """The slope of every figure of the samples that may not grow, by its name."""
    found: dict[str, slopes.Slope] = {}
    long = bool(samples) and samples[-1]["at"] - samples[0]["at"] >= LEAST * 0.9
    names = dict.fromkeys(name for sample in samples for name in sample)
    for name in names:
        allowed = max((one for one in _ALLOWED if name == one or name.endswith(f"_{one}")), key=len, default=None)
        if allowed is None:
            continue
        points = [(float(one["at"]), float(one[name])) for one in samples if name in one]
        mean = sum(value for _, value in points) / len(points)
        # what has ended is forgotten once a minute, and databases tidy up as often
        period = PURGE_EVERY if name.startswith(("store_", "server_", "remembered")) and long else 0.0
        slope = slopes.judge(points, _ALLOWED[allowed](mean), period=period)
        if slope is not None:
            found[name] = slope
    return found


async def _fill_events(app: Bide) -> None:
    """The log of events to its cap, with such as handlers will cause, so that it does not grow any more."""
    store = app.store
    if isinstance(store, KeepsEvents):
        who = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"  # as a worker is called
        for _ in range(EVENTS // 500):
            now = app.clock.now()
            await store.record(
                [
                    Event(
                        at=now, topic=FAILING, key=new_id(), id=new_id(), kind=EventKind.RETRY, attempt=1, who=who,
                        what=ON_PURPOSE, was=now, wake_at=now + 200,
                    )
                    for _ in range(500)
                ]
            )  # fmt: skip


async def _number(app: Bide, *, live: bool) -> int:
    tally = await app.tally()
    return sum(tally.number(topic, state) for topic in TOPICS for state in State if state.live is live)


def _named(of: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{of}_{name}": value for name, value in figures.items()}


def _sum(counted: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(one[name] for one in counted)


def _by_verb(load: Load) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (verb, result), number in sorted(load.answers.items()):
        found.setdefault(verb, {})[result] = number
    return found


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _rounded(slope: slopes.Slope) -> dict[str, Any]:
    return {
        name: rounded(value) if isinstance(value, float) else value
        for name, value in msgspec.structs.asdict(slope).items()
    }


def _machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count() or 1, "python": platform.python_version(), "system": platform.system()}
