"""Compare the lab with `bide bench`: the same loads by both, in turns, and their medians.

    python bench/lab.py                                     memory and SQLite
    python bench/lab.py --redis redis://127.0.0.1:6379/0    and Redis; --postgres and --mysql likewise

`steady` of the lab is held against `bide bench --workload lateness` (200 tasks a second, 2 s ahead; counted from the
instant that the task was due at, as the lab counts), and `burst` against `--workload burst --n 5000` (when the last
one began). The exit code is 1 if a median of the two differs by more than 30 % and by more than 0.15 ms. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import click

from bide_lab.running import Cell, Run, measure
from bide_lab.strategies import catalogue
from bide_lab.workloads import WORKLOADS

_AGREES = 0.3
_NOISE = 0.15
"""Milliseconds by which two runs on an idle machine differ all the same."""
_STORES = {"memory": "memory:", "sqlite": "sqlite:"}
_KINDS = ("redis", "postgres", "mysql")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each load so often, in turns (3)")
    for kind in _KINDS:
        parser.add_argument(f"--{kind}", metavar="URL")
    given = parser.parse_args()
    urls = {kind: url for kind in _KINDS if (url := getattr(given, kind))}
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(given.rounds):
        for store, url in (_STORES | urls).items():
            sys.stderr.write(f"round {number + 1} of {given.rounds}: {store}\n")
            for figure, value in _by_bench(url).items():
                found[store, figure]["bench"].append(value)
            for figure, value in _by_lab(store, urls).items():
                found[store, figure]["lab"].append(value)
    good = True
    click.echo(f"{'store':<10}{'figure':<16}{'bench':>10}{'lab':>10}{'ratio':>8}")
    for (store, figure), sides in found.items():
        bench, lab = median(sides["bench"]), median(sides["lab"])
        agrees = abs(lab - bench) <= max(_NOISE, _AGREES * bench)
        good = good and agrees
        click.echo(
            f"{store:<10}{figure:<16}{bench:>10.2f}{lab:>10.2f}{lab / bench:>8.2f}{'' if agrees else '  differs'}"
        )
    return 0 if good else 1


def _by_bench(url: str) -> Mapping[str, float]:
    lateness, burst = _bench(url, "lateness"), _bench(url, "burst", "--n", "5000")
    return {
        "steady p50 ms": lateness["after_wake_p50_ms"],
        "steady p99 ms": lateness["after_wake_p99_ms"],
        "burst last ms": burst["last_ms"],
    }  # fmt: skip


def _bench(url: str, workload: str, *options: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bide", "bench", url, "--workload", workload, "--json", *options]
    said: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return said


def _by_lab(store: str, urls: Mapping[str, str]) -> Mapping[str, float]:
    run = Run(urls=urls, quick=False, minute=1.0)
    strategy = catalogue()[f"bide-{store}"]
    seen = {}
    for name in ("steady", "burst"):
        result = asyncio.run(measure(Cell(strategy, WORKLOADS[name]), run))
        if result.figures is None or result.figures.p50 is None:
            raise SystemExit(f"{strategy.name} {name}: {result.why_not}")
        seen[name] = result.figures
    steady, burst = seen["steady"], seen["burst"]
    assert steady.p50 is not None
    assert steady.p99 is not None
    assert burst.most is not None
    return {"steady p50 ms": steady.p50, "steady p99 ms": steady.p99, "burst last ms": burst.most}


if __name__ == "__main__":
    sys.exit(main())
