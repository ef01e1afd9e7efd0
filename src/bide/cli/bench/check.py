"""The self-check: what was lost, delivered twice or early, from what the workers wrote down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bide.cli.bench.worker import Settled, Start

NANOSECONDS = 1_000_000
"""In a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run really did. Times in nanoseconds since the epoch, lateness in milliseconds."""

    lost: int
    """Expected, and no worker has an acknowledged settle of it."""
    duplicated: int
    """Started again after its settle was acknowledged."""
    redelivered: int
    """Started again before that: only a crash may cause it."""
    early: int
    """Started before the time that it was leased for, or before the caller's own reckoning of it."""
    first_start: int = 0
    last_start: int = 0
    last_settled: int = 0
    lateness: Sequence[float] = field(default_factory=list)
    """Of every start, sorted: when the handler began, less the instant before which the caller did not want it."""
    after_wake: Sequence[float] = field(default_factory=list)
    """The same, less the `wake_at` that it was leased for: a whole millisecond, and never before that instant."""

    def faults(self, *, crash: bool = False) -> list[str]:
        """What is wrong beyond the counted fields."""
        faults = [f"{self.early} deliveries began too early"] if self.early else []
        if self.redelivered and not crash:
            faults.append(f"{self.redelivered} deliveries were repeated before they were settled, and nothing crashed")
        return faults


def examine(expected: Mapping[str, int], starts: Iterable[Start], settles: Iterable[Settled]) -> Findings:
    """Hold what was done against `expected`: each key, with the nanosecond before which it must not start.

    Keys that are not expected (another run's, on a shared store) are passed over.
    """
    settled: dict[str, int] = {}
    for settle in settles:
        if settle.key in expected:
            settled[settle.key] = min(settle.at, settled.get(settle.key, settle.at))
    seen: set[str] = set()
    duplicated = redelivered = early = 0
    ordered = sorted((start for start in starts if start.key in expected), key=lambda start: start.at)
    lateness: list[float] = []
    after_wake: list[float] = []
    for start in ordered:
        lateness.append((start.at - expected[start.key]) / NANOSECONDS)
        after_wake.append(start.at / NANOSECONDS - start.planned_at)
        if start.at < max(start.planned_at * NANOSECONDS, expected[start.key]):
            early += 1
        if start.key in seen:
            if start.at > settled.get(start.key, start.at):
                duplicated += 1
            else:
                redelivered += 1
        seen.add(start.key)
    return Findings(
        lost=sum(1 for key in expected if key not in settled),
        duplicated=duplicated,
        redelivered=redelivered,
        early=early,
        first_start=ordered[0].at if ordered else 0,
        last_start=ordered[-1].at if ordered else 0,
        last_settled=max(settled.values(), default=0),
        lateness=sorted(lateness),
        after_wake=sorted(after_wake),
    )
