"""The processes of one run: one that schedules and the workers, each in its contestant's environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contest.contestants import ROOT, Contestant
from bench.contest.database import Database
from bench.contest.environments import Environment, NotMeasured
from bench.contest.server import Server

_PATIENCE = 30.0
_ORDER = 300.0
"""Seconds after which an order is given up: so every run is bounded in time."""
_LINGER = 0.5
"""Seconds that workers stay after the last task, so that a second delivery can still be seen."""
_WARM_UP = "0000000"
_WARM = 1_000
_KEPT = ("X", "Y", "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A contestant that is ready to be measured."""

    contestant: Contestant
    environment: Environment
    url: str
    """What it is told about where the tasks are."""
    server: Server | Database
    loop: str = "asyncio"


class Producer:
    """The process that schedules."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Path) -> None:
        self._process = process
        self._errors = errors
        self.bulk = False

    async def hear(self, within: float = _ORDER) -> dict[str, Any]:
        """Its next answer. Raises NotMeasured."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), within)
        except TimeoutError:
            raise NotMeasured(f"scheduling took more than {within:.0f} s") from None
        if not line:
            raise NotMeasured(f"the scheduling process ended: {_last_line(self._errors)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def order(self, do: str, **what: Any) -> dict[str, Any]:
        """See client.py. Raises NotMeasured."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        return await self.hear()

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await _end(self._process)


@dataclass(slots=True)
class Log:
    """What one worker wrote down, read as it grows, so that looking at it costs the measured little."""

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


class Worker:
    """A worker and all processes that it starts, as one group."""

    def __init__(self, process: asyncio.subprocess.Process, log: Log, errors: Path) -> None:
        self.log = log
        self._process = process
        self._errors = errors

    def kill(self) -> None:
        """`kill -9`, for all of it, as a machine's death would."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def kill_at_work(self, *, within: float) -> None:
        """Kill it in the middle of a task; at the latest when `within` seconds have passed without one."""
        ends = time.monotonic() + within
        while time.monotonic() < ends:
            self.log.read()
            if self.log.started - self.log.ended:
                break
            await asyncio.sleep(0.005)
        self.kill()

    def check(self) -> None:
        """Raises NotMeasured if it has ended."""
        if self._process.returncode is not None:
            raise NotMeasured(f"a worker ended by itself: {_last_line(self._errors)}")

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        await _end(self._process)


@dataclass(slots=True, kw_only=True)
class Stage:
    """One producer and its workers, all of which have shown that they work."""

    producer: Producer
    workers: Sequence[Worker]

    def lines(self) -> list[str]:
        """What all workers wrote down, without the warm-up."""
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
async def stage(
    player: Player, directory: Path, *, workers: int, lease: int | None = None, seconds: float = 0.0
) -> AsyncIterator[Stage]:
    """Set up on an empty database, and taken down whatever happens. Raises NotMeasured."""
    await player.server.empty()
    variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
    variables |= {"PYTHONPATH": str(ROOT), "BENCH_URL": player.url, "BENCH_LOOP": player.contestant.loop(player.loop)}
    variables |= {"BENCH_SECONDS": str(seconds), **player.environment.variables}
    if lease is not None:
        variables["BENCH_LEASE"] = str(lease)
    if player.server.kind == "postgres":
        await _set_up(player, variables, directory)
    crew: list[Worker] = []
    producer: Producer | None = None
    try:
        for number in range(workers):
            log = Log(directory / f"{time.time_ns()}-{number}.log")
            own = {**variables, **player.contestant.variables, "BENCH_LOG": str(log.path)}
            process, errors = await _spawn(
                player, player.contestant.command(player.loop, sleepy=seconds > 0), own, directory
            )
            crew.append(Worker(process, log, errors))
        producer = Producer(*await _spawn(player, player.contestant.producer, variables, directory, talks=True))
        producer.bulk = (await producer.hear(_PATIENCE))["bulk"]
        await _warm_up(producer, crew)
        yield Stage(producer=producer, workers=crew)
    finally:
        if producer is not None:
            await producer.stop()
        for worker in crew:
            await worker.stop()


async def _spawn(
    player: Player, command: Sequence[str], variables: dict[str, str], directory: Path, *, talks: bool = False
) -> tuple[asyncio.subprocess.Process, Path]:
    """A process that leads a group of its own, and the file that has what it said besides."""
    path = directory / f"{time.time_ns()}.err"
    pipe = asyncio.subprocess.PIPE
    with path.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(player.environment.interpreter, *command), cwd=directory, env=variables, start_new_session=True,
            stdin=pipe if talks else asyncio.subprocess.DEVNULL, stdout=pipe if talks else errors, stderr=errors,
        )  # fmt: skip
    return process, path


async def _set_up(player: Player, variables: dict[str, str], directory: Path) -> None:
    process, errors = await _spawn(player, player.contestant.setup, variables, directory)
    try:
        await asyncio.wait_for(process.wait(), _PATIENCE)
    except TimeoutError:
        raise NotMeasured(f"making its tables took more than {_PATIENCE:.0f} s") from None
    finally:
        await _end(process)
    if process.returncode:
        raise NotMeasured(f"its tables cannot be made: {_last_line(errors)}")


async def _warm_up(producer: Producer, crew: Sequence[Worker]) -> None:
    """Send tasks that are due at once until every worker has had one; then many, so that nobody starts cold."""

    def warm() -> list[int]:
        for worker in crew:
            worker.log.read()
            worker.check()
        return [worker.log.warm for worker in crew]

    ends = time.monotonic() + _PATIENCE
    while 0 in warm():
        if time.monotonic() > ends:
            raise NotMeasured(f"a worker did nothing for {_PATIENCE:.0f} s")
        await producer.order("warm", count=1)
        await asyncio.sleep(0.25)
    already = sum(warm())
    await producer.order("warm", count=_WARM)
    while crew and sum(warm()) < already + _WARM:
        if time.monotonic() > ends + _PATIENCE:
            raise NotMeasured(f"{_WARM} tasks that were due at once were not done within {_PATIENCE:.0f} s")
        await asyncio.sleep(0.1)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait a little for a process that was told to end, then kill its group, which may outlive it."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 5.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
