"""The second seam of the lab: a workload, and the trial that it is given to play."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from bide.testing.proxy import Act, Chunk, FaultProxy
from bide_lab import journal
from bide_lab.figures import Figures
from bide_lab.processes import LabFault, Process, Spec, Step
from bide_lab.strategies import source_of
from bide_lab.strategy import Setting, Strategy, now

HOUR = 3_600_000
"""Milliseconds."""
_AT_REST = 2.0
"""Seconds without any task done after which no more are expected."""
_LOOK = 0.02
"""Seconds between two looks at what has fired."""
MARGIN = 1.0
"""Seconds that a firing may be late beyond the strategy's own precision before it counts as not there."""
_SUBSCRIBES = (b"SUBSCRIBE", b"LISTEN ")
"""The words of a connection that subscribes: to Redis, to PostgreSQL."""


class Relay(FaultProxy):
    """Stands between a strategy and one of its servers: it counts messages, and can cut the wire or make it deaf."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.hook = self._seen
        self.sent = 0
        """Messages to the server."""
        self._subscribed: set[int] = set()
        self._deaf: set[int] = set()

    def deafen(self) -> int:
        """The connections that subscribe to something get no more messages; how many there are.

        Neither side knows: a half-open connection, as a firewall leaves it that has forgotten it.
        """
        self._deaf |= self._subscribed
        return len(self._deaf)

    def _seen(self, chunk: Chunk) -> Act:
        if chunk.connection in self._deaf:
            return Act.HOLD
        if chunk.to_server:
            self.sent += 1
            if any(word in chunk.data.upper() for word in _SUBSCRIBES):
                self._subscribed.add(chunk.connection)
        return Act.FORWARD


class Trial:
    """One strategy under one workload: its processes and what they wrote."""

    def __init__(self, strategy: type[Strategy], setting: Setting) -> None:
        self.strategy = strategy
        self.setting = setting
        self.processes: list[Process] = []
        self.relays: list[Relay] = []
        self.owner = strategy(setting)
        """It makes what the processes need, looks at what there is, and takes it away: all without a relay."""
        self._read_to: dict[Path, int] = {}
        self._fired: set[bytes] = set()

    @classmethod
    @asynccontextmanager
    async def of(cls, strategy: type[Strategy], setting: Setting, *, relayed: bool = False) -> AsyncIterator[Trial]:
        """At the end all processes have ended and what the strategy made is gone."""
        trial = cls(strategy, setting)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(trial.owner.close)
            await trial.owner.open()
            stack.push_async_callback(trial.owner.clear)
            await trial.owner.prepare()
            if relayed and not strategy.direct:
                urls = {kind: await trial._relay(url, stack) for kind, url in setting.urls.items()}
                trial.setting = replace(setting, urls=urls)
            stack.push_async_callback(trial._stop_all)
            yield trial

    async def _relay(self, url: str, stack: AsyncExitStack) -> str:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None, "the lab's URLs name their ports"
        relay = Relay(parts.hostname, parts.port)
        await stack.enter_async_context(relay)
        self.relays.append(relay)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{relay.port}").geturl()

    async def _stop_all(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))

    @property
    def patience(self) -> float:
        """Seconds after its time by which every firing has to be there, if nothing goes wrong."""
        return MARGIN + 1.5 * (self.strategy.period + self.setting.span(self.strategy.precision))

    @property
    def hold(self) -> float:
        """Seconds after which the tasks of a dead consumer have been given to another."""
        return self.strategy.hold + self.setting.span(self.strategy.time_out)

    @property
    def to_servers(self) -> int:
        """Messages to the servers so far."""
        return sum(relay.sent for relay in self.relays)

    def option(self, **options: float) -> None:
        """Ask the strategy for something, before any process of it is started."""
        self.setting = replace(self.setting, options={**self.setting.options, **options})

    async def start(self, *, seconds: float = 0.0, slow: float = 0.0) -> list[Process]:
        """Consumers, one for each role, in their order; of a strategy within one process that process is a client too.

        `seconds`: how long an effect takes; `slow`: that of a key which begins with "slow".
        """
        return [await self.process(role, seconds=seconds, slow=slow) for role in self.strategy.roles]

    async def ready(self, *, sets: int = 1, lead: int = 0, **effects: float) -> tuple[Process, int]:
        """Start `sets` of consumers (`effects`: see `start`) and a client; and when its play begins, in `lead` ms."""
        for _ in range(sets):
            await self.start(**effects)
        return await self.client(), now() + lead

    async def client(self) -> Process:
        """A process that calls the verbs."""
        return self.processes[-1] if self.strategy.in_process else await self.process()

    async def process(self, role: str = "", **effects: float) -> Process:
        """Start one that runs this role; without, one that has the strategy and runs none of its roles."""
        number, folder = len(self.processes), self.setting.folder
        spec = Spec(
            strategy=self.strategy.name, source=source_of(self.strategy), setting=self.setting,
            journal=folder / f"journal-{number}", role=role, **effects,
        )  # fmt: skip
        process = await Process.begin(spec, log=folder / f"log-{number}")
        self.processes.append(process)
        return process

    def fired(self) -> int:
        """Tasks that were done so far, in all processes, those that are gone too; a repeated one counts once."""
        for path in (process.spec.journal for process in self.processes):
            whole = journal.whole_lines(path, since=self._read_to.get(path, 0))
            self._fired.update(line.split(b" ", 2)[1] for line in whole.splitlines() if line[:1] == b"!")
            self._read_to[path] = self._read_to.get(path, 0) + len(whole)
        return len(self._fired)

    async def until_fired(self, count: int, *, by: float) -> bool:
        """Wait for so many tasks to be done; whether there were.

        It ends at `by` (seconds since the epoch) or later: on a busy machine only once no more have been done for a
        while, so that what is merely slow does not count as lost.
        """
        fired, since = -1, 0.0
        while (done := self.fired()) < count:
            if done > fired:
                fired, since = done, time.time()
            if time.time() > max(by, since + _AT_REST):
                return False
            await asyncio.sleep(_LOOK)
        return True

    async def rest(self, seconds: float = 0.3) -> None:
        """Give what should not fire the time to do so, and what was done the time to be met again."""
        await asyncio.sleep(seconds + self.setting.span(self.strategy.again))

    async def outcome(self, count: int, *, by: float, until: float, rest: float = 0.3, **counts: float) -> Figures:
        """Wait for so many tasks to be done, until `by` at most, and `rest`.

        The figures of what was due by `until`, with these further counts; both times are seconds since the epoch.
        """
        await self.until_fired(count, by=by)
        await self.rest(rest)
        figures = self.judged(until=until)
        figures.counts |= counts
        return figures

    async def finish(self, count: int, *, end: float, more: float = 0.0, rest: float = 0.3) -> Figures:
        """The outcome of tasks that are due by `end` (seconds since the epoch), with all counts; `more`: seconds that
        the tasks may take besides.

        Raises `LabFault` if a consumer failed though nothing was done to anybody.
        """
        figures = await self.outcome(count, by=end + self.patience + more, until=end, rest=rest)
        await self.unharmed()
        figures.counts |= await self.counts()
        return figures

    async def through(
        self, steps: Sequence[Step], *, fires: int, last: float, lead: int = 0, callers: int = 256, sets: int = 1,
        more: float = 0.0, **effects: float,
    ) -> Figures:  # fmt: skip
        """Start consumers and a client, make the calls, and `finish`.

        `fires` tasks are due, the last of them `last` milliseconds from when steps count, which is in `lead`
        milliseconds. `sets`: so many consumers of each role; `effects`: see `start`.
        """
        client, begin = await self.ready(sets=sets, lead=lead, **effects)
        await client.play(begin, steps, callers=callers)
        return await self.finish(fires, end=max((begin + last) / 1000, time.time()), more=more)

    def written(self) -> tuple[Sequence[journal.Call], Sequence[journal.Firing]]:
        """All that the processes wrote down."""
        return journal.read(process.spec.journal for process in self.processes)

    def judged(self, *, until: float | None = None) -> Figures:
        """The figures of all that was due by `until` (seconds since the epoch), or by now."""
        return journal.judge(*self.written(), until=round((until or time.time()) * 1e3) * 1_000_000)

    async def usages(self) -> list[dict[str, Any]]:
        """Of every living process."""
        return [await process.usage() for process in self.processes if not process.killed]

    async def counts(self) -> dict[str, float]:
        """The counts of the strategy's living processes, added up, and what it has left on the servers."""
        total: Counter[str] = Counter()
        for used in await self.usages():
            total.update(used["counts"])
        return {**total, **await self.owner.left()}

    async def unharmed(self) -> None:
        """Raises `LabFault` if a consumer failed."""
        for process in self.processes:
            if not process.killed and (failure := (await process.usage())["failure"]):
                raise LabFault(f"{process.spec.name} failed: {failure}")


