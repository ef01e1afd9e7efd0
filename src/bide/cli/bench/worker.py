"""The worker process of a benchmark: a bide worker whose handlers only write down when they were started.

Run as a file of its own, not as a module of the package, so that it loads nothing but what a user's worker loads: what
`idle` measures is a worker, not a command line. It is told what to do by one argument (a `Spec`, JSON) and by words on
its standard input (`go`, `usage`, `stop`; its end means `stop`), and answers in lines of JSON.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from bide.app import Bide
from bide.core.records import Leased, Record, Settlement
from bide.core.tasks import Task
from bide.settings import Settings
from bide.wiring import store_maker

_REPORT_EVERY = 0.05
_OPERATIONS = ("add", "change", "get", "find", "tally", "lease", "extend", "settle", "purge", "announce", "record")
PAYLOAD = b"x" * 100
"""What every task of a benchmark carries, unless its workload says otherwise."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, and what its handler does after it has written down when it was started."""

    topic: str
    seconds: float = 0.0
    """How long it sleeps; 0: it does nothing."""
    concurrency: int | None = None
    keep_done: int = 0
    """Milliseconds for which a done task is remembered."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is to do."""

    store: str
    works: tuple[Work, ...]
    log: str = ""
    """The file for its log."""
    journal: bool = False
    """Write each line of the log at once, so that it survives `kill -9`; otherwise all of them at the end."""
    loop: str = "asyncio"
    counted: bool = False
    """Only count, and write no log: for a run of so many tasks that a log would fill the memory."""
    pending: int = 0
    """Tasks to put into the store first, due in an hour: for a store that lives in the worker's own process."""
    history: str = "on"
    """Whether what happens is written down for a day, as it is by default; not into a store of somebody else's."""


class Start(NamedTuple):
    """A handler was started."""

    key: str
    token: int
    planned_at: int
    """The `wake_at` that it was leased for, in milliseconds."""
    at: int
    """Nanoseconds since the epoch, read in the first line of the handler."""


class Settled(NamedTuple):
    """The store has acknowledged an outcome."""

    key: str
    token: int
    at: int


class Log:
    """What the handlers of one process did. Flat lists, so that the garbage collector has nothing to look through."""

    def __init__(self, journal: str = "") -> None:
        self.started: list[Record] = []
        self.started_at: list[int] = []
        self.settled: list[Record] = []
        self.settled_at: list[int] = []
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if journal else None

    def handler(self, work: Work) -> Callable[[Task[bytes]], Coroutine[Any, Any, None]]:
        started_at, started, seconds = self.started_at.append, self.started.append, work.seconds

        async def nothing(task: Task[bytes]) -> None:
            started_at(time.time_ns())
            started(task.record)

        async def sleeping(task: Task[bytes]) -> None:
            at = time.time_ns()
            started_at(at)
            started(task.record)
            if self._journal is not None:
                os.write(self._journal, _start_line(task.record, at))
            await asyncio.sleep(seconds)

        return sleeping if seconds or self._journal is not None else nothing

    def observe(self, record: Record, settlement: Settlement) -> None:
        """For `app.worker(observe=...)`: the store has the outcome."""
        at = time.time_ns()
        self.settled_at.append(at)
        self.settled.append(record)
        if self._journal is not None:
            os.write(self._journal, _settled_line(record, at))

    @property
    def number(self) -> int:
        """Outcomes that the store has accepted."""
        return len(self.settled)

    def figures(self) -> dict[str, float]:
        """What there is to say meanwhile."""
        return {}

    def starts(self) -> list[Start]:
        return [
            Start(record.key, record.token, record.planned_at, at)
            for record, at in zip(self.started, self.started_at, strict=True)
        ]

    def settles(self) -> list[Settled]:
        return [
            Settled(record.key, record.token, at)
            for record, at in zip(self.settled, self.settled_at, strict=True)
        ]  # fmt: skip

    def write(self, path: str) -> None:
        """Everything, one line each, unless it has been written at once."""
        if self._journal is not None:
            os.close(self._journal)
            return
        with open(path, "wb") as file:
            file.writelines(_start_line(*one) for one in zip(self.started, self.started_at, strict=True))
            file.writelines(_settled_line(*one) for one in zip(self.settled, self.settled_at, strict=True))


