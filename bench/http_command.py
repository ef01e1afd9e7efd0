"""The command: which workloads, and how the figures are shown."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from bench.http_processes import HttpFault, has_wrk
from bench.http_workloads import WORKLOADS, Figure, Found, Plan

from bide._version import __version__
from bide.core.errors import BideError

_NEED_WRK = ("single", "batch")


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bench/http.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("store", nargs="?", default="sqlite:", metavar="STORE_URL",
        help="sqlite: (a file of its own), redis://host:port/0 (a namespace of its own), ...; (sqlite:)")  # fmt: skip
    add("--only", action="append", choices=list(WORKLOADS), help="may be given several times; default: all")
    add("--seconds", type=_positive, default=20, help="for so long, each but webhooks (20)")
    add("--rate", type=_positive, default=200, help="long_poll, hanging: tasks a second (200)")
    add("--n", type=_positive_whole, default=20_000, help="webhooks: tasks (20000)")
    add("--polls", type=_positive_whole, default=1_000, help="idle_polls: long-polls (1000)")
    add("--rounds", type=_positive_whole, default=1, help="each workload so often, in turns (1)")
    add("--uvloop", action="store_true", help="the service runs on uvloop")
    return made


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("give a number above 0")
    return number


def _positive_whole(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("give a whole number above 0")
    return number


def main(about: str | None) -> int:
    """Run it; the exit code: 1 if a figure may not be believed or a bar is not met."""
    given = parser(about).parse_args()
    try:
        return asyncio.run(_measure(given))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("bench/http.py: stopped")
        return 130


def say(text: str) -> None:
    """Progress, beside the outcome."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


async def _measure(given: argparse.Namespace) -> int:
    names = given.only or list(WORKLOADS)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    _raise_open_files()
    good, rows = True, []
    with tempfile.TemporaryDirectory(prefix="bide-http-", ignore_cleanup_errors=True) as folder:
        plan = Plan(
            store=given.store, seconds=given.seconds, rate=given.rate, n=given.n, polls=given.polls,
            uvloop=given.uvloop, folder=Path(folder), say=say,
        )  # fmt: skip
        for number in range(given.rounds):
            for name in names:
                say(f"{name}: round {number + 1} of {given.rounds}")
                try:
                    if name in _NEED_WRK and not has_wrk():
                        raise HttpFault("wrk is not installed; on Debian: apt-get install wrk")
                    found = await WORKLOADS[name](plan)
                except (HttpFault, BideError) as fault:
                    found = Found(faults=[f"not measured: {fault}"])
                for fault_text in found.faults:
                    say(f"bench/http.py: {name}: {fault_text}")
                for figure in found.figures:
                    _print(given, name, number + 1, figure, found)
                    rows.append((name, figure, found))
                met = all(one.bar is None or one.bar.met(one.value) for one in found.figures)
                good = good and met and not found.faults
    _show_table(rows)
    return 0 if good else 1


def _raise_open_files() -> None:
    """As many open files as are allowed: a thousand connections need more than what is usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _print(given: argparse.Namespace, name: str, number: int, figure: Figure, found: Found) -> None:
    line: dict[str, Any] = {"workload": name, "figure": figure.name, "value": figure.value}
    if figure.bar is not None:
        line |= {"bar": str(figure.bar), "met": figure.bar.met(figure.value)}
    line |= {
        "faults": found.faults, "round": number, "store": given.store.partition(":")[0], "seconds": given.seconds,
        "loop": "uvloop" if given.uvloop else "asyncio", "version": __version__,
        "python": platform.python_version(), "cpus": os.cpu_count() or 1,
    }  # fmt: skip
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _show_table(rows: list[tuple[str, Figure, Found]]) -> None:
    """For people, so beside the lines for programs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("workload", "figure", "", "bar", "", title="bide serve", title_justify="left")
    table.columns[2].justify = "right"
    for name, figure, found in rows:
        met = "" if figure.bar is None else "met" if figure.bar.met(figure.value) else "not met"
        shown = f"{figure.value:,.0f}" if abs(figure.value) >= 1_000 else f"{figure.value:,.4g}"
        bar = "" if figure.bar is None else str(figure.bar)
        table.add_row(name, figure.name, shown, bar, "faults" if found.faults else met)
    if rows:
        Console(stderr=True, highlight=False).print(table)
