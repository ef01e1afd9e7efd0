"""Throws input that nobody meant at everything that reads, and says what was found: see the package."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

from bide_proofs.fuzz.running import Outcome, Target, run
from bide_proofs.fuzz.targets import TARGETS
from bide_proofs.harness.command import parser_of


def main() -> int:
    parser = parser_of("fuzz", __doc__)
    parser.add_argument("--target", action="append", choices=[one.name for one in TARGETS], help="only this; again")
    parser.add_argument("--seconds", type=float, help="for all targets together; 60 unless --cases is given")
    parser.add_argument("--cases", type=int, help="of each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--case", type=int, help="only the case of this number, of one target")
    parser.add_argument("--results", type=Path, help="a file that a line of JSON of each target is appended to")
    parser.add_argument("--note", default="", help="said in each line")
    parser.add_argument("--list", action="store_true", help="what targets there are")
    given = parser.parse_args()
    targets = [one for one in TARGETS if given.target is None or one.name in given.target]
    if given.list:
        for one in targets:
            sys.stdout.write(f"{one.name:<12} {one.about}\n")
        return 0
    if given.case is not None and len(targets) != 1:
        parser.error("--case is of one --target")
    logging.disable(logging.CRITICAL)  # what is refused is told in the log too, thousands of times
    found = 0
    for target in targets:
        if target.needs and shutil.which(target.needs) is None:
            sys.stdout.write(f"{target.name:<12} not tried: there is no {target.needs} on this machine\n")
            continue
        outcome = _tried(target, given, sum(one.weight for one in targets))
        found += len(outcome.finds)
        sys.stdout.write(f"{target.name:<12} {outcome.cases:>9,} cases in {outcome.seconds:6.1f} s")
        sys.stdout.write(f", {len(outcome.finds)} found\n")
        if outcome.labels:
            sys.stdout.write(
                "  " + ", ".join(f"{label}: {number}" for label, number in outcome.labels.most_common()) + "\n"
            )
        for find in outcome.finds:
            sys.stdout.write(f"  {find.place}\n    case {find.case} of seed {outcome.seed}: {find.what}\n")
            sys.stdout.write(f"    {find.story}\n")
        sys.stdout.flush()
        if given.results is not None:
            with given.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_line(outcome, given.note), ensure_ascii=False) + "\n")
    return 1 if found else 0


def _tried(target: Target, given: argparse.Namespace, weights: float) -> Outcome:
    seconds = given.seconds
    if seconds is None and given.cases is None and given.case is None:
        seconds = 60.0
    if seconds is not None:
        seconds *= target.weight / weights
    cases, first = (1, given.case) if given.case is not None else (given.cases, 0)
    with tempfile.TemporaryDirectory(prefix=f"bide-fuzz-{target.name}-") as folder:
        return asyncio.run(run(target, Path(folder), seed=given.seed, cases=cases, seconds=seconds, first=first))


def _line(outcome: Outcome, note: str) -> dict[str, object]:
    return {
        "target": outcome.target,
        "cases": outcome.cases,
        "seconds": round(outcome.seconds, 1),
        "seed": outcome.seed,
        "found": [f"{find.place} (case {find.case})" for find in outcome.finds],
        "ended": dict(outcome.labels.most_common()),
        "note": note,
    }


if __name__ == "__main__":
    sys.exit(main())
