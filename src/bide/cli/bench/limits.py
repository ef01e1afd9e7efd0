"""The raw limits: how fast the plain driver stores such tasks with nothing of ours, measured in the same run.

A ratio is only worth something if both sides met the same machine, so limits are measured in single batches that a
workload lays between its own.
"""

from __future__ import annotations

import gc
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappush
from pathlib import Path
from typing import Any
from uuid import uuid4

from bide.cli.bench.place import Place
from bide.cli.bench.plan import Plan, per_second, rounded
from bide.cli.bench.server import Raw
from bide.cli.bench.worker import PAYLOAD

BATCH = 1000
_HOUR = 3_600_000


class RawMemory:
    """A heap of due times and a dictionary of bodies."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._bodies: dict[str, bytes] = {}

    def store(self, keys: Sequence[str]) -> None:
        heap, bodies = self._heap, self._bodies
        for key in keys:
            bodies[key] = PAYLOAD
            heappush(heap, (time.time_ns() // 1_000_000 + _HOUR, key))

    def close(self) -> None:
        self._heap.clear()
        self._bodies.clear()


class RawSqlite:
    """`executemany` into a table with a unique random key and a due-time index, flushed at every commit as ours is."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"bench-limit-{uuid4().hex}.db"
        self._connection = sqlite3.connect(self._path, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = FULL",
            "CREATE TABLE task (row INTEGER PRIMARY KEY, key TEXT NOT NULL, due_at INTEGER NOT NULL, payload BLOB)",
            "CREATE UNIQUE INDEX task_key ON task (key)",
            "CREATE INDEX task_due ON task (due_at)",
        ):
            self._connection.execute(statement)

    def store(self, keys: Sequence[str]) -> None:
        connection, due_at = self._connection, time.time_ns() // 1_000_000 + _HOUR
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            "INSERT INTO task (key, due_at, payload) VALUES (?, ?, ?)", [(key, due_at, PAYLOAD) for key in keys]
        )
        connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()
        for path in self._path.parent.glob(f"{self._path.name}*"):
            path.unlink()


class Limit:
    """The rate of the plain driver, batch by batch."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._rounds: list[tuple[int, float]] = []

    def measure(self, batches: int = 1) -> None:
        """Store so many batches of 1000, each timed by itself."""
        for _ in range(batches):
            keys = random_keys(BATCH)
            began = time.perf_counter()
            self._raw.store(keys)
            self._rounds.append((BATCH, time.perf_counter() - began))

    def fields(self, figures: Mapping[str, float]) -> dict[str, Any]:
        """`limit_per_s`, and for every rate among `figures` its ratio to it."""
        limit = per_second(self._rounds)
        ratios = {
            f"ratio_{name.removesuffix('_per_s')}": rounded(value / limit)
            for name, value in figures.items()
            if name.endswith("_per_s") and name != "calls_per_s"
        }
        return {"limit_per_s": limit, **ratios}


class NoLimit(Limit):
    """Nobody asked for it."""

    def __init__(self) -> None: ...

    def measure(self, batches: int = 1) -> None: ...

    def fields(self, figures: Mapping[str, float]) -> dict[str, Any]:
        return {}


@contextmanager
def limit_of(plan: Plan) -> Iterator[Limit]:
    """The limit of the plan's store, if the plan asks for one."""
    if not plan.limit:
        yield NoLimit()
        return
    raw = _raw(plan.place)
    try:
        yield Limit(raw)
    finally:
        raw.close()


def _raw(place: Place) -> Raw:
    if place.server is not None:
        return place.server.raw()
    return RawMemory() if place.path is None else RawSqlite(place.path.parent)


def random_keys(count: int) -> list[str]:
    """Keys that fall anywhere in an index: the honest case, for callers name tasks as they like."""
    return [uuid4().hex for _ in range(count)]


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, as `timeit` measures: for operations of a microsecond or less."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