Play: TypeAlias = Callable[..., Awaitable[Figures]]
"""A few seconds in a trial: starts the processes that it wants, and reports what they did.

Called with the trial and `quick`, for a small one in a few seconds. Raises `LabFault` if it could not be played. The
first sentence of its docstring says what is asked of a strategy, or done to it, in a report.
"""
Reason: TypeAlias = Callable[[type[Strategy]], str]
"""Why a workload makes no sense for a strategy; empty if it does."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: the requests to a strategy, and the faults meanwhile."""

    play: Play
    relayed: bool = False
    """The strategy's connections go through a relay: that counts and can cut them, and costs time."""
    for_all: bool = False
    """Every strategy is to be seen under it, unless that makes no sense; else only those that name it."""
    alone: bool = True
    """Nothing else may be played meanwhile: its figures are times, and not only counts."""
    verbs: Sequence[str] = ()
    """The verbs that it takes, besides to schedule."""
    senseless: Reason = lambda strategy: ""

    @property
    def name(self) -> str:
        """One word."""
        return self.play.__name__

    @property
    def about(self) -> str:
        """The sentence that its docstring begins with."""
        return " ".join((inspect.getdoc(self.play) or "").partition("\n\n")[0].split()).rstrip(".")

    def why_not(self, strategy: type[Strategy]) -> str:
        """Why it makes no sense for this strategy; empty if it does."""
        reasons = [
            strategy.skips.get(self.name, ""),
            "" if self.name in strategy.known_by() else strategy.unfit,
            *(strategy.cannot.get(verb, "") for verb in self.verbs),
            self.senseless(strategy),
        ]
        return next(filter(None, reasons), "")


