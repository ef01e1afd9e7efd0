"""One run: a server, clients and workers, faults for a while, then peace until all is done; and what it comes to."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bide.core.instants import Millis
from bide.testing.history.check import Report, Violation, check
from bide.testing.history.events import End, Fault, Header, Left, seen
from bide.testing.history.journal import Journal, Log, read_all
from bide_proofs.harness.command import PATIENCE, WrongByKind, add_seed, counts_of, percentiles
from bide_proofs.harness.processes import ChildSpec, ProcessGroup
from bide_proofs.harness.stores import LOOK, drained, refuse_unless_empty
from bide_proofs.servers.clock import ServerClock
from bide_proofs.servers.process import ServerMissing
from bide_proofs.torture.child import Spec
from bide_proofs.torture.clock import SLACK, SharedClock
from bide_proofs.torture.faults import CLIENT, CLOCKS, KILL, WORKER, FaultLog, Faults
from bide_proofs.torture.figures import Figures
from bide_proofs.torture.server import Server
from bide_proofs.torture.topics import CAP, KEPT, LEASE, LOSSES, TOPICS, app_on
from bide_proofs.torture.undone import Span, undone

PROMISES = ("P1", "P2", "P3", "P4", "P5", "P7", "P10", "P12")
"""What the checker decides."""
CHILD = "bide_proofs.torture.child"
_CALLS = 10_000_000
"""Numbers of calls that each process has for itself."""
_WRONG = "wrong"
"""The folder of the clock that every second process goes by."""
_BEGAN = b'{"type":"began",'
"""How the line of a delivery begins."""


def add_options(parser: argparse.ArgumentParser, *, seconds: float, rate: float) -> None:
    """Add the options of every run with these defaults, and the values of those that not every command has."""
    parser.add_argument("--seconds", type=float, default=seconds, help="how long faults go on")
    parser.add_argument("--least", type=int, default=0, help="clients go on until so many deliveries have begun")
    parser.add_argument("--rate", type=float, default=rate, help="verbs a second, of all clients together")
    parser.add_argument("--farthest", type=float, default=12, help="the longest delay, in seconds")
    parser.add_argument("--pace", type=float, default=1, help="2 for twice as many faults in the same time")
    add_seed(parser)
    # worker: the module that a worker process runs; spare: a kill is left out that would leave fewer of a kind at work
    parser.set_defaults(clients=2, without=[], only=[], worker=CHILD, spare=0)


async def tortured(server: Server, plan: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run it in `folder`, as the options of `add_options` say; the report, and what was wrong.

    Raises what the server, or a fault, failed with.
    """
    clock, log = SharedClock(folder / "clock"), Log(folder / "frame.jsonl")
    journal = Journal(log.say, time_ns=time.monotonic_ns, clock=clock.now)
    faults = FaultLog(journal)
    async with AsyncExitStack() as entered:
        entered.callback(log.close)
        entered.callback(clock.close)
        entered.push_async_callback(server.stop)
        await server.start()
        wrong_clock, why_not = _wrong_clock(server, folder)
        clock.set(server.ahead)
        async with app_on(server.direct) as app:
            await refuse_unless_empty(app, TOPICS)

        def jumped(before: Millis) -> None:
            journal.say(Fault(time.monotonic_ns(), "the store's clock was set", before))

        following = asyncio.create_task(clock.follow(lambda: server.ahead, jumped))
        entered.callback(following.cancel)
        slack, cap = SLACK + round(2 * server.farthest * 1000), round(CAP * 1000)
        journal.say(Header(server.name, slack, cap, LOSSES, time.monotonic_ns(), gives_back=server.gives_back))
        group = ProcessGroup(folder, _specs(server, plan, folder, wrong_clock), journal=journal)
        entered.push_async_callback(group.abandon)
        lasted, asked, drained_in = await _run(server, plan, folder, group, faults, wrong_clock)
        await _look(server, journal, drained=drained_in is not None)
        about, errors = server.about(), group.errors()
    figures, checked, aside, wrong = judged(folder, server.name, faults.spans)
    workers_alone = server.worker_url is None and set(faults.counts) <= {f"{KILL} {WORKER}"}
    wrong["call failed"] = list(figures.failed) if workers_alone else []
    wrong["process ended"] = list(group.wrong)
    wrong["error logged"] = list(errors)
    wrong["not drained"] = [] if drained_in is not None else [f"something was live after {PATIENCE:g} s of peace"]
    report = {
        "store": server.name,
        "about": about,
        "seconds": round(lasted, 1),
        "seed": plan.seed,
        "processes": {"clients": plan.clients, "workers": plan.workers, "started": group.started},
        "lease_seconds": LEASE,
        "rate": round(figures.scheduled / asked, 1),
        "load": figures.load(),
        "faults": dict(sorted(faults.counts.items())),
        "cannot": {**server.cannot, **why_not, **dict.fromkeys(plan.without, "left out, as it was asked for")},
        "drained_seconds": None if drained_in is None else round(drained_in, 1),
        "delivered_again": figures.again,
        "wrong": counts_of(wrong),
        "checked": checked.summary(),
        "leases_undone_by_crashes": len(aside),
        "lateness_ms": percentiles(figures.lateness),
        "lateness_ms_after_lost_leases": percentiles(figures.lateness_again),
        "recovery_seconds": figures.recovery(faults.spans),
    }
    return report, wrong


