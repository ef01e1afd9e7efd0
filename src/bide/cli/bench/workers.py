"""The workers of a benchmark, the store that they share with it, and the self-check of what they did.

Workers are processes; for `memory:`, which no other process can see, there is one worker in this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from bide.app import Bide
from bide.cli.bench import worker as worker_module
from bide.cli.bench.plan import Limit, Plan, in_batches, random_keys
from bide.cli.bench.server import stat
from bide.cli.bench.worker import PAYLOAD, Count, Log, Settled, Spec, Start, Timers, Work, make_app, read_log
from bide.engine.worker import AppWorker

PATIENCE = 30.0
NANOSECONDS = 1_000_000
"""In a millisecond."""
_LINGER = 0.3
"""Seconds that workers stay after everything is settled, so that a second delivery can still be seen."""


class BenchFault(Exception):
    """The benchmark itself could not be carried out."""


def environment() -> dict[str, str]:
    """This process's environment, less what would configure bide: benchmarks use the shipped defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}


class Child:
    """A subprocess that leads a process group, so that `stop` and `kill` also reach what it starts.

    One that talks reads words on its input, whose end means `stop`, and writes lines of JSON, each an object. What one
    that does not writes goes to its file of errors.
    """

    def __init__(self, what: str, process: asyncio.subprocess.Process, errors: Path | None) -> None:
        self.pid = process.pid
        self.settled = 0
        """The last number that it reported as `settled`: outcomes that the store has accepted."""
        self._what = what
        self._process = process
        self._errors = errors
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name=f"reads {what}")

    @classmethod
    async def start(
        cls,
        what: str,
        *command: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        errors: Path | None = None,
        talks: bool = True,
    ) -> Self:
        """Start `command`. `errors`: the file for what it writes on stderr, and on stdout if it does not talk."""
        pipe = asyncio.subprocess.PIPE
        with errors.open("wb") if errors else nullcontext() as file:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe if talks else asyncio.subprocess.DEVNULL, stdout=pipe if talks else file,
                stderr=file, cwd=cwd, env=environment() if env is None else env, start_new_session=True, limit=2**26,
            )  # fmt: skip
        return cls(what, process, errors)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def used(self) -> float:
        """Seconds of processor time so far, of all its threads, in steps of 10 ms. Raises OSError."""
        return stat(Path("/proc") / str(self.pid)).used

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")

    async def ask(self, word: str, *, within: float = PATIENCE) -> Any:
        """The answer to `word`. Raises BenchFault."""
        self.send(word)
        return await self.receive(word, within=within)

    async def receive(self, word: str, *, within: float = PATIENCE) -> Any:
        """The value that it writes under the name `word`. Raises BenchFault if it ends first, or takes too long."""
        while word not in (message := await self.receive_any(within=within)):
            pass
        return message[word]

    async def receive_any(self, *, within: float = PATIENCE) -> dict[str, Any]:
        """The next object that it writes. Raises BenchFault."""
        try:
            message = await asyncio.wait_for(self._messages.get(), within)
        except TimeoutError:
            raise BenchFault(f"{self._what} said nothing for {within:.0f} s") from None
        if message is None:
            raise self.ended()
        return message

    def ended(self) -> BenchFault:
        """The error for one that has ended, with the last line that it wrote."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n") if self._errors else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "what it wrote is above")
        return BenchFault(f"{self._what} ended by itself: {last}")

    def kill(self) -> None:
        """`kill -9`, for its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, *, within: float = PATIENCE) -> None:
        """End its input, or send SIGTERM, and wait. Raises BenchFault where it has to be killed."""
        with suppress(ProcessLookupError):
            if self._process.stdin is not None:
                self._process.stdin.close()
            elif self._process.returncode is None:
                os.killpg(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            raise BenchFault(f"{self._what} did not stop within {within:.0f} s") from None
        finally:
            self.kill()  # also what has outlived it
            await self._process.wait()
            await self._reading

    async def _read(self) -> None:
        if self._process.stdout is not None:
            async for line in self._process.stdout:
                message: dict[str, Any] = msgspec.json.decode(line)
                if "settled" in message:
                    self.settled = message["settled"]
                else:
                    self._messages.put_nowait(message)
            self._messages.put_nowait(None)  # nothing follows


class LocalWorker:
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

    def log(self) -> list[Start | Settled]:
        return self._log.entries()


class ProcessGroup:
    """Worker processes."""

    def __init__(self) -> None:
        self.members: list[Child] = []
        self._logs: list[Path] = []

    async def add(self, spec: Spec) -> None:
        self._logs.append(Path(spec.log))
        self.members.append(await worker_process(spec))

    @property
    def settled(self) -> int:
        """Outcomes that the store has accepted so far; may lag by 50 ms."""
        return sum(member.settled for member in self.members)

    async def go(self) -> int:
        """Let them work; returns when that was, in nanoseconds since the epoch."""
        began = time.time_ns()
        for member in self.members:
            member.send("go")
        for member in self.members:
            await member.receive("working")
        return began

    async def stop(self) -> None:
        for member in self.members:
            await member.stop()

    async def figures(self) -> list[dict[str, Any]]:
        """The figures that each of them reports while it works."""
        return list(await asyncio.gather(*(member.ask("usage") for member in self.members)))

    def log(self) -> list[Start | Settled]:
        """All starts and outcomes; after `stop`."""
        # one that was killed before its first line has no log
        return [entry for log in self._logs if log.exists() for entry in read_log(str(log))]


Workers = LocalWorker | ProcessGroup
"""The workers of one run; both have the same methods."""


async def child(what: str, spec: Spec | Timers, *, within: float = PATIENCE) -> Child:
    """A process that runs worker.py and is ready. Raises BenchFault."""
    command = (sys.executable, "-P", worker_module.__file__, msgspec.json.encode(spec).decode())
    started = await Child.start(what, *command)
    await started.receive("ready", within=within)
    return started


async def worker_process(spec: Spec) -> Child:
    """With its store open; it works when it is told `go`."""
    return await child("a worker process", spec, within=PATIENCE + spec.pending / 1000)


async def wait_settled(workers: Workers, count: int, *, plan: Plan, within: float, what: str = "settled") -> None:
    """Wait until so many are settled, at most `within` seconds, and a moment longer for what must not come."""
    ends = time.monotonic() + within
    while workers.settled < count and time.monotonic() < ends:
        plan.progress(what, workers.settled, count)
        await asyncio.sleep(0.05)
    plan.progress(what, min(count, workers.settled), count)
    await asyncio.sleep(_LINGER)


class Stage:
    """An open app on the plan's store, which schedules, and the specification of the workers on it."""

    def __init__(self, plan: Plan, spec: Spec, **settings: Any) -> None:
        self._spec = spec
        self._plan = plan
        self._log = Count() if spec.counted else Log()
        self.app = make_app(spec, self._log, watched=spec.counted, **settings)

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[Workers]:
        """The plan's workers, ready to go."""
        if not self._plan.place.shared:
            local = LocalWorker(self.app, self._log)
            try:
                yield local
            finally:
                await local.stop()
            return
        with tempfile.TemporaryDirectory(prefix="bide-bench-log-") as directory:
            group = ProcessGroup()
            try:
                for number in range(self._plan.processes):
                    await group.add(msgspec.structs.replace(self._spec, log=f"{directory}/worker-{number}.log"))
                yield group
            finally:
                await group.stop()


@asynccontextmanager
async def stage(
    plan: Plan, *works: Work, url: str = "", journal: bool = False, counted: bool = False, **settings: Any
) -> AsyncIterator[Stage]:
    """With handlers for `works` in the app and in its workers; tasks that are left at the end are removed."""
    spec = Spec(
        store=url or plan.place.url, works=works, journal=journal, counted=counted, loop=plan.loop,
        history=plan.history,
    )  # fmt: skip
    on = Stage(plan, spec, **settings)
    async with on.app:
        if not plan.place.owned:
            await clear(on.app)
        try:
            yield on
        finally:
            if not plan.place.owned:
                await clear(on.app)


async def fill(app: Bide, topic: str, count: int, *, plan: Plan, limit: Limit | None = None, **when: Any) -> list[str]:
    """Store `count` tasks with random keys, due as `when` says (`delay=` or `at=`); returns their keys.

    A `limit` is measured batch by batch beside it: an index costs more the larger it is, so a limit on a small table
    would say nothing of a large one.
    """
    keys: list[str] = []
    for some in in_batches(random_keys(count)):
        plan.progress(f"filling {topic}", len(keys), count)
        if limit is not None:
            limit.measure()
        await app.schedule_many([app.new(topic, PAYLOAD, key=key, **when) for key in some])
        keys += some
    return keys


async def clear(app: Bide) -> None:
    """Remove every task of a benchmark from the store, live or remembered, and nobody else's."""
    counts = (await app.tally()).counts
    for topic in {topic for topic, _ in counts if topic.startswith("bench.")}:
        for refs in in_batches([(task.topic, task.key) async for task in app.find(topic=topic)]):
            answers = await app.cancel_many(refs)
            remembered = [ref for ref, answer in zip(refs, answers, strict=True) if answer.result == "finished"]
            if remembered:  # a new life in its place, cancelled, is forgotten at once
                await app.schedule_many([app.new(topic, key=key, delay="1h") for topic, key in remembered])
                await app.cancel_many(remembered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The deliveries of a run, counted. Times in nanoseconds since the epoch, lateness in milliseconds."""

    lost: int
    """Expected, and no worker has an acknowledged settle of it."""
    duplicated: int
    """Started again after its settle was acknowledged."""
    redelivered: int
    """Started again before that: only a crash may cause it."""
    early: int
    """Started before the time that it was leased for, or before the caller's own reckoning of it."""
    first_start: int = 0
    last_start: int = 0
    last_settled: int = 0
    lateness: Sequence[float] = field(default_factory=list)
    """Of every start, sorted: when the handler began, less the instant before which the caller did not want it."""
    after_wake: Sequence[float] = field(default_factory=list)
    """The same, less the `wake_at` that it was leased for: a whole millisecond, and never before that instant."""

    def faults(self, *, crash: bool = False) -> list[str]:
        """Faults beyond the counted fields."""
        faults = [f"{self.early} deliveries began too early"] if self.early else []
        if self.redelivered and not crash:
            faults.append(f"{self.redelivered} deliveries were repeated before they were settled, and nothing crashed")
        return faults


def examine(expected: Mapping[str, int], entries: Iterable[Start | Settled]) -> Findings:
    """Compare what was done with `expected`: each key, with the nanosecond before which it must not start.

    Keys that are not expected (another run's, on a shared store) are left out.
    """
    ordered = sorted((entry for entry in entries if entry.key in expected), key=lambda entry: entry.at)
    starts = [entry for entry in ordered if isinstance(entry, Start)]
    settled: dict[str, int] = {}
    for entry in ordered:
        if isinstance(entry, Settled):
            settled.setdefault(entry.key, entry.at)
    seen: set[str] = set()
    duplicated = redelivered = 0
    for start in starts:
        if start.key in seen:
            again = start.at > settled.get(start.key, start.at)
            duplicated += again
            redelivered += not again
        seen.add(start.key)
    return Findings(
        lost=sum(1 for key in expected if key not in settled),
        duplicated=duplicated,
        redelivered=redelivered,
        early=sum(start.at < max(start.planned_at * NANOSECONDS, expected[start.key]) for start in starts),
        first_start=starts[0].at if starts else 0,
        last_start=starts[-1].at if starts else 0,
        last_settled=max(settled.values(), default=0),
        lateness=sorted((start.at - expected[start.key]) / NANOSECONDS for start in starts),
        after_wake=sorted(start.at / NANOSECONDS - start.planned_at for start in starts),
    )
