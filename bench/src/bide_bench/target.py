"""The store under test: the part that a benchmark uses, and the measurements besides bide's own calls."""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from heapq import heappush
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit
from uuid import uuid4

from bide.cli.output import current_millis
from bide.core.errors import BadInput
from bide_bench.processes import resident_bytes
from bide_bench.worker import PAYLOAD

HOUR = 3_600_000

Raw = Callable[[Sequence[str]], Awaitable[None]]
"""Stores a task for each key, due in an hour, as durably as bide, by the plain driver on one connection."""
Stop = Callable[[], float]
"""Ends a measurement, and returns the microseconds that the operation took."""


class Load(NamedTuple):
    """The work of a server since its start."""

    at: float
    """Seconds of a monotonic clock."""
    cpu: float
    """Seconds of processor time; NaN if unknown."""
    requests: int
    """Requests served, in the unit of the kind of server."""


class Target(ABC):
    """A store to measure."""

    kind: ClassVar[str]
    """ "memory", "sqlite", "redis", "postgres" or "mysql"."""
    shared: ClassVar[bool] = True
    """True if another process can work on it."""
    on_server: ClassVar[bool] = True
    remembers_heads: ClassVar[bool] = False
    """True if an open store may know the next wake without asking, so that only a fresh one is measured."""
    step: ClassVar[float] = 0.001
    """The resolution of `measure` in microseconds, for interpolating a median within one step."""

    def __init__(self, url: str, *, owned: bool = True) -> None:
        self.url = url
        self.owned = owned
        """True if it was created for this run, and is removed afterwards."""

    @abstractmethod
    async def size(self) -> int:
        """Bytes of the file and its companions, of the server, or of this process."""

    @abstractmethod
    def raw(self) -> AbstractAsyncContextManager[Raw]:
        """The plain driver, in a separate part of the store that is removed at the end."""

    async def measure(self) -> Stop:
        """Begin to measure how long one operation keeps the store busy, with no other client."""
        return stopwatch()

    async def load(self) -> Load:
        """The load of the server; nothing without one."""
        return Load(time.monotonic(), 0.0, 0)

    async def health(self) -> Mapping[str, int]:
        """Figures that grow in long use: bytes, and dead rows that are not removed yet."""
        return {"bytes": await self.size()}

    async def flush(self) -> None:  # noqa: B027 - nothing for a store that writes at its own pace
        """Write out what is stored now, so that it does not disturb a measurement."""

    def snapshot(self) -> AbstractAsyncContextManager[None]:
        """Hold a snapshot of the data open. Raises BadInput if the store has none."""
        raise BadInput("--snapshot", self.kind, "a database server: PostgreSQL, MySQL")


def stopwatch(less: float = 0.0) -> Stop:
    """Measure by this process's clock, less `less` microseconds; never 0, since ratios are computed from it."""
    began = time.perf_counter_ns()
    return lambda: max((time.perf_counter_ns() - began) / 1000 - less, 1.0 if less else 0.0)


def due_in_an_hour() -> int:
    """An hour from now, in milliseconds since the epoch."""
    return current_millis() + HOUR


def named_part(url: str, option: str, fresh: str) -> str:
    """`url` with `?option=fresh`, unless it has that option."""
    if dict(parse_qsl(urlsplit(url).query)).get(option):
        return url
    return f"{url}{'&' if '?' in url else '?'}{option}={fresh}"


class MemoryTarget(Target):
    """The memory of this process."""

    kind = "memory"
    shared = on_server = False

    async def size(self) -> int:
        return resident_bytes(Path("/proc/self"))

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        """A heap of due times and a dictionary of payloads."""
        heap: list[tuple[int, str]] = []
        payloads: dict[str, bytes] = {}

        async def store(keys: Sequence[str]) -> None:
            for key in keys:
                payloads[key] = PAYLOAD
                heappush(heap, (due_in_an_hour(), key))

        yield store


class SqliteTarget(Target):
    """A SQLite file."""

    kind = "sqlite"
    on_server = False

    def __init__(self, path: Path, *, owned: bool) -> None:
        self.path = path.absolute()
        super().__init__(f"sqlite:///{quote(str(self.path))}", owned=owned)

    def files(self) -> list[Path]:
        """The file and its companions (-wal, -shm, a lock)."""
        literal = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in self.path.name)
        found = self.path.parent.glob(f"{literal}*")
        return [one for one in found if one == self.path or one.name[len(self.path.name)] == "-"]

    async def size(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        """`executemany` into a table with a unique random key and a due-time index, flushed at each commit."""
        path = self.path.parent / f"bench-limit-{uuid4().hex}.db"
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.executescript(
                    "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
                    "CREATE TABLE task (row INTEGER PRIMARY KEY, key TEXT NOT NULL, due_at INTEGER NOT NULL, "
                    "payload BLOB); CREATE UNIQUE INDEX task_key ON task (key); CREATE INDEX task_due ON task (due_at)"
                )

                async def store(keys: Sequence[str]) -> None:
                    rows = [(key, due_in_an_hour(), PAYLOAD) for key in keys]
                    connection.execute("BEGIN IMMEDIATE")
                    connection.executemany("INSERT INTO task (key, due_at, payload) VALUES (?, ?, ?)", rows)
                    connection.execute("COMMIT")

                yield store
        finally:
            for made in path.parent.glob(f"{path.name}*"):
                made.unlink()
