"""The command: which workloads of the service, and how the figures are shown."""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

from bench.command import Figure, Found, parser, positive, print_line, run, say, show_table, whole
from bench.http_workloads import WORKLOADS, Plan

from bide.cli.bench.processes import BenchFault
from bide.core.errors import BideError

_PROG = "bench/http.py"


def main(about: str | None) -> int:
    """Run it; the exit code: 1 if a figure may not be believed or a bar is not met."""
    made = parser(_PROG, about)
    add = made.add_argument
    add("store", nargs="?", default="sqlite:", metavar="STORE_URL",
        help="sqlite: (a file of its own), redis://host:port/0 (a namespace of its own), ...; (sqlite:)")  # fmt: skip
    add("--only", action="append", choices=list(WORKLOADS), help="may be given several times; default: all")
    add("--seconds", type=positive, default=20, help="for so long, each but webhooks (20)")
    add("--rate", type=positive, default=200, help="long_poll, hanging: tasks a second (200)")
    add("--n", type=whole, default=20_000, help="webhooks: tasks (20000)")
    add("--polls", type=whole, default=1_000, help="idle_polls: long-polls (1000)")
    add("--tasks", type=whole, default=1_000_000, help="console: so many wait (1000000)")
    add("--rounds", type=whole, default=1, help="each workload so often, in turns (1)")
    add("--uvloop", action="store_true", help="the service runs on uvloop")
    return run(_PROG, _measure(made.parse_args()))


async def _measure(given: argparse.Namespace) -> int:
    _raise_open_files()
    good, rows = True, []
    with tempfile.TemporaryDirectory(prefix="bide-http-", ignore_cleanup_errors=True) as folder:
        plan = Plan(
            store=given.store, seconds=given.seconds, rate=given.rate, n=given.n, polls=given.polls,
            tasks=given.tasks, uvloop=given.uvloop, folder=Path(folder),
        )  # fmt: skip
        for number in range(given.rounds):
            for name in given.only or list(WORKLOADS):
                say(f"{name}: round {number + 1} of {given.rounds}")
                try:
                    found = await WORKLOADS[name](plan)
                except (BenchFault, BideError) as fault:
                    found = Found(faults=[f"not measured: {fault}"])
                for text in found.faults:
                    say(f"{_PROG}: {name}: {text}")
                for figure in found.figures:
                    _print(given, name, number + 1, figure, found)
                    verdict = "faults" if found.faults else ("met" if figure.met else "not met") if figure.bar else ""
                    rows.append((name, figure.name, figure.shown, figure.bar, verdict))
                good = good and found.good
    show_table("bide serve", ("workload", "figure", "value", "bar", ""), rows, right=("value",))
    return 0 if good else 1


def _raise_open_files() -> None:
    """As many open files as are allowed: a thousand connections need more than what is usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _print(given: argparse.Namespace, name: str, number: int, figure: Figure, found: Found) -> None:
    barred = {"bar": figure.bar, "met": figure.met} if figure.bar else {}
    print_line(
        workload=name, figure=figure.name, value=figure.value, **barred, faults=found.faults, round=number,
        store=given.store.partition(":")[0], seconds=given.seconds, loop="uvloop" if given.uvloop else "asyncio",
    )  # fmt: skip
