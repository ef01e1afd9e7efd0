"""Who works in a benchmark: worker processes; for `memory:`, which no other process can see, a worker in this one."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from bide.app import Bide
from bide.cli.bench import worker as worker_module
from bide.cli.bench.plan import Plan
from bide.cli.bench.worker import Count, Log, Settled, Spec, Start, Work, make_app, read_log
from bide.engine.app_worker import AppWorker

_PATIENCE = 30.0
_LINGER = 0.3
"""Seconds that workers stay after everything is settled, so that a second delivery can still be seen."""


class BenchFault(Exception):
    """The benchmark itself could not be carried out."""


class Crew(Protocol):
    """The workers of one run."""

    @property
    def settled(self) -> int:
        """Outcomes that the store has accepted so far; may lag by 50 ms."""
        ...

    async def go(self) -> int:
        """Let them work; when that was, in nanoseconds since the epoch."""
        ...

    async def stop(self) -> None:
        """End them. A second call does nothing."""
        ...

    async def figures(self) -> list[dict[str, Any]]:
        """What each of them has to say meanwhile, while it works."""
        ...

    def log(self) -> tuple[list[Start], list[Settled]]:
        """What they did; after `stop`."""
        ...


async def settled(crew: Crew, count: int, *, plan: Plan, within: float, what: str) -> None:
    """Wait until so many are settled, at most `within` seconds, and a moment longer for what must not come."""
    ends = time.monotonic() + within
    while crew.settled < count and time.monotonic() < ends:
        plan.progress(what, crew.settled, count)
        await asyncio.sleep(0.05)
    plan.progress(what, min(count, crew.settled), count)
    await asyncio.sleep(_LINGER)


class LocalCrew:
    """A worker in this process, on the app that also schedules."""

    def __init__(self, app: Bide, log: Log) -> None:
        self._log = log
        self._worker: AppWorker = app.worker(observe=log.observe)
        self._works = False

    @property
    def settled(self) -> int:
        return self._log.number

    async def go(self) -> int:
        began = time.time_ns()
        self._running = await self._worker.__aenter__()
        self._works = True
        return began

    async def stop(self) -> None:
        if self._works:
            self._works = False
            await self._running.stop(grace=0)
            await self._worker.__aexit__(None, None, None)

    async def figures(self) -> list[dict[str, Any]]:
        return [self._log.figures()]

    def log(self) -> tuple[list[Start], list[Settled]]:
        return self._log.starts(), self._log.settles()


class WorkerProcess:
    """One subprocess that runs `worker.py`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.pid = process.pid
        self.settled = 0
        self.log = log
        self._process = process
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name="worker's words")

    @classmethod
    async def start(cls, spec: Spec) -> Self:
        """Start one, with its store open; it works when it is told `go`."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", worker_module.__file__, msgspec.json.encode(spec).decode()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environ,
        )  # fmt: skip
        worker = cls(process, Path(spec.log))
        await worker.said("ready", within=_PATIENCE + spec.pending / 1000)
        return worker

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")

    async def said(self, word: str, *, within: float = _PATIENCE) -> Any:
        """What it says to `word`. Raises BenchFault if it ends first, or does not say so in time."""
        try:
            while True:
                said = await asyncio.wait_for(self._said.get(), within)
                if word in said:
                    return said[word]
                if "ended" in said:
                    raise BenchFault(f"a worker process ended before it said {word!r}; what it wrote is above")
        except TimeoutError:
            raise BenchFault(f"a worker process did not say {word!r} within {within:.0f} s") from None

    def kill(self) -> None:
        """`kill -9`."""
        self._process.kill()

    async def stop(self, *, within: float = _PATIENCE) -> None:
        if self._process.returncode is None:
            self.tell("stop")
            try:
                await asyncio.wait_for(self._process.wait(), within)
            except TimeoutError:
                self._process.kill()
                raise BenchFault(f"a worker process did not stop within {within:.0f} s") from None
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said: dict[str, Any] = msgspec.json.decode(line)
            if "settled" in said:
                self.settled = said["settled"]
            else:
                self._said.put_nowait(said)
        self._said.put_nowait({"ended": None})


class ProcessCrew:
    """Worker processes."""

    def __init__(self, members: Sequence[WorkerProcess]) -> None:
        self.members = list(members)

    @property
    def settled(self) -> int:
        return sum(member.settled for member in self.members)

    async def go(self) -> int:
        began = time.time_ns()
        for member in self.members:
            member.tell("go")
        for member in self.members:
            await member.said("working")
        return began

    async def stop(self) -> None:
        for member in self.members:
            await member.stop()

    async def figures(self) -> list[dict[str, Any]]:
        for member in self.members:
            member.tell("usage")
        return [await member.said("usage") for member in self.members]

    def log(self) -> tuple[list[Start], list[Settled]]:
        starts: list[Start] = []
        settles: list[Settled] = []
        for member in self.members:
            if member.log.exists():  # one that was killed before its first line has none
                some_starts, some_settles = read_log(str(member.log))
                starts += some_starts
                settles += some_settles
        return starts, settles


@asynccontextmanager
async def stage(plan: Plan, *works: Work, counted: bool = False) -> AsyncIterator[tuple[Bide, Log]]:
    """An open app on the plan's store, with handlers for `works`; at the end its tasks are taken away."""
    log = Count() if counted else Log()
    app = make_app(Spec(store=plan.place.url, works=works, history=plan.history), log)
    async with app:
        if not plan.place.owned:
            await clear(app)
        try:
            yield app, log
        finally:
            if not plan.place.owned:
                await clear(app)


@asynccontextmanager
async def crew_of(
    plan: Plan, app: Bide, log: Log, works: Sequence[Work], *, journal: bool = False, counted: bool = False
) -> AsyncIterator[LocalCrew | ProcessCrew]:
    """The plan's workers on `works`, ready to go."""
    if not plan.place.shared:
        local = LocalCrew(app, log)
        try:
            yield local
        finally:
            await local.stop()
        return
    with tempfile.TemporaryDirectory(prefix="bide-bench-log-") as directory:
        members: list[WorkerProcess] = []
        crew = ProcessCrew(members)
        try:
            for number in range(plan.processes):
                path = str(Path(directory) / f"worker-{number}.log")
                spec = Spec(
                    history=plan.history,
                    store=plan.place.url,
                    works=tuple(works),
                    log=path,
                    journal=journal,
                    counted=counted,
                    loop=plan.loop,
                )
                crew.members.append(await WorkerProcess.start(spec))
            yield crew
        finally:
            await crew.stop()


async def clear(app: Bide) -> None:
    """Take every task of a benchmark out of the store, live or remembered, and nobody else's."""
    counts = (await app.tally()).counts
    for topic in {topic for topic, _ in counts if topic.startswith("bench.")}:
        refs = [(task.topic, task.key) async for task in app.find(topic=topic)]
        for first in range(0, len(refs), 1000):
            some = refs[first : first + 1000]
            answers = await app.cancel_many(some)
            remembered = [ref for ref, answer in zip(some, answers, strict=True) if answer.result == "finished"]
            if remembered:  # a new life in its place, cancelled, is forgotten at once
                await app.schedule_many([app.new(topic, key=key, delay="1h") for topic, key in remembered])
                await app.cancel_many(remembered)
