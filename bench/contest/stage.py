"""The processes of one run: one that schedules and the workers, each in its contestant's environment."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command import ROOT
from bench.contest.contestants import Contestant, Environment, carry_out
from bench.contest.servers import Server

from bide_bench.processes import PATIENCE, BenchFault, Child

_ORDER = 300.0
"""Seconds after which an order is given up: so every run is bounded in time."""
_LINGER = 0.5
"""Seconds that workers stay after the last task, so that a second delivery can still be seen."""
_WARM_UP = "0000000"
_WARM = 1_000
_KEPT = ("X", "Y", "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one contestant: what is asked of it, and where. `count` tasks for `schedule` and `burst`."""

    contestant: Contestant
    environment: Environment
    url: str
    """The URL that its library is given."""
    server: Server
    loop: str
    directory: Path
    count: int
    rate: float
    seconds: float


class Producer(Child):
    """The process that schedules."""

    bulk = False

    async def order(self, do: str, **what: Any) -> dict[str, Any]:
        """See produce.py. Raises BenchFault."""
        self.send(json.dumps({"do": do, **what}))
        return await self.receive_any(within=_ORDER)


@dataclass(slots=True)
class Log:
    """The log of one worker, read as it grows, so that looking at it costs the measured little."""

    path: Path
    lines: list[str] = field(default_factory=list)
    """Without the warm-up."""
    warm: int = 0
    """Lines of the warm-up."""
    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    _rest: str = ""
    _offset: int = 0

    def read(self) -> None:
        """Take in what is new. A line that `kill -9` cut off is never whole, and never taken in."""
        with suppress(FileNotFoundError), self.path.open(encoding="ascii") as file:
            file.seek(self._offset)
            more = file.read()
            self._offset += len(more)
            *lines, self._rest = (self._rest + more).split("\n")
            for line in lines:
                kind, number, _ = line.split(" ", 2)
                if number == _WARM_UP:
                    self.warm += 1
                    continue
                self.lines.append(line)
                (self.started if kind == "start" else self.ended).add(number)


class Worker(Child):
    """A worker with all processes that it starts."""

    log: Log

    async def kill_at_work(self, *, within: float) -> None:
        """Kill all of it in the middle of a task, as a machine's death would; after `within` seconds anyhow."""
        ends = time.monotonic() + within
        while time.monotonic() < ends:
            self.log.read()
            if self.log.started - self.log.ended:
                break
            await asyncio.sleep(0.005)
        self.kill()


@dataclass(slots=True, kw_only=True)
class Stage:
    """One producer and its workers, all of which have shown that they work."""

    producer: Producer
    workers: Sequence[Worker]

    def lines(self) -> list[str]:
        """The lines of all workers, without the warm-up."""
        self._read()
        return [line for worker in self.workers for line in worker.log.lines]

    async def wait(self, count: int, *, within: float, ended: bool = False) -> None:
        """Until so many tasks have been started (or have ended), at most `within` seconds, and a moment longer."""
        ends = time.monotonic() + within
        while time.monotonic() < ends:
            self._read()
            logs = [worker.log for worker in self.workers]
            if len(set().union(*(log.ended if ended else log.started for log in logs))) >= count:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(_LINGER)

    def _read(self) -> None:
        for worker in self.workers:
            worker.log.read()


@asynccontextmanager
async def stage(run: Run, *, workers: int, lease: int | None = None, seconds: float = 0.0) -> AsyncIterator[Stage]:
    """Set up on an empty database, and taken down whatever happens. Raises BenchFault."""
    run.server.empty()
    directory = run.directory
    variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
    variables |= {"PYTHONPATH": str(ROOT), "BENCH_URL": run.url, "BENCH_LOOP": run.contestant.loop(run.loop)}
    variables |= {"BENCH_SECONDS": str(seconds), **run.environment.variables}
    if lease is not None:
        variables["BENCH_LEASE"] = str(lease)
    interpreter, errors = run.environment.interpreter, directory / f"{time.time_ns()}"
    if run.server.kind == "postgres":
        carry_out("making its tables", interpreter, *run.contestant.to_set_up(), cwd=directory, env=variables)
    crew: list[Worker] = []
    producer: Producer | None = None
    try:
        for number in range(workers):
            log = Log(Path(f"{errors}-{number}.log"))
            own = {**variables, **run.contestant.variables, "BENCH_LOG": str(log.path)}
            command = run.contestant.to_work(run.loop, sleepy=seconds > 0)
            worker = await Worker.start(
                *("a worker", interpreter, *command), cwd=directory, env=own, errors=Path(f"{errors}-{number}.err"),
                talks=False,
            )  # fmt: skip
            worker.log = log
            crew.append(worker)
        producer = await Producer.start(
            *("the process that schedules", interpreter, *run.contestant.to_produce()), cwd=directory, env=variables,
            errors=Path(f"{errors}.err"),
        )  # fmt: skip
        producer.bulk = (await producer.receive_any())["bulk"]
        await _warm_up(producer, crew)
        yield Stage(producer=producer, workers=crew)
    finally:
        for child in [*([producer] if producer is not None else []), *crew]:
            with suppress(BenchFault):  # its group is killed then
                await child.stop(within=5.0)


async def _warm_up(producer: Producer, crew: Sequence[Worker]) -> None:
    """Send tasks that are due at once until every worker has had one; then many, so that none starts cold."""

    def warm() -> list[int]:
        for worker in crew:
            worker.log.read()
            if worker.returncode is not None:
                raise worker.ended()
        return [worker.log.warm for worker in crew]

    ends = time.monotonic() + PATIENCE
    while 0 in warm():
        if time.monotonic() > ends:
            raise BenchFault(f"a worker did nothing for {PATIENCE:.0f} s")
        await producer.order("warm", count=1)
        await asyncio.sleep(0.25)
    already = sum(warm())
    await producer.order("warm", count=_WARM)
    while crew and sum(warm()) < already + _WARM:
        if time.monotonic() > ends + PATIENCE:
            raise BenchFault(f"{_WARM} tasks that were due at once were not done within {PATIENCE:.0f} s")
        await asyncio.sleep(0.1)