def workload(**traits: Any) -> Callable[[Play], Workload]:
    """The workload that the decorated function plays."""
    return lambda play: Workload(play, **traits)


def unless(fits: Callable[[type[Strategy]], object], why: str) -> Reason:
    """For a workload that makes sense where `fits` is true."""
    return lambda strategy: "" if fits(strategy) else why


def processor_share(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> float:
    """Percent of one processor that processes took between two of their usages."""
    spent = sum(one["cpu"] - other["cpu"] for one, other in zip(after, before, strict=True))
    return float(round(spent / (after[0]["at"] - before[0]["at"]) * 100, 3))


def steps_at(rate: float, keys: Sequence[str], *, ahead: int) -> list[Step]:
    """One schedule for each key, `rate` a second, each due `ahead` milliseconds after it is made."""
    times = (round(number * 1000 / rate) for number in range(len(keys)))
    return [Step(at, "schedule", [(key, at + ahead)]) for at, key in zip(times, keys, strict=True)]


def batches(keys_and_due: Sequence[tuple[str, int]]) -> list[Step]:
    """Schedules of many at a time, all as soon as may be; due in milliseconds from the beginning."""
    return [Step(0, "schedule", keys_and_due[begin : begin + 500]) for begin in range(0, len(keys_and_due), 500)]


def keys_of(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{number:06d}" for number in range(count)]
