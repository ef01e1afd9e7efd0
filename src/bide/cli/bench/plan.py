"""What one run of a benchmark is to do, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from bide.cli.bench.place import Place


class Progress(Protocol):
    """Where a long run says how far it is."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def silent(what: str, done: int, total: int) -> None:
    """Says nothing."""


def unheard(figures: Mapping[str, Any]) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command, checked."""

    place: Place
    n: int | None = None
    """How many tasks; None is the workload's own default."""
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
    tell: Callable[[Mapping[str, Any]], None] = unheard
    """Where a run of minutes says how it goes, figure by figure."""

    @property
    def history(self) -> str:
        """Whether the history is "on" or "off": what is somebody else's is left as it was found."""
        return "on" if self.place.owned else "off"

    def count(self, default: int) -> int:
        return default if self.n is None else self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures, and what was found to be wrong: a run that has faults has no figures worth quoting."""

    fields: Mapping[str, Any]
    faults: Sequence[str] = field(default_factory=list)

    @property
    def all_faults(self) -> list[str]:
        """Also those that are figures: whatever was lost, delivered twice, or early."""
        counted = [
            f"{name} is {value}"
            for name, value in self.fields.items()
            if value and name.startswith(("lost", "duplicated", "early", "left_behind"))
        ]
        return [*counted, *self.faults]


def rounded(value: float) -> float:
    """Four digits that count: no figure here is better than that.

    >>> rounded(48123.4), rounded(0.123456), rounded(0.0)
    (48120.0, 0.1235, 0.0)
    """
    return float(f"{value:.4g}")


def per_second(rounds: Sequence[tuple[int, float]]) -> float:
    """The median rate of rounds, each (how many, seconds): one disturbed round changes nothing."""
    return rounded(median(count / max(seconds, 1e-9) for count, seconds in rounds))
