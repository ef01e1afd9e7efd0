"""The common part of the commands of this folder: options, how they end, and how figures are shown."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bide.cli.bench.plan import machine, rounded
from bide.cli.bench.processes import BenchFault
from bide.core.errors import BideError


def parser(prog: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip


def whole(text: str) -> int:
    """The value of an option. Raises ArgumentTypeError."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("give a whole number above 0")
    return number


def positive(text: str) -> float:
    """The value of an option. Raises ArgumentTypeError."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("give a number above 0")
    return number


def say(text: str) -> None:
    """Progress, beside the outcome."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def run(prog: str, measuring: Coroutine[Any, Any, int]) -> int:
    """The exit code; SIGTERM ends it as Ctrl-C does."""

    async def cancelled_by_signals() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await measuring

    try:
        return asyncio.run(cancelled_by_signals())
    except (BenchFault, BideError) as fault:
        say(f"{prog}: {fault}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"{prog}: stopped")
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
        return f"{self.value:,.0f}" if abs(self.value) >= 1_000 else f"{self.value:,.4g}"


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


def print_line(**fields: Any) -> None:
    """A figure as a line of JSON."""
    sys.stdout.write(msgspec.json.encode(fields | machine()).decode() + "\n")
    sys.stdout.flush()


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
