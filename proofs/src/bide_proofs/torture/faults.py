"""Faults of a run: several lanes at once, with one fault after another in each, all chosen from one seed."""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial

from bide.core.errors import BadInput
from bide.testing.history.events import Fault
from bide.testing.history.recording import Journal
from bide.testing.proxy import Act, FaultProxy
from bide_proofs.harness.processes import READY, Child, ProcessGroup
from bide_proofs.servers.server import ServerClock
from bide_proofs.torture.figures import Span
from bide_proofs.torture.server import Server, in_thread

CLIENT, WORKER = "client", "worker"
KILL, HALT = "kill -9 of a", "SIGSTOP of a"
CLOCKS = "clock jump of processes"
LONGEST_HALT = 8.0
"""Seconds: longer than a lease, and than most patience."""
_SHARES = {WORKER: 0.65, CLIENT: 0.35}
_JUMPS = (0.4, 3.0, 60.0, 3_600.0, 86_400.0)


Lane = Callable[[Collection[str], random.Random], Awaitable[None]]
"""Causes one fault of one of the given kinds."""


class Faults:
    """Lanes on one server, its proxies, the processes, and the `wrong` clock that some processes have.

    The option `pace` divides the pauses between faults; `only` and `without` select the kinds of faults; kills leave
    at least `spare` processes of a kind at work. Raises BadInput if no kind is left.
    """

    def __init__(
        self, server: Server, group: ProcessGroup, journal: Journal, plan: argparse.Namespace, wrong: ServerClock | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        """The number of faults caused, by kind."""
        self.spans: list[Span] = []
        """The faults that are over, in order of their end."""
        self._server = server
        self._group = group
        self._journal = journal
        self._wrong = wrong
        self._plan = plan
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._killing: asyncio.Future[bool] | None = None
        lanes: list[tuple[str, Lane, tuple[float, float], Collection[str]]] = [
            ("kills", self._kills, (1.0, 4.0), [f"{KILL} {kind}" for kind in _SHARES]),
            ("halts", self._halts, (0.5, 4.0), [f"{HALT} {kind}" for kind in _SHARES]),
            ("server", self._server_itself, (3.0, 10.0), sorted(server.troubles())),
            ("clocks", self._clocks, (2.0, 6.0), [] if wrong is None else [CLOCKS]),
            *(
                (f"connections {number}", partial(self._connections, proxy), (1.0, 5.0), _BEFALLS)
                for number, proxy in enumerate(server.proxies)
            ),
        ]
        self._lanes = [
            (name, lane, pauses, allowed)
            for name, lane, pauses, kinds in lanes
            if (
                allowed := [kind for kind in kinds if kind not in plan.without and (not plan.only or kind in plan.only)]
            )
        ]
        if not self._lanes:
            known = sorted({kind for _, _, _, kinds in lanes for kind in kinds})
            raise BadInput("--only", ", ".join(plan.only), f"some of: {', '.join(known)}")

    async def __aenter__(self) -> None:
        """Start all lanes, each in a task of its own."""
        for name, lane, pauses, kinds in self._lanes:
            chance = random.Random(f"{self._plan.seed}/{name}")
            self._tasks.append(asyncio.create_task(self._go(lane, kinds, chance, pauses), name=name))

    async def __aexit__(self, *failure: object) -> None:
        """Stop all faults and repair everything. Raises the error with which a lane failed."""
        self._over = True
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=60)  # a driver may lose a cancellation; repairs take time
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._killing is not None:
            await self._killing
        if self._wrong is not None:
            self._wrong.shift(0)
        for proxy in self._server.proxies:
            await proxy.heal()
            proxy.cut()  # held connections stay held after `heal`
        for error in ended:
            if not isinstance(error, asyncio.CancelledError) and error is not None:
                raise error

    async def go_on(self, seconds: float) -> None:
        """Wait for `seconds`, or until a lane has failed, which makes the run worthless."""
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def _go(self, lane: Lane, kinds: Collection[str], chance: random.Random, pauses: tuple[float, float]) -> None:
        while not self._over:  # a driver may lose a cancellation during a call
            await asyncio.sleep(chance.uniform(*pauses) / self._plan.pace)
            await lane(kinds, chance)

    @asynccontextmanager
    async def _during(self, kind: str, what: str) -> AsyncIterator[None]:
        """Record one fault within this context. A fault that the end of the run cuts short counts too."""
        begun = time.monotonic_ns()
        self._journal.say(Fault(begun, what))
        self.counts[kind] += 1
        try:
            yield
        finally:
            at = time.monotonic_ns()
            self.spans.append((kind, begun, at))
            self._journal.say(Fault(at, f"over: {what}"))

    async def _kills(self, kinds: Collection[str], chance: random.Random) -> None:
        child = self._victim(KILL, kinds, chance)
        if child is not None:
            async with self._during(f"{KILL} {child.kind}", f"kill -9 of {child.name}"):
                # shielded, so that another process takes its place even if the faults end now
                self._killing = asyncio.ensure_future(self._group.kill(child))
                await asyncio.shield(self._killing)

    async def _halts(self, kinds: Collection[str], chance: random.Random) -> None:
        child, seconds = self._victim(HALT, kinds, chance), chance.uniform(0.1, LONGEST_HALT)
        if child is not None:
            async with self._during(f"{HALT} {child.kind}", f"SIGSTOP of {child.name}, {seconds:.1f} s"):
                await self._group.halt(child, seconds)

    def _victim(self, what: str, kinds: Collection[str], chance: random.Random) -> Child | None:
        shares = {kind: share for kind, share in _SHARES.items() if f"{what} {kind}" in kinds}
        [kind] = chance.choices(list(shares), list(shares.values()))
        children = self._group.of(kind)
        if self._plan.spare:
            children = [child for child in children if READY in child.said]
            if len(children) <= self._plan.spare:
                return None
        return chance.choice(children) if children else None

    async def _connections(self, proxy: FaultProxy, kinds: Collection[str], chance: random.Random) -> None:
        kind = chance.choice(list(kinds))
        seconds = chance.uniform(0.2, 4.0)
        async with self._during(kind, f"{kind} at port {proxy.port}, {seconds:.1f} s"):
            try:
                await _befall(proxy, kind, seconds, chance)
            finally:
                await proxy.heal()

    async def _server_itself(self, kinds: Collection[str], chance: random.Random) -> None:
        kind = chance.choice(list(kinds))
        async with self._during(kind, f"the server: {kind}"):
            over = threading.Event()
            said = await in_thread(self._server.troubles()[kind], chance, over.wait, over=over)
        self._journal.say(Fault(time.monotonic_ns(), said))

    async def _clocks(self, kinds: Collection[str], chance: random.Random) -> None:
        assert self._wrong is not None
        seconds = chance.choice((-1, 1)) * chance.choice(_JUMPS) * chance.uniform(0.5, 1.5)
        async with self._during(CLOCKS, f"every second process's clock jumps to {seconds:+.1f} s"):
            self._wrong.shift(seconds)
            await asyncio.sleep(chance.uniform(0.5, 5.0))
        if chance.random() < 0.7:
            self._wrong.shift(0)


RESET, HALF_OPEN, DELAY, THROTTLE, LOST_REPLY, REFUSED, CUT_REQUEST = _BEFALLS = (
    "connections reset", "half-open connections", "delay", "throttling", "reply lost", "connections refused",
    "request cut off",
)  # fmt: skip


async def _befall(proxy: FaultProxy, kind: str, seconds: float, chance: random.Random) -> None:
    """Cause one fault of connections, and wait until it is over."""
    if kind == RESET:
        proxy.cut()
        return
    if kind == HALF_OPEN:
        proxy.hold()
    elif kind == DELAY:
        proxy.delay(chance.choice((0.02, 0.2, 1.0)), to_server=chance.random() < 0.7, to_client=chance.random() < 0.7)
    elif kind == THROTTLE:
        proxy.slow(chance.choice((10_000, 50_000, 200_000)))
    elif kind == REFUSED:
        await proxy.refuse()
        proxy.cut()
        seconds /= 2
    else:
        act = Act.LOSE_REPLY if kind == LOST_REPLY else Act.CUT
        proxy.fault(act, skip=chance.randrange(5), times=chance.randint(1, 4))
        seconds = min(seconds, 1.5)
    await asyncio.sleep(seconds)
