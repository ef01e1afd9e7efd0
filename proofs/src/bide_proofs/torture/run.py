"""One run: a server, clients and workers; faults for a while, then peace until all is done; and the report."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bide.core.instants import Millis
from bide.testing.history.check import Report, Violation, check
from bide.testing.history.events import End, Fault, Header, Left, seen
from bide.testing.history.recording import Journal, Log, read_all
from bide_proofs.harness.command import (
    PATIENCE,
    POLL_EVERY,
    WrongByKind,
    add_seed,
    drained,
    percentiles,
    refuse_unless_empty,
)
from bide_proofs.harness.processes import ChildSpec, ProcessGroup
from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.server import ServerClock
from bide_proofs.torture.child import CAP, KEPT, LEASE, LOSSES, TOPICS, Spec, app_on
from bide_proofs.torture.clock import SLACK, SharedClock
from bide_proofs.torture.faults import CLIENT, CLOCKS, KILL, WORKER, Faults
from bide_proofs.torture.figures import Figures, Span, undone
from bide_proofs.torture.server import Server

PROMISES = ("P1", "P2", "P3", "P4", "P5", "P7", "P10", "P12")
"""The promises that the checker decides."""
CHILD = "bide_proofs.torture.child"
_CALLS = 10_000_000
"""The number of call numbers reserved for each process."""
_WRONG = "wrong"
"""The folder of the wrong clock that every second process has."""
_BEGAN = b'{"type":"began",'
"""The beginning of a delivery's line."""


def add_options(parser: argparse.ArgumentParser, *, seconds: float, rate: float) -> None:
    """Add the options of every run with these defaults, and set defaults for options that some commands lack."""
    parser.add_argument("--seconds", type=float, default=seconds, help="how long faults go on")
    parser.add_argument("--least", type=int, default=0, help="clients go on until so many deliveries have begun")
    parser.add_argument("--rate", type=float, default=rate, help="verbs a second, of all clients together")
    parser.add_argument("--farthest", type=float, default=12, help="the longest delay, in seconds")
    parser.add_argument("--pace", type=float, default=1, help="2 for twice as many faults in the same time")
    add_seed(parser)
    # worker: the module that a worker process runs; spare: the fewest processes of a kind that a kill leaves at work
    parser.set_defaults(clients=2, without=[], only=[], worker=CHILD, spare=0)


