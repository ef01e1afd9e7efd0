"""One run: a server, clients and workers, faults for a while, then peace until all is done; and what it comes to."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from bide.core.errors import StoreError, StoreMismatch
from bide.core.instants import Millis
from bide.core.records import State
from bide.testing.history.check import Report, Violation, check
from bide.testing.history.events import End, Fault, Header, Left, seen
from bide.testing.history.journal import Journal, Log, read_all
from bide_proofs.torture.clock import SLACK, SharedClock, WrongClock, library
from bide_proofs.torture.crew import CLIENT, WORKER, Crew
from bide_proofs.torture.faults import Faults, Told
from bide_proofs.torture.figures import Figures, counts_of
from bide_proofs.torture.server import Server
from bide_proofs.torture.topics import CAP, KEPT, LEASE, LOSSES, TOPICS, app_on
from bide_proofs.torture.undone import Span, undone
from bide_proofs.trial import PATIENCE, WrongByKind, percentiles

_LOOK = 0.25
_BEGAN = b'{"type":"began",'
"""How the line of a delivery begins."""


class Plan(Struct, frozen=True, kw_only=True):
    """How a run is to be."""

    seconds: float
    clients: int
    workers: int
    rate: float
    """Verbs a second, of all clients together."""
    farthest: float
    """The longest delay that is asked for, in seconds."""
    pace: float
    """1 for the usual pauses between faults; 2 for half of them."""
    seed: int
    least: int = 0
    """Deliveries before clients end, however long these take once all is mended."""
    without: Collection[str] = ()
    """Troubles of the server that are not caused."""


async def tortured(server: Server, plan: Plan, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run it in `folder`; the report, and what was wrong. Raises what the server, or a fault, failed with.

    SIGTERM ends it as a cancellation does, with nothing left behind.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    journal_path, clock_path = folder / "frame.jsonl", folder / "clock"
    clock = SharedClock(clock_path)
    log = Log(journal_path)
    journal = Journal(log.say, time_ns=time.monotonic_ns, clock=clock.now)
    told = Told(journal)
    async with AsyncExitStack() as entered:
        entered.callback(log.close)
        entered.callback(clock.close)
        await server.start()
        entered.push_async_callback(server.stop)
        wrong_clock, why_not = _wrong_clock(server, folder)
        cannot = {**server.cannot, **why_not, **dict.fromkeys(plan.without, "left out, as it was asked for")}
        clock.set(server.ahead)
        await _empty(server)

        def jumped(before: Millis) -> None:
            journal.say(Fault(time.monotonic_ns(), "the store's clock was set", before))

        following = asyncio.create_task(clock.follow(lambda: server.ahead, jumped))
        entered.callback(following.cancel)
        journal.say(
            Header(
                server.name,
                SLACK + round(2 * server.farthest * 1000),
                round(CAP * 1000),
                LOSSES,
                time.monotonic_ns(),
                gives_back=server.gives_back,
            )
        )
        crew = Crew(
            folder, journal, server.urls, clock=clock_path, seed=plan.seed, rate=plan.rate / plan.clients,
            farthest=plan.farthest,
            environment=server.environment, shares_clock=_is_file(server),
            wrong_environment={} if wrong_clock is None else wrong_clock.environment,
        )  # fmt: skip
        entered.push_async_callback(crew.abandon)
        await crew.start(CLIENT, plan.clients)
        await crew.start(WORKER, plan.workers)
        faults = Faults(
            server, crew, told, seed=plan.seed, pace=plan.pace, wrong=wrong_clock, without=plan.without
        )  # fmt: skip
        began = time.monotonic()
        faults.start()
        try:
            await faults.go_on(plan.seconds)
        finally:
            await faults.stop()
        mended = time.monotonic()
        # in peace: on a machine that is busy enough a worker may be killed before it has begun, each time
        while _deliveries(folder) < plan.least and time.monotonic() < mended + PATIENCE:  # noqa: ASYNC110 - files tell
            await asyncio.sleep(_LOOK)
        asked = time.monotonic() - began
        await crew.end(CLIENT)
        drained = await _drained(server, journal)
        await crew.end(WORKER)
        await _look(server, journal, drained=drained is not None)
        about = server.about()
        ended, said = crew.ended, crew.said()
    figures, checked, aside, wrong = judged(folder, server.name, told.spans)
    wrong["process ended"] = list(ended)
    wrong["error logged"] = list(said)
    wrong["not drained"] = [] if drained is not None else [f"something was live {PATIENCE:g} s after all was mended"]
    report = {
        "store": server.name,
        "about": about,
        "seconds": round(mended - began, 1),
        "seed": plan.seed,
        "processes": {"clients": plan.clients, "workers": plan.workers, "started": crew.started},
        "lease_seconds": LEASE,
        "rate": round(figures.scheduled / asked, 1),
        "load": figures.load(),
        "faults": dict(sorted(told.counts.items())),
        "cannot": cannot,
        "drained_seconds": None if drained is None else round(drained, 1),
        "delivered_again": figures.again,
        "wrong": counts_of(wrong),
        "checked": checked.summary(),
        "leases_undone_by_crashes": len(aside),
        "lateness_ms": percentiles(figures.lateness),
        "lateness_ms_after_lost_leases": percentiles(figures.lateness_again),
        "longest_silence": figures.silence(told.spans),
        "recovery_seconds": figures.recovery(told.spans),
    }
    return report, wrong


def _deliveries(folder: Path) -> int:
    """How many have begun so far."""
    return sum(path.read_bytes().count(_BEGAN) for path in folder.glob(f"{WORKER}-*.jsonl"))


def journals(folder: Path) -> list[Path]:
    """One of the frame, and one of each process that ever lived."""
    return sorted(folder.glob("*.jsonl"))


def judged(
    folder: Path, name: str, spans: Sequence[Span]
) -> tuple[Figures, Report, list[Violation], dict[str, list[object]]]:
    """What the journals there add up to, what the checker says, what of that is put aside, and all that is wrong."""
    figures = Figures(read_all(journals(folder)))
    checked = check(read_all(journals(folder)))
    wrong: dict[str, list[object]] = {kind: list(cases) for kind, cases in figures.wrong.items()}
    aside = undone(name, checked.violations, read_all(journals(folder)), spans)
    for violation in checked.violations:
        if violation not in aside:
            wrong.setdefault(violation.promise, []).append(violation)
    return figures, checked, aside, wrong


def _wrong_clock(server: Server, folder: Path) -> tuple[WrongClock | None, Mapping[str, str]]:
    """What sets the clocks of every second process wrong, or why nothing does."""
    kind = "clock jump of processes"
    if _is_file(server):
        return None, {kind: "the clock of each process is the store's: it is set for all of them, or for none"}
    found = library()
    if found is None:
        return None, {kind: "libfaketime is not installed"}
    return WrongClock(found, folder / "wrong.clock"), {}


def _is_file(server: Server) -> bool:
    """Whether its clock is that of its callers."""
    return urlsplit(server.direct).scheme == "sqlite"


async def _empty(server: Server) -> None:
    """That nothing is in it: what others have there would be delivered, and judged. Raises StoreMismatch."""
    async with app_on(server.direct) as app:
        tally = await app.tally()
        if any(tally.number(topic) for topic in TOPICS):
            raise StoreMismatch(f"the store has tasks of the topics {', '.join(TOPICS)} already; give an empty one")


async def _drained(server: Server, journal: Journal) -> float | None:
    """Seconds until nothing was live any more; None: it was not to be waited for."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        try:
            async with app_on(server.direct) as app:
                while time.monotonic() < began + PATIENCE:
                    tally = await app.tally()
                    if not tally.number(state=State.WAITING) + tally.number(state=State.LEASED):
                        return time.monotonic() - began
                    await asyncio.sleep(_LOOK)
        except StoreError:
            await asyncio.sleep(_LOOK)
    return None


async def _look(server: Server, journal: Journal, *, drained: bool) -> None:
    """Tell what is left once what is kept for a while has been kept for so long, and purged."""
    async with app_on(server.direct) as app:
        kept = time.monotonic() + KEPT + 1
        while time.monotonic() < kept and [task async for task in app.find()]:
            await asyncio.sleep(_LOOK)
            while await app.store.purge(now=app.clock.now(), limit=1_000):
                pass
        async for task in app.find():
            journal.say(Left(time.monotonic_ns(), journal.clock(), task.topic, task.key, seen(task.record)))
        journal.say(End(time.monotonic_ns(), journal.clock(), drained))
