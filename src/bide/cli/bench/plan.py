"""One run of a benchmark: what it is to do, the raw limit that it is compared with, and what it found."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from uuid import uuid4

from bide._version import __version__
from bide.cli.bench.place import Place, Raw

BATCH = 1000
_ALONE = 10
"""Batches of the raw limit where a workload lays none between its own."""
_COUNTED = ("lost", "duplicated", "early", "left_behind")
"""Figures that must be 0, by the beginnings of their names."""


Progress = Callable[[str, int, int], None]
"""Called with the progress of a long run: its activity, the part that is done, and the whole."""


def silent(*figures: Any) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command, checked."""

    place: Place
    n: int | None = None
    """The number of tasks; None is the workload's own default."""
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
    tell: Callable[[Mapping[str, Any]], None] = silent
    """Called with each line of figures of a run that lasts minutes."""

    @property
    def history(self) -> str:
        """ "on", the default, or "off" where the benchmark does not own the store and leaves it as it was."""
        return "on" if self.place.owned else "off"

    def count(self, default: int) -> int:
        return default if self.n is None else self.n

    def sizes(self) -> list[int]:
        """10^3, 10^4 ... up to N, which is a million by default."""
        most = self.count(1_000_000)
        return [*(size for power in range(3, 10) if (size := 10**power) < most), most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures, and what was wrong: a run with faults has no figures worth quoting."""

    fields: Mapping[str, Any]
    faults: Sequence[str] = field(default_factory=list)

    @property
    def all_faults(self) -> list[str]:
        """Also the figures that count tasks lost, delivered twice, early or left behind."""
        counted = [f"{name} is {value}" for name, value in self.fields.items() if value and name.startswith(_COUNTED)]
        return [*counted, *self.faults]


class Limit:
    """The rate at which the plain driver stores such tasks with nothing of ours, measured in the same run.

    A ratio is only worth something if both sides met the same machine, so single batches are laid between a workload's
    own. `raw` None: nobody asked for it, and it measures nothing.
    """

    def __init__(self, raw: Raw | None) -> None:
        self._raw = raw
        self._rounds: list[tuple[int, float]] = []

    async def measure(self, batches: int = 1) -> None:
        """Store so many batches of 1000, each timed by itself."""
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
        if not self._rounds:  # of a workload whose figures are no rates
            await self.measure(_ALONE)
        limit = per_second(self._rounds)
        rates = [name for name in figures if name.endswith("_per_s") and name != "calls_per_s"]
        ratios = {f"ratio_{name.removesuffix('_per_s')}": rounded(figures[name] / limit) for name in rates}
        return {"limit_per_s": limit, **ratios}


def machine() -> dict[str, Any]:
    """The machine of the figures, for each line of them."""
    return {"version": __version__, "python": platform.python_version(), "cpus": os.cpu_count() or 1}


@asynccontextmanager
async def limit_of(plan: Plan) -> AsyncIterator[Limit]:
    """The limit of the plan's store, if the plan asks for one."""
    if not plan.limit:
        yield Limit(None)
        return
    async with plan.place.raw() as raw:
        yield Limit(raw)


def rounded(value: float) -> float:
    """Four significant digits: no figure here is better than that.

    >>> rounded(48123.4), rounded(0.123456), rounded(0.0)
    (48120.0, 0.1235, 0.0)
    """
    return float(f"{value:.4g}")


def per_second(rounds: Sequence[tuple[int, float]]) -> float:
    """The median rate of rounds, each (how many, seconds): one disturbed round changes nothing."""
    return rounded(median(count / max(seconds, 1e-9) for count, seconds in rounds))


def random_keys(count: int) -> list[str]:
    """Keys that fall anywhere in an index: the honest case, since callers name tasks as they like."""
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
