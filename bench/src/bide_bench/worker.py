"""The child processes of a benchmark: a bide worker whose handlers only record when they began, or bare timers.

Run as a file of its own, not as a module of the package, so that it imports only what a user's worker imports: `idle`
measures a worker, not a command line. Its argument (a `Spec` or `Timers`, JSON) says what to do, words on standard
input say when (`go`, `usage`, `stop`), and it answers in lines of JSON, its log among them.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from bide.app import Bide
from bide.core.instants import Millis
from bide.core.records import Leased, Record, Settlement, Topic
from bide.core.tasks import Task
from bide.ports import Store, StoreFacade
from bide.settings import Settings
from bide.wiring import store_maker

Answered = TypeVar("Answered")
_REPORT_EVERY = 0.05
_TOGETHER = 10_000
"""Entries of a log in one line."""
PAYLOAD = b"x" * 100
"""The payload of every task of a benchmark."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, or many, and what the handler does after recording its start."""

    topic: str
    many: int = 1
    """The number of topics: the first is `topic`, the others are `topic.1` and so on."""
    seconds: float = 0.0
    """Seconds that it sleeps; 0: it does nothing."""
    concurrency: int | None = None
    keep_done: int = 0
    """Milliseconds for which done tasks are remembered."""

    @property
    def topics(self) -> list[str]:
        return [self.topic, *(f"{self.topic}.{number}" for number in range(1, self.many))]


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """The orders of a worker process."""

    store: str
    works: tuple[Work, ...]
    journal: bool = False
    """Send each log entry at once, so that it survives `kill -9`; otherwise all at the end."""
    loop: str = "asyncio"
    counted: bool = False
    """Only count, without a log, for runs whose log would fill the memory."""
    pending: int = 0
    """Tasks to store first, due in an hour, for a store in the worker's own process."""
    history: str = "on"
    """The setting `history`: "off" if the benchmark does not own the store."""


class Timers(msgspec.Struct, frozen=True, kw_only=True, tag="timers"):
    """`loop.call_at` alone: `count` timers, `rate` a second, each due `ahead` milliseconds after it is set."""

    count: int
    rate: float
    ahead: int
    loop: str = "asyncio"


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start", gc=False):
    """A handler began."""

    key: str
    planned_at: int
    """The `wake_at` that it was leased for, in milliseconds."""
    at: int
    """Nanoseconds since the epoch, read in the first line of the handler."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled", gc=False):
    """The store has accepted an outcome."""

    key: str
    at: int


class Logged(msgspec.Struct):
    """A line with a part of a log."""

    log: list[Start | Settled]


class Log:
    """The starts and outcomes of one process, in flat lists that the garbage collector need not traverse."""

    def __init__(self, *, journal: bool = False) -> None:
        self.calls = self.lease_calls = 0
        """Calls of the store, and those that lease."""
        self.leases: list[float] = []
        """Milliseconds of each lease that returned tasks."""
        self._started: list[Record] = []
        self._started_at: list[int] = []
        self._settled: list[Record] = []
        self._settled_at: list[int] = []
        self._journal = journal

    def handler(self, work: Work) -> Callable[[Task[bytes]], Coroutine[Any, Any, None]]:
        started_at, started = self._started_at.append, self._started.append

        async def nothing(task: Task[bytes]) -> None:
            started_at(time.time_ns())
            started(task.record)

        async def sleeping(task: Task[bytes]) -> None:
            await nothing(task)
            if self._journal:
                send(log=[_start(task.record, self._started_at[-1])])
            await asyncio.sleep(work.seconds)

        return sleeping if work.seconds or self._journal else nothing

    def observe(self, record: Record, settlement: Settlement) -> None:
        """For `app.worker(observe=...)`: the store has the outcome."""
        self._settled_at.append(time.time_ns())
        self._settled.append(record)
        if self._journal:
            send(log=[Settled(record.key, self._settled_at[-1])])

    @property
    def number(self) -> int:
        """Outcomes that the store has accepted."""
        return len(self._settled)

    def figures(self) -> dict[str, Any]:
        """Figures to report during the run; times in milliseconds, of leases since the last report."""
        leases, self.leases = sorted(self.leases), []
        return _percentiles("lease", leases)

    def entries(self) -> list[Start | Settled]:
        starts = zip(self._started, self._started_at, strict=True)
        settles = zip(self._settled, self._settled_at, strict=True)
        return [*(_start(record, at) for record, at in starts), *(Settled(record.key, at) for record, at in settles)]

    def send(self) -> None:
        """Send all entries, unless they were sent at once."""
        entries = [] if self._journal else self.entries()
        for first in range(0, len(entries), _TOGETHER):
            send(log=entries[first : first + _TOGETHER])


def _start(record: Record, at: int) -> Start:
    return Start(record.key, record.planned_at, at)


class Count(Log):
    """Only the numbers of one process's deliveries; times in milliseconds, since the last report."""

    def __init__(self) -> None:
        super().__init__()
        self._accepted = self._early = 0
        self._late: list[float] = []

    def handler(self, work: Work) -> Callable[[Task[bytes]], Coroutine[Any, Any, None]]:
        async def counting(task: Task[bytes]) -> None:
            late = time.time_ns() / 1_000_000 - task.record.planned_at
            self._early += late < 0
            self._late.append(late)

        return counting

    def observe(self, record: Record, settlement: Settlement) -> None:
        self._accepted += 1

    @property
    def number(self) -> int:
        return self._accepted

    def figures(self) -> dict[str, Any]:
        """The figures; percentiles are null if there were no values."""
        late, self._late = sorted(self._late), []
        counts = {"accepted": self._accepted, "early": self._early}
        return {**counts, **super().figures(), **_percentiles("late", late)}


