"""One run of a benchmark: its target and options, the raw limit that it is compared with, and its report."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from bide._version import __version__
from bide.core.errors import BadInput
from bide_bench import redis_server, sql_server
from bide_bench.target import MemoryTarget, Raw, SqliteTarget, Target

BATCH = 1000
_ALONE = 10
"""Batches of the raw limit for a workload that interleaves none."""
_COUNTED = ("lost", "duplicated", "early", "left_behind")
"""Prefixes of the names of figures that must be 0."""

Progress = Callable[[str, int, int], None]
"""Called with the progress of a long run: the activity, the amount done, and the total."""


def silent(*figures: Any) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command, checked."""

    target: Target
    n: int | None = None
    """The number of tasks; None: the workload's default."""
    rate: float = 200.0
    processes: int = 1
    ahead: str = "2s"
    pending: int = 0
    flood: int = 0
    limit: bool = False
    loop: str = "asyncio"
    seconds: float = 60.0
    snapshot: bool = False
    progress: Progress = silent
    report_line: Callable[[Mapping[str, Any]], None] = silent
    """Called with each line of figures of a run that takes minutes."""

    @property
    def history(self) -> str:
        """ "on", the default; "off" if the benchmark does not own the store, and so leaves it as it was."""
        return "on" if self.target.owned else "off"

    def count(self, default: int) -> int:
        return default if self.n is None else self.n

    def sizes(self) -> list[int]:
        """10^3, 10^4 ... up to N, which is a million by default."""
        most = self.count(1_000_000)
        return [*(size for power in range(3, 10) if (size := 10**power) < most), most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures and the faults of a run. The figures of a run with faults are worthless."""

    fields: Mapping[str, Any]
    faults: Sequence[str] = field(default_factory=list)

    @property
    def all_faults(self) -> list[str]:
        """The faults, and the counts of tasks lost, delivered twice, early or left behind."""
        counted = [f"{name} is {value}" for name, value in self.fields.items() if value and name.startswith(_COUNTED)]
        return [*counted, *self.faults]


_ACCEPTED = (
    '"memory:", "sqlite:" (a file of its own), "sqlite:///relative.db", "sqlite:////absolute/path.db", '
    '"redis://host:port/0" (a namespace of its own), "postgresql://host:port/database" or "mysql://..." (a schema of '
    "its own)"
)


@asynccontextmanager
async def open_target(url: str) -> AsyncIterator[Target]:
    """Open the store that `url` names; files and parts of a server that were not there before are removed at the end.

    Raises BadInput, and for a server StoreUnavailable.
    """
    parts = urlsplit(url)
    if url == "memory:":
        yield MemoryTarget(url)
    elif url == "sqlite:":
        with tempfile.TemporaryDirectory(prefix="bide-bench-") as directory:
            yield SqliteTarget(Path(directory) / "bench.db", owned=True)
    elif parts.scheme == "sqlite" and not parts.netloc and len(parts.path) > 1 and not parts.query:
        target = SqliteTarget(Path(unquote(parts.path.removeprefix("/"))), owned=False)
        before = set(target.files())
        target.owned = target.path not in before
        try:
            yield target
        finally:
            if target.owned:
                for made in set(target.files()) - before:
                    with suppress(FileNotFoundError):
                        made.unlink()
    elif parts.scheme in (*redis_server.SCHEMES, *sql_server.SCHEMES):
        server: redis_server.RedisServer | sql_server.SqlServer
        connected = redis_server.redis_server if parts.scheme in redis_server.SCHEMES else sql_server.sql_server
        async with connected(url) as server:
            server.owned = server.url != url or await server.is_empty()
            try:
                if server.owned:
                    await server.make()
                yield server
            finally:
                if server.owned:
                    await server.clear()
    else:
        raise BadInput("store", parts.scheme or "text without a scheme", _ACCEPTED)


class Limit:
    """The rate at which the plain driver, without bide, stores such tasks, measured in the same run.

    A ratio is meaningful only if both sides had the same machine, so its batches are interleaved with the workload's.
    `raw` None: it measures nothing.
    """

    def __init__(self, raw: Raw | None) -> None:
        self._raw = raw
        self._rounds: list[tuple[int, float]] = []

    async def measure(self, batches: int = 1) -> None:
        """Store batches of 1000, each timed separately."""
        if self._raw is None:
            return
        for _ in range(batches):
            keys = random_keys(BATCH)
            began = time.perf_counter()
            await self._raw(keys)
            self._rounds.append((BATCH, time.perf_counter() - began))

    async def fields(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """`limit_per_s`, and the ratio to it of every rate of tasks among `figures`."""
        if self._raw is None:
            return {}
        if not self._rounds:  # a workload whose figures are not rates
            await self.measure(_ALONE)
        limit = per_second(self._rounds)
        rates = [name for name in figures if name.endswith("_per_s") and name != "calls_per_s"]
        ratios = {f"ratio_{name.removesuffix('_per_s')}": rounded(figures[name] / limit) for name in rates}
        return {"limit_per_s": limit, **ratios}


def machine() -> dict[str, Any]:
    """The machine, for each line of figures."""
    return {"version": __version__, "python": platform.python_version(), "cpus": os.cpu_count() or 1}


@asynccontextmanager
async def limit_of(plan: Plan) -> AsyncIterator[Limit]:
    """Measure the limit of the plan's store, if the plan asks for it."""
    if not plan.limit:
        yield Limit(None)
        return
    async with plan.target.raw() as raw:
        yield Limit(raw)


def rounded(value: float) -> float:
    """Round to four significant digits: no figure here is more precise.

    >>> rounded(48123.4), rounded(0.123456), rounded(0.0)
    (48120.0, 0.1235, 0.0)
    """
    return float(f"{value:.4g}")


def per_second(rounds: Sequence[tuple[int, float]]) -> float:
    """The median rate of rounds, each (count, seconds): one disturbed round does not matter."""
    return rounded(median(count / max(seconds, 1e-9) for count, seconds in rounds))


def random_keys(count: int) -> list[str]:
    """Random keys, which fall anywhere in an index, as keys of callers do."""
    return [uuid4().hex for _ in range(count)]


def in_batches(keys: Sequence[Any], size: int = BATCH) -> Iterator[Sequence[Any]]:
    """Slices of at most `size`, in order."""
    return (keys[first : first + size] for first in range(0, len(keys), size))


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, as `timeit` measures: for operations of a microsecond or less."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
