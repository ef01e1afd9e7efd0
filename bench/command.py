"""The common part of the commands of this folder: how they end, and how figures are shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bide.core.errors import BideError
from bide_bench.plan import rounded
from bide_bench.processes import BenchFault
from bide_proofs.harness.command import progress, run_until_terminated
from bide_proofs.servers.process import ServerFailed, ServerMissing

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the project, in which the commands are run."""
FAULTS = (BenchFault, BideError, ServerFailed, ServerMissing)
"""The reasons for which a command, or one of its workloads, cannot go on."""


def run(prog: str, measuring: Coroutine[Any, Any, int]) -> int:
    """The exit code; SIGTERM ends it as Ctrl-C does."""
    try:
        return run_until_terminated(measuring)
    except FAULTS as fault:
        progress(f"{prog}: {fault}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        progress(f"{prog}: stopped")
        return 130


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and the bar that it should reach; without one it is told for its own sake."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def bar(self) -> str:
        if self.least is not None:
            return f">= {self.least:,.10g}"
        return "" if self.most is None else f"<= {self.most:,.10g}"

    @property
    def shown(self) -> str:
        return digits(self.value)


@dataclass(slots=True)
class Found:
    """The figures and faults of one run of a workload. A run with faults has no figures worth quoting."""

    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.faults and all(figure.met for figure in self.figures)

    def add(self, name: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        self.figures.append(Figure(name, rounded(value), least, most))

    def check(self, what: str, count: int, example: str = "") -> None:
        """`count` must be 0."""
        if count:
            self.faults.append(f"{what}: {count}{f', such as {example}' if example else ''}")


def digits(value: float | None) -> str:
    """Four digits that count.

    >>> digits(48120.0), digits(3.14159), digits(None), digits(0.0)
    ('48,120', '3.142', '-', '0')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:.4g}"


def show_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str], for_programs: bool = True
) -> None:
    """For people; on stderr where there are lines `for_programs` on stdout. Nothing without rows."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right" if column.header in right else "left"
    for row in rows:
        table.add_row(*row)
    if table.rows:
        width = None if (sys.stderr if for_programs else sys.stdout).isatty() else 120
        Console(stderr=for_programs, highlight=False, width=width).print(table)
