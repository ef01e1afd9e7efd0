"""The figures of one cell: what the results file holds and every report is drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
    completed_per_s: float | None = None
    """First firings, from the first to the last of a burst."""
    schedules_per_s: float | None = None
    client_cpu_pct: float | None = None
    """Of one processor, all of the strategy's own processes."""
    server_cpu_pct: float | None = None
    client_bytes_per_task: float | None = None
    """What resident memory of the strategy's own processes grew by."""
    server_bytes_per_task: float | None = None
    threads: int | None = None
    """Of the strategy's own processes, at most."""
    trips_per_task: float | None = None
    """Messages to the servers from first to last, less what is asked while nothing is due."""
    idle_trips_per_s: float | None = None
    """Messages to the servers while nothing is due."""
    verbs: Mapping[str, float | str] = {}
    """By verb: microseconds of a lone call (median), or why there is none."""
    counts: Mapping[str, float] = {}
    """What the strategy and the workload counted besides."""
    curve: Mapping[str, Mapping[str, float]] = {}
    """By operation, by how many wait: nanoseconds or bytes, as the name of the operation says."""

    def late_at(self, share: float) -> float | None:
        """Lateness at one of `SHARES`; None if nothing fired."""
        return self.late[SHARES.index(share)] if self.late else None

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
