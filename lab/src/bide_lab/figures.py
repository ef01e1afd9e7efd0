"""The figures of one cell, which the results file holds, and the measures by which strategies are compared."""

from __future__ import annotations

import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The points of a lateness curve."""


class Figures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Times in milliseconds unless they say otherwise. A figure that was not taken is None, never 0."""

    scheduled: int = 0
    """Tasks whose schedule was answered."""
    expected: int = 0
    """Firings that had to be: what was scheduled and not cancelled, each at its last time, within the cell's length."""
    fired: int = 0
    """Of those, how many there were."""
    lost: int | None = None
    """Of those, how many there were not."""
    duplicated: int | None = None
    """Firings beyond the first."""
    early: int | None = None
    """Firings before the time that was then in force."""
    revived: int | None = None
    """Firings after a cancel that was answered."""
    late: Sequence[float] = ()
    """Lateness at each of `SHARES`."""
    schedules_per_s: float | None = None
    client_cpu_pct: float | None = None
    """Of one processor, all of the strategy's own processes."""
    server_cpu_pct: float | None = None
    client_bytes_per_task: float | None = None
    """Growth of the resident memory of the strategy's own processes."""
    server_bytes_per_task: float | None = None
    threads: int | None = None
    """Of the strategy's own processes, at most."""
    trips_per_task: float | None = None
    """Messages to the servers from first to last, less those sent while nothing is due."""
    idle_trips_per_s: float | None = None
    """Messages to the servers while nothing is due."""
    verbs: Mapping[str, float | str] = {}
    """By verb: microseconds of a lone call (median), or why there is none."""
    counts: dict[str, float] = {}
    """Further counts of the strategy and the workload."""
    curve: Mapping[str, Mapping[str, float]] = {}
    """By operation and unit ("insert_ns", or "bytes" alone), by how many wait."""

    def late_at(self, share: float) -> float | None:
        """Lateness at one of `SHARES`; None if nothing fired."""
        return self.late[SHARES.index(share)] if self.late else None

    @property
    def done(self) -> int:
        """All firings of tasks that had to fire."""
        return self.fired + (self.duplicated or 0)

    @property
    def completed_per_s(self) -> float | None:
        """Firings a second from the time at which all are due, since some strategies take all out before the first."""
        return self.fired / self.most * 1000 if self.most else None

    @property
    def p50(self) -> float | None:
        return self.late_at(0.5)

    @property
    def p99(self) -> float | None:
        return self.late_at(0.99)

    @property
    def most(self) -> float | None:
        return self.late_at(1.0)


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """One line of the results file: one cell, measured or not."""

    strategy: str
    workload: str
    quick: bool
    minute: float
    version: str
    """bide's, and with it the lab's."""
    at: str
    """When, RFC 3339."""
    seconds: float
    figures: Figures | None = None
    why_not: str = ""
    """Why it was not measured."""
    machine: Mapping[str, Any] = {}

    @property
    def cell(self) -> tuple[str, str]:
        return self.strategy, self.workload

    @property
    def scale(self) -> tuple[bool, float]:
        """All that has to be the same for two figures to be comparable."""
        return self.quick, self.minute


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one workload, by which strategies are compared: see measures.toml."""

    name: str
    workload: str
    figure: str
    """The name of the figure; of the workload `verbs` that of the verb."""
    unit: str = ""
    head: str
    """The heading of its column."""
    title: str
    """Its words within a sentence: "lateness of half of the tasks"."""
    column: bool = False
    """It has a column in the table of each family."""
    more_is_better: bool = False
    counts_harm: bool = False
    """It counts things that went wrong."""

    @property
    def whose(self) -> str:
        """The processes that the cost is of."""
        return "servers" if "server" in self.name else "its processes"

    def of(self, seen: Figures) -> float | None:
        """Its value; None if it was not taken."""
        value = seen.verbs.get(self.figure) if self.workload == "verbs" else getattr(seen, self.figure)
        return None if isinstance(value, str) else value

    def better(self, one: float, other: float) -> bool:
        return one > other if self.more_is_better else one < other

    def words(self, value: float) -> str:
        return f"{figure(value)}{' ' if self.unit[:1].isalpha() else ''}{self.unit}"


def _measures() -> Mapping[str, Measure]:
    tables = tomllib.loads((files(__package__) / "measures.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **table}, Measure) for name, table in tables.items()}


MEASURES = _measures()
"""By name, in the order in which they are reported."""


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def figure(value: float) -> str:
    """Three digits that count, in groups of three.

    >>> figure(0.0012), figure(3.14159), figure(27182.8), figure(12.0), figure(0)
    ('0.0012', '3.14', '27,200', '12', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 100:
        digits = len(str(int(abs(value))))
        return f"{round(value, min(0, 3 - digits)):,.0f}" if value != int(value) or digits > 4 else f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if "e" in text else text
