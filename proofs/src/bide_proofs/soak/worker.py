"""A worker process of a soak: its handlers and their counts."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from threading import Lock
from typing import Any
from zlib import crc32

import msgspec

from bide.app import Bide
from bide.core.outcomes import Dead, Defer, Retry
from bide.core.records import OutcomeKind, Record, Settlement
from bide.core.tasks import Task
from bide.settings import Settings
from bide_bench.worker import Log, Reporter, send, words
from bide_proofs.harness.command import percentiles
from bide_proofs.harness.processes import ready, spec_of

PLAIN, KEPT, FAILING, THREADED = TOPICS = ("soak.plain", "soak.kept", "soak.failing", "soak.threaded")
ON_PURPOSE = "the soak lets it fail"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of its standard input."""

    url: str
    keep: float
    """The retention, in seconds, of ended tasks of two topics."""
    leak: int = 0
    """Bytes of each task that a handler keeps to the end, to test the soak itself."""


class Ids(msgspec.Struct):
    """A set of ids as two numbers: sets that agree in both are equal, except with a probability of 1 in 2^32."""

    number: int = 0
    total: int = 0
    """The sum of their checksums."""

    def add(self, id: str) -> None:
        self.number += 1
        self.total += crc32(id.encode())

    def __add__(self, other: Ids) -> Ids:
        return Ids(self.number + other.number, self.total + other.total)


class Counted(Log):
    """Counts of the handlers of one process: only numbers, so that counting needs no more memory as time passes."""

    def __init__(self, leak: int) -> None:
        super().__init__()
        self._ended = Ids()
        self._begun = self._early = self._again = 0
        self._verdicts = dict.fromkeys(OutcomeKind, 0)
        self._late: list[float] = []
        self._latest = 0.0
        self._leak = leak
        self._leaked: list[bytes] = []
        self._lock = Lock()
        """Needed because plain functions run in threads."""

    def began(self, record: Record) -> int:
        """Count a delivery, as the first line of every handler; return a number that decides the life's fate."""
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
        self._verdicts[settlement.outcome] += 1
        if settlement.outcome in (OutcomeKind.DONE, OutcomeKind.DEAD):
            self._ended.add(record.id)

    @property
    def number(self) -> int:
        """The number of lives that have ended."""
        return self._ended.number

    def counts(self) -> dict[str, Any]:
        """Counts since the beginning, and percentiles of lateness, in milliseconds, since the last call."""
        with self._lock:
            late, self._late = self._late, []
        parts = percentiles(late)
        return {
            "begun": self._begun, "early": self._early, "redelivered": self._again, "latest_ms": self._latest,
            "verdicts": self._verdicts, "ended": self._ended, "blocks": sys.getallocatedblocks(),
            **({"late_p50_ms": parts["p50"], "late_p99_ms": parts["p99"]} if late else {}),
        }  # fmt: skip


async def _work(spec: Spec) -> None:
    app, counted = Bide(spec.url, settings=Settings(keep_done=0, keep_cancelled=0)), Counted(spec.leak)
    keep = f"{spec.keep}s"

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
        time.sleep(0.005)  # so that measuring the maximum starts all threads of the pool, and no more start later

    async with app, app.worker(observe=Reporter(counted).observe):
        ready()
        async for word in words():
            if word == "counts":
                send(counts=counted.counts())


if __name__ == "__main__":
    logging.getLogger("bide.worker").addFilter(lambda line: ON_PURPOSE not in line.getMessage())
    asyncio.run(_work(spec_of(Spec)))