async def tortured(server: Server, given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run in `folder` with the options of `add_options`; return the report and the failures.

    Raises the error with which the server or a fault failed.
    """
    async with AsyncExitStack() as entered:
        return await _Run(server, given, folder, entered).go()


class _Run:
    """A server with its clients and workers, and the faults they suffer."""

    def __init__(self, server: Server, given: argparse.Namespace, folder: Path, entered: AsyncExitStack) -> None:
        self._server = server
        self._given = given
        self._folder = folder
        self._entered = entered
        self._clock = SharedClock(folder / "clock")
        log = Log(folder / "frame.jsonl")
        self._journal = Journal(log.say, time_ns=time.monotonic_ns, clock=self._clock.now)
        self._group = ProcessGroup(folder, self._spec_of, journal=self._journal)
        self._numbers = count()
        """The numbers of the processes."""
        self._wrong_clock: ServerClock | None = None
        """The clock of every second process."""
        self._why_not: Mapping[str, str] = {}
        """Faults that cannot be caused, in addition to the server's own, with the reason."""
        for end in (log.close, self._clock.close):
            entered.callback(end)

    async def go(self) -> tuple[dict[str, Any], WrongByKind]:
        """Run; return the report and the failures."""
        server, given, group = self._server, self._given, self._group
        self._entered.push_async_callback(server.stop)
        await self._prepare()
        self._entered.push_async_callback(group.abandon)
        faults, lasted, asked, drained_in = await self._suffer()
        await self._record_left(drained=drained_in is not None)
        about, errors = server.about(), group.errors()
        figures, checked, aside, wrong = judged(self._folder, server.name, faults.spans)
        workers_alone = server.worker_url is None and set(faults.counts) <= {f"{KILL} {WORKER}"}
        wrong["call failed"] = list(figures.failed) if workers_alone else []
        wrong["process ended"] = list(group.wrong)
        wrong["error logged"] = list(errors)
        wrong["not drained"] = [] if drained_in is not None else [f"something was live after {PATIENCE:g} s of peace"]
        report = {
            "store": server.name,
            "about": about,
            "seconds": round(lasted, 1),
            "seed": given.seed,
            "processes": {"clients": given.clients, "workers": given.workers, "started": group.started},
            "lease_seconds": LEASE,
            "rate": round(figures.scheduled / asked, 1),
            "load": figures.load(),
            "faults": dict(sorted(faults.counts.items())),
            "cannot": {
                **server.cannot,
                **self._why_not,
                **dict.fromkeys(given.without, "left out, as it was asked for"),
            },
            "drained_seconds": None if drained_in is None else round(drained_in, 1),
            "delivered_again": figures.again,
            "checked": checked.summary(),
            "leases_undone_by_crashes": len(aside),
            "lateness_ms": percentiles(figures.lateness),
            "recovery_seconds": figures.recovery(faults.spans),
        }
        return report, wrong

    async def _prepare(self) -> None:
        """Start the server, check that its store is empty, and start the clock and the history."""
        server, journal, clock = self._server, self._journal, self._clock
        await server.start()
        if self._is_file:
            why = "the clock of each process is the store's: it is set for all of them, or for none"
            self._why_not = {CLOCKS: why}
        else:
            try:
                self._wrong_clock = ServerClock()
                (self._folder / _WRONG).mkdir()
            except ServerMissing:
                self._why_not = {CLOCKS: "libfaketime is not installed"}
        clock.set(server.ahead)
        async with app_on(server.direct) as app:
            await refuse_unless_empty(app, TOPICS)

        def jumped(before: Millis) -> None:
            journal.say(Fault(time.monotonic_ns(), "the store's clock was set", before))

        self._entered.callback(asyncio.create_task(clock.follow(lambda: server.ahead, jumped)).cancel)
        slack, cap = SLACK + round(2 * server.farthest * 1000), round(CAP * 1000)
        journal.say(Header(server.name, slack, cap, LOSSES, time.monotonic_ns(), gives_back=server.gives_back))

    async def _suffer(self) -> tuple[Faults, float, float, float | None]:
        """Start the processes, cause faults, and let everything end.

        Returns the faults, the seconds that they lasted, the seconds for which clients made calls, and the seconds
        until no task was live any more (None: some still were). The journals contain the rest.
        """
        given, group = self._given, self._group
        faults = Faults(self._server, group, self._journal, given, self._wrong_clock)
        await group.start(WORKER, given.workers)
        await group.start(CLIENT, given.clients)
        began = time.monotonic()
        async with faults:
            await faults.go_on(given.seconds)
        mended = time.monotonic()
        # without faults: on a very busy machine each worker may be killed before it has begun a delivery
        while _deliveries(self._folder) < given.least and time.monotonic() < mended + PATIENCE:  # noqa: ASYNC110 - files tell
            await asyncio.sleep(POLL_EVERY)
        asked = time.monotonic() - began
        await group.end(CLIENT)
        seconds = await drained(lambda: app_on(self._server.direct))
        await group.end(WORKER)
        return faults, mended - began, asked, seconds

    def _spec_of(self, kind: str, slot: int, name: str) -> ChildSpec:
        """The spec of a process: the URLs of the store in turn, and a wrong clock for every second process."""
        server, given, folder, number = self._server, self._given, self._folder, next(self._numbers)
        url = server.urls[number % len(server.urls)]
        if kind == WORKER and server.worker_url is not None:
            url = server.worker_url
        spec = Spec(
            url=url, name=name, journal=str(folder / f"{name}.jsonl"),
            clock=str(folder / "clock"), first_call=(number + 1) * _CALLS, seed=f"{given.seed}/{name}",
            rate=given.rate / given.clients if kind == CLIENT else 0.0, farthest=given.farthest,
            shares_clock=self._is_file,
        )  # fmt: skip
        # every second one, so that processes with wrong and with right clocks share every store
        wrong_clock = self._wrong_clock if slot % 2 else None
        wrong = {} if wrong_clock is None else wrong_clock.environment(folder / _WRONG)
        module = CHILD if kind == CLIENT else given.worker
        return ChildSpec(module=module, spec=spec, environment={**server.environment, **wrong})

    @property
    def _is_file(self) -> bool:
        """True if the store uses its callers' clocks."""
        return urlsplit(self._server.direct).scheme == "sqlite"

    async def _record_left(self, *, drained: bool) -> None:
        """Record the tasks that are left when retention is over and ended tasks were purged."""
        journal = self._journal
        async with app_on(self._server.direct) as app:
            kept = time.monotonic() + KEPT + 1
            while time.monotonic() < kept and [task async for task in app.find()]:
                await asyncio.sleep(POLL_EVERY)
                while await app.store.purge(now=app.clock.now(), limit=1_000):
                    pass
            async for task in app.find():
                journal.say(Left(time.monotonic_ns(), journal.clock(), task.topic, task.key, seen(task.record)))
            journal.say(End(time.monotonic_ns(), journal.clock(), drained))


def _deliveries(folder: Path) -> int:
    """The number of deliveries begun so far."""
    return sum(path.read_bytes().count(_BEGAN) for path in folder.glob(f"{WORKER}-*.jsonl"))


def journals(folder: Path) -> list[Path]:
    """The journals of the run itself and of each process that was ever started."""
    return sorted(folder.glob("*.jsonl"))


def judged(
    folder: Path, name: str, spans: Sequence[Span]
) -> tuple[Figures, Report, list[Violation], dict[str, list[object]]]:
    """The figures of the journals, the checker's report, the violations put aside, and the failures."""
    figures = Figures(read_all(journals(folder)))
    checked = check(read_all(journals(folder)))
    wrong: dict[str, list[object]] = {promise: [] for promise in PROMISES}
    aside = undone(name, checked.violations, read_all(journals(folder)), spans)
    for violation in checked.violations:
        if violation not in aside:
            wrong.setdefault(violation.promise, []).append(violation)
    return figures, checked, aside, wrong