def _percentiles(name: str, ordered: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{part}_ms": percentile(ordered, part / 100) if ordered else None for part in (50, 99)}


def percentile(ordered: Sequence[float], part: float) -> float:
    """The nearest-rank percentile of sorted values: a value that was really measured. Raises IndexError for none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def make_app(spec: Spec, log: Log, *, watched: bool, **given: Any) -> Bide:
    """An app with the shipped defaults, whatever the environment says, that forgets finished tasks at once.

    `watched`: the log counts the calls of its store, and times its leases.
    """
    settings = Settings(history=spec.history, keep_done=0, keep_cancelled=0, **given)
    store = store_maker(spec.store, settings)()
    app = Bide(_WatchedStore(store, log) if watched else store, settings=settings)
    for work in spec.works:
        keep_done = timedelta(milliseconds=work.keep_done)
        handler = log.handler(work)
        for topic in work.topics:
            app.handler(topic, concurrency=work.concurrency, keep_done=keep_done)(handler)
    return app


class _WatchedStore(StoreFacade):
    """A store whose calls are counted in a log; and timed where they are leases that give something out."""

    def __init__(self, inner: Store, log: Log) -> None:
        super().__init__(inner)
        self._log = log

    async def around(self, operation: str, call: Callable[[], Awaitable[Answered]]) -> Answered:
        self._log.calls += 1
        return await call()

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        self._log.lease_calls += any(wants.values())  # others look at the heads, as an idle worker does
        began = time.perf_counter_ns()
        leased = await super().lease(wants, now=now, until=until, holder=holder)
        if leased.tasks:
            self._log.leases.append((time.perf_counter_ns() - began) / 1_000_000)
        return leased


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop factory for `asyncio.Runner`."""
    if loop == "asyncio":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def words() -> AsyncGenerator[str, None]:
    """The lines of standard input; its end means `stop`, so that a child never outlives the benchmark."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            yield line.decode().strip()
        yield "stop"
    finally:
        transport.close()


async def paced(count: int, rate: float) -> AsyncGenerator[int, None]:
    """Yield 0, 1, ... at `rate` a second; late ones follow at once."""
    begun = time.monotonic()
    for number in range(count):
        pause = begun + number / rate - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        yield number


def send(**what: Any) -> None:
    """Send one line of JSON to the parent."""
    line = memoryview(msgspec.json.encode(what) + b"\n")
    while line:
        line = line[os.write(1, line) :]


class Reporter:
    """Reports the number of settled tasks, some 20 times a second while it changes."""

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
        send(settled=self._log.number)


async def _work(spec: Spec) -> None:
    log = Count() if spec.counted else Log(journal=spec.journal)
    app, orders = make_app(spec, log, watched=True), words()
    async with app:
        for first in range(0, spec.pending, 1000):
            count = min(1000, spec.pending - first)
            await app.schedule_many([app.new(spec.works[0].topic, PAYLOAD, delay="1h") for _ in range(count)])
        send(ready=True)
        if await anext(orders) == "go":
            async with app.worker(observe=Reporter(log).observe) as worker:
                send(working=True)
                while await anext(orders) != "stop":
                    usage = {"calls": log.calls, "cpu": time.process_time_ns(), "at": time.monotonic_ns()}
                    send(usage={**usage, **log.figures()})
                await worker.stop(grace=0)
    await orders.aclose()
    log.send()
    send(settled=log.number)


async def _set_timers(spec: Timers) -> None:
    """Measure how late bare timers run, in milliseconds: the floor under every figure of `lateness`."""
    loop, orders, late = asyncio.get_running_loop(), words(), list[float]()
    send(ready=True)
    if await anext(orders) != "go":
        return
    done = loop.create_future()

    def fired(due: float) -> None:
        late.append((loop.time() - due) * 1000)
        if len(late) == spec.count:
            done.set_result(None)

    async for _ in paced(spec.count, spec.rate):
        due = loop.time() + spec.ahead / 1000
        loop.call_at(due, fired, due)
    await done
    send(late=late)
    await orders.aclose()


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Spec | Timers)
    with asyncio.Runner(loop_factory=loop_factory(spec.loop)) as runner:
        runner.run(_work(spec) if isinstance(spec, Spec) else _set_timers(spec))


if __name__ == "__main__":
    main()
