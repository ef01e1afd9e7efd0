"""The worker processes: what their handlers do, what they count, and how they are started and asked."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from threading import Lock
from typing import Any
from zlib import crc32

import msgspec

from bide.app import Bide
from bide.cli.bench.worker import Log, Reporter, percentile, say, words
from bide.cli.bench.workers import BenchFault, Child
from bide.core.outcomes import Dead, Defer, Retry
from bide.core.records import Record, Settlement, Verdict
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.trial import PATIENCE

PLAIN, KEPT, FAILING, THREADED = TOPICS = ("soak.plain", "soak.kept", "soak.failing", "soak.threaded")
ON_PURPOSE = "the soak lets it fail"
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Set for all processes, as deploy/ sets it: without it glibc lets resident memory creep up though what is in use stays
the same. It gives threads heaps of their own, and a block that moves between threads takes new pages from one after the
other: a megabyte a minute with 32 threads. And it learns to put large blocks into the heap, between small ones; every
read from a socket asks for one of 256 KiB and gives nearly all of it back: 0.2 MB a minute at 6,000 tasks a second."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told first, as a line of JSON: not as an argument, which everybody could read."""

    url: str
    keep: float
    """Seconds for which ended tasks of two topics are remembered."""
    leak: int = 0
    """Bytes that a handler keeps of each task for ever: how the soak itself is tried out."""


class Ids(msgspec.Struct):
    """Which ids were counted, in two numbers: two sets that agree in both are the same, but for one chance in 2^32."""

    number: int = 0
    total: int = 0
    """The sum of their checksums."""

    def add(self, id: str) -> None:
        self.number += 1
        self.total += crc32(id.encode())

    def __add__(self, other: Ids) -> Ids:
        return Ids(self.number + other.number, self.total + other.total)


class Counted(Log):
    """What the handlers of one process did, in numbers alone, so that counting holds no more memory as time passes."""

    def __init__(self, leak: int) -> None:
        super().__init__()
        self.ended = Ids()
        self._begun = self._early = self._again = 0
        self._verdicts = dict.fromkeys(Verdict, 0)
        self._late: list[float] = []
        self._latest = 0.0
        self._leak = leak
        self._leaked: list[bytes] = []
        self._lock = Lock()
        """A plain function is called in a thread."""

    def began(self, record: Record) -> int:
        """The first line of every handler; a number that says what becomes of this life."""
        late = time.time_ns() / 1_000_000 - record.planned_at
        with self._lock:
            self._begun += 1
            self._early += late < 0
            self._again += record.losses > 0
            self._late.append(late)
            self._latest = max(self._latest, late)
            if self._leak:
                self._leaked.append(b"x" * self._leak)
        return crc32(record.id.encode())

    def observe(self, record: Record, settlement: Settlement) -> None:
        self._verdicts[settlement.verdict] += 1
        if settlement.verdict in (Verdict.DONE, Verdict.DEAD):
            self.ended.add(record.id)

    @property
    def number(self) -> int:
        return self.ended.number

    def look(self) -> dict[str, Any]:
        """Since the beginning; percentiles of lateness, in milliseconds, since the last look."""
        with self._lock:
            late, self._late = self._late, []
        late.sort()
        return {
            "begun": self._begun, "early": self._early, "redelivered": self._again, "latest_ms": self._latest,
            "verdicts": self._verdicts, "ended": self.ended, "blocks": sys.getallocatedblocks(),
            **({"late_p50_ms": percentile(late, 0.5), "late_p99_ms": percentile(late, 0.99)} if late else {}),
        }  # fmt: skip


def work() -> None:
    """A worker process: its terms are the first line of its standard input, words follow (`look`, `stop`)."""
    logging.getLogger("bide.worker").addFilter(lambda line: ON_PURPOSE not in line.getMessage())
    asyncio.run(_work())


async def _work() -> None:
    told = words()
    terms = msgspec.json.decode(await anext(told), type=Terms)
    app, counted = Bide(terms.url, settings=Settings(keep_done=0, keep_cancelled=0)), Counted(terms.leak)
    keep = f"{terms.keep}s"

    @app.handler(PLAIN)
    async def plain(task: Task[bytes]) -> None:
        if not counted.began(task.record) % 8:
            await asyncio.sleep(0.005)

    @app.handler(KEPT, keep_done=keep, keep_cancelled=keep)
    async def kept(task: Task[bytes]) -> None:
        counted.began(task.record)

    @app.handler(FAILING, keep_dead=keep)
    async def failing(task: Task[bytes]) -> None:
        record = task.record
        fate = counted.began(record) % 10
        if fate == 0:
            raise Dead(ON_PURPOSE)
        if fate in (1, 2, 3) and record.failures == 0:
            raise Retry(ON_PURPOSE, delay="200ms")
        if fate == 4 and record.planned_at <= record.due_at:
            raise Defer("200ms")

    @app.handler(THREADED)
    def threaded(task: Task[bytes]) -> None:
        counted.began(task.record)
        time.sleep(0.005)  # so that all threads of its pool are needed while the maximum is measured, and no more later

    async with app, app.worker(observe=Reporter(counted).observe):
        say(working=True)
        while await anext(told) == "look":
            say(look=counted.look())


def environment() -> dict[str, str]:
    """Of the processes that are looked at: this one's, `ALLOCATOR` among it, without what would set bide up."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}


class Crew:
    """The worker processes, as the client sees them."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._members: list[Child] = []

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def ended(self) -> int:
        """Lives that ended in a worker, as far as it has said so; it may lag by 50 ms."""
        return sum(member.settled for member in self._members)

    async def start(self, count: int) -> None:
        """So many, and wait until all of them work. Raises BenchFault."""
        environ = environment()
        for _ in range(count):
            command = (sys.executable, "-P", "-c", "from bide_proofs.soak.crew import work; work()")
            member = await Child.start("a worker process", *command, env=environ)
            member.tell(msgspec.json.encode(self._terms).decode())
            self._members.append(member)
        for member in self._members:
            await member.said("working", within=PATIENCE)

    async def look(self) -> list[dict[str, Any]]:
        """What each of them has counted. Raises BenchFault where one has ended."""
        return [await member.ask("look", within=PATIENCE) for member in self._members]

    async def stop(self) -> list[str]:
        """End them; what was wrong with that."""
        wrong = []
        for member in self._members:
            try:
                await member.stop(within=PATIENCE)
            except (BenchFault, ConnectionError) as error:
                wrong.append(str(error))
            if member.returncode:
                wrong.append(f"a worker ended with {member.returncode}")
        self._members = []
        return wrong