async def _run(
    server: Server,
    plan: argparse.Namespace,
    folder: Path,
    group: ProcessGroup,
    log: FaultLog,
    wrong_clock: ServerClock | None,
) -> tuple[float, float, float | None]:
    """Start the processes, cause faults, and let all of it come to an end.

    Returns the seconds for which faults went on, those for which clients asked, and those until nothing was live any
    more; None: something still was. The journals tell the rest.
    """
    faults = Faults(server, group, log, plan, wrong_clock)
    await group.start(WORKER, plan.workers)
    await group.start(CLIENT, plan.clients)
    began = time.monotonic()
    faults.start()
    try:
        await faults.go_on(plan.seconds)
    finally:
        await faults.stop()
    mended = time.monotonic()
    # in peace: on a machine that is busy enough a worker may be killed before it has begun, each time
    while _deliveries(folder) < plan.least and time.monotonic() < mended + PATIENCE:  # noqa: ASYNC110 - files tell
        await asyncio.sleep(LOOK)
    asked = time.monotonic() - began
    await group.end(CLIENT)
    seconds = await drained(lambda: app_on(server.direct))
    await group.end(WORKER)
    return mended - began, asked, seconds


def _specs(
    server: Server, plan: argparse.Namespace, folder: Path, wrong_clock: ServerClock | None
) -> Callable[[str, int, str], ChildSpec]:
    """The spec of each process: the ways to the store in turn, and a wrong clock for every second one."""
    numbers = count()

    def spec_of(kind: str, slot: int, name: str) -> ChildSpec:
        number = next(numbers)
        url = server.urls[number % len(server.urls)]
        if kind == WORKER and server.worker_url is not None:
            url = server.worker_url
        spec = Spec(
            url=url, name=name, journal=str(folder / f"{name}.jsonl"),
            clock=str(folder / "clock"), first_call=(number + 1) * _CALLS, seed=f"{plan.seed}/{name}",
            rate=plan.rate / plan.clients if kind == CLIENT else 0.0, farthest=plan.farthest,
            shares_clock=_is_file(server),
        )  # fmt: skip
        # every second one, so that those with a wrong clock and those with a right one meet in every store
        wrong = wrong_clock.environment(folder / _WRONG) if wrong_clock is not None and slot % 2 else {}
        module = CHILD if kind == CLIENT else plan.worker
        return ChildSpec(module=module, spec=spec, environment={**server.environment, **wrong})

    return spec_of


def _deliveries(folder: Path) -> int:
    """How many have begun so far."""
    return sum(path.read_bytes().count(_BEGAN) for path in folder.glob(f"{WORKER}-*.jsonl"))


def journals(folder: Path) -> list[Path]:
    """One of the frame, and one of each process that ever lived."""
    return sorted(folder.glob("*.jsonl"))


def judged(
    folder: Path, name: str, spans: Sequence[Span]
) -> tuple[Figures, Report, list[Violation], dict[str, list[object]]]:
    """Figures of the journals there, the report of the checker, violations put aside, and all that is wrong."""
    figures = Figures(read_all(journals(folder)))
    checked = check(read_all(journals(folder)))
    wrong: dict[str, list[object]] = {promise: [] for promise in PROMISES}
    aside = undone(name, checked.violations, read_all(journals(folder)), spans)
    for violation in checked.violations:
        if violation not in aside:
            wrong.setdefault(violation.promise, []).append(violation)
    return figures, checked, aside, wrong


def _wrong_clock(server: Server, folder: Path) -> tuple[ServerClock | None, Mapping[str, str]]:
    """The wrong clock of every second process, or why there is none."""
    if _is_file(server):
        return None, {CLOCKS: "the clock of each process is the store's: it is set for all of them, or for none"}
    try:
        wrong_clock = ServerClock()
    except ServerMissing:
        return None, {CLOCKS: "libfaketime is not installed"}
    (folder / _WRONG).mkdir()
    return wrong_clock, {}


def _is_file(server: Server) -> bool:
    """True if its clock is that of its callers."""
    return urlsplit(server.direct).scheme == "sqlite"


async def _look(server: Server, journal: Journal, *, drained: bool) -> None:
    """Tell what is left once what is kept for a while has been kept for so long, and purged."""
    async with app_on(server.direct) as app:
        kept = time.monotonic() + KEPT + 1
        while time.monotonic() < kept and [task async for task in app.find()]:
            await asyncio.sleep(LOOK)
            while await app.store.purge(now=app.clock.now(), limit=1_000):
                pass
        async for task in app.find():
            journal.say(Left(time.monotonic_ns(), journal.clock(), task.topic, task.key, seen(task.record)))
        journal.say(End(time.monotonic_ns(), journal.clock(), drained))