class Count(Log):
    """What the handlers of one process did, in numbers alone; times in milliseconds, since they were last asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._started = self._accepted = self._early = 0
        self._late: list[float] = []
        self._leases: list[float] = []

    def handler(self, work: Work) -> Callable[[Task[bytes]], Coroutine[Any, Any, None]]:
        async def counting(task: Task[bytes]) -> None:
            late = time.time_ns() / 1_000_000 - task.record.planned_at
            self._started += 1
            self._early += late < 0
            self._late.append(late)

        return counting

    def observe(self, record: Record, settlement: Settlement) -> None:
        self._accepted += 1

    @property
    def number(self) -> int:
        return self._accepted

    def leased(self, took: float) -> None:
        """A lease that gave something out."""
        self._leases.append(took)

    def figures(self) -> dict[str, float]:
        """Percentiles are null where there was nothing."""
        said: dict[str, Any] = {"started": self._started, "accepted": self._accepted, "early": self._early}
        for name, times in (("lease", sorted(self._leases)), ("late", sorted(self._late))):
            for part in (50, 99):
                said[f"{name}_p{part}_ms"] = percentile(times, part / 100) if times else None
        self._late, self._leases = [], []
        return said

    def write(self, path: str) -> None:
        """There is nothing to write."""


def percentile(ordered: Sequence[float], part: float) -> float:
    """The nearest-rank percentile of sorted values: a value that was really measured. Raises IndexError for none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _start_line(record: Record, at: int) -> bytes:
    return f"start {record.key} {record.token} {record.planned_at} {at}\n".encode()


def _settled_line(record: Record, at: int) -> bytes:
    return f"settled {record.key} {record.token} {at}\n".encode()


def read_log(path: str) -> tuple[list[Start], list[Settled]]:
    """What `Log` wrote. A last line that `kill -9` cut off is passed over."""
    starts: list[Start] = []
    settles: list[Settled] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            kind, key, token, *rest = line.split()
            if kind == "start":
                starts.append(Start(key, int(token), int(rest[0]), int(rest[1])))
            else:
                settles.append(Settled(key, int(token), int(rest[0])))
    return starts, settles


def make_app(spec: Spec, log: Log, calls: list[int] | None = None) -> Bide:
    """An app with the shipped defaults, whatever the environment says, but that it forgets at once what ended.

    With `calls`, its store counts calls there.
    """
    settings = Settings(history=spec.history, keep_done=0, keep_cancelled=0)
    store = store_maker(spec.store, settings)()
    if calls is not None:
        for name in _OPERATIONS:
            if hasattr(store, name):
                setattr(store, name, _counted(getattr(store, name), calls))
    if isinstance(log, Count):
        setattr(store, "lease", _timed(store.lease, log))  # noqa: B010 - a store's method, for this run alone
    app = Bide(store, settings=settings)
    for work in spec.works:
        keep_done = timedelta(milliseconds=work.keep_done)
        app.handler(work.topic, concurrency=work.concurrency, keep_done=keep_done)(log.handler(work))
    return app


def _counted(operation: Callable[..., Awaitable[Any]], calls: list[int]) -> Callable[..., Awaitable[Any]]:
    def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        calls[0] += 1
        return operation(*args, **kwargs)

    return call


def _timed(lease: Callable[..., Awaitable[Leased]], count: Count) -> Callable[..., Awaitable[Leased]]:
    async def call(*args: Any, **kwargs: Any) -> Leased:
        began = time.perf_counter_ns()
        leased = await lease(*args, **kwargs)
        if leased.tasks:
            count.leased((time.perf_counter_ns() - began) / 1_000_000)
        return leased

    return call


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner`. Raises ImportError when uvloop is asked for and not installed."""
    if loop == "asyncio":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Ear:
    """The words on standard input; its end is a `stop`, so that a worker never outlives the benchmark."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._words: asyncio.Queue[str] = asyncio.Queue()
        self._loop.add_reader(0, self._read)

    def _read(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self._loop.remove_reader(0)
            self._words.put_nowait("stop")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._words.put_nowait(line.decode())

    async def word(self) -> str:
        return await self._words.get()


def say(**what: Any) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


class Reporter:
    """Says how much is settled, some 20 times a second while that changes, and never when it does not."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._due = False

    def observe(self, record: Record, settlement: Settlement) -> None:
        self._log.observe(record, settlement)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_REPORT_EVERY, self._report)

    def _report(self) -> None:
        self._due = False
        say(settled=self._log.number)


async def _work(spec: Spec) -> None:
    log = Count() if spec.counted else Log(spec.log if spec.journal else "")
    calls = [0]
    app = make_app(spec, log, calls)
    ear = Ear()
    async with app:
        for first in range(0, spec.pending, 1000):
            count = min(1000, spec.pending - first)
            await app.schedule_many([app.new(spec.works[0].topic, PAYLOAD, delay="1h") for _ in range(count)])
        say(ready=True)
        word = await ear.word()
        if word == "go":
            async with app.worker(observe=Reporter(log).observe) as worker:
                say(working=True)
                while (word := await ear.word()) != "stop":
                    usage = {"calls": calls[0], "cpu": time.process_time_ns(), "at": time.monotonic_ns()}
                    say(usage={**usage, **log.figures()})
                await worker.stop(grace=0)
    log.write(spec.log)
    say(ended=log.number)


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    with asyncio.Runner(loop_factory=loop_factory(spec.loop)) as runner:
        runner.run(_work(spec))


if __name__ == "__main__":
    main()
