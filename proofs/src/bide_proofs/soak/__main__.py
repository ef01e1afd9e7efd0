"""Works a store for a long time, and looks whether anything grows: see the package."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from bide.cli.bench.place import place_of
from bide.cli.bench.workers import BenchFault
from bide.core.errors import BadInput
from bide_proofs.soak.crew import ALLOCATOR
from bide_proofs.soak.run import Soak
from bide_proofs.trial import WrongByKind, not_in_memory, parser_of, tried


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """One run on the store that is given; the report, and what was wrong."""
    with place_of(given.url) as place:
        if not place.owned:
            raise BadInput("url", place.kind, "a store without anything in it, or a server, where a part is made")
        soak = Soak(given, place, folder, _say)
        try:
            report = await soak.go()
        except BenchFault as fault:
            raise SystemExit(str(fault)) from None
    if given.results:
        with given.results.open("ab") as file:
            file.write(msgspec.json.encode(report) + b"\n")
    return report, soak.wrong


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("url", help='a store that several processes can share; "sqlite:" is a file of its own')
    parser.add_argument("--minutes", type=_above_zero, default=15.0, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=_above_zero, help="tasks a second; half of the maximum if not given")
    parser.add_argument("--soon", type=_above_zero, default=4.0, help="seconds within which most tasks are due")
    parser.add_argument("--measure", type=_above_zero, default=15.0, help="seconds in which the maximum is measured")
    parser.add_argument("--workers", type=int, choices=range(1, 9), default=1, help="worker processes")
    parser.add_argument("--service", action="store_true", help="all reach the store through a `bide serve`")
    parser.add_argument("--every", type=_above_zero, default=5.0, help="seconds from one look to the next")
    parser.add_argument("--results", type=Path, help="a file to which the report is added, as one line of JSON")
    parser.add_argument("--samples", type=Path, help="a file to which each look is added, as one line of JSON")
    parser.add_argument("--leak", type=int, default=0, help="bytes that handlers keep of each task: must be found")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    not_in_memory(parser, given.url)
    return tried("soak", lambda folder: run(given, folder))


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


if __name__ == "__main__":
    if not ALLOCATOR.keys() <= os.environ.keys():  # it counts from the start of a process alone
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ALLOCATOR, **os.environ})
    sys.exit(main())
