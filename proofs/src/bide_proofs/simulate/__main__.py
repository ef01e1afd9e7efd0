"""Simulates bide under faults, seed after seed, and judges what came of it: see the package."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

from bide_proofs.harness.command import parser_of
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.plan import Ask, plan_from, plan_of
from bide_proofs.simulate.shrink import shrunk
from bide_proofs.simulate.story import story
from bide_proofs.simulate.world import play

_BLOCK = 20
"""Seeds that a process plays before it tells how they went."""
_COUNTED = ("seeds", "deliveries", "calls", "unknown", "faults", "undecided")


def main() -> int:
    given = _given()
    logging.disable()
    if given.mutant == "?":
        for name, mutant in sorted(MUTANTS.items()):
            sys.stdout.write(f"{name}: {mutant.promise}: {mutant.says}\n")
        return 0
    with applied(given.mutant) if given.mutant else nullcontext():
        return _tell(given.plan.read_text()) if given.plan is not None else _run(given)


def _run(given: argparse.Namespace) -> int:
    """All the seeds that are asked for."""
    seeds = range(given.seed, given.seed + (given.seeds or round(given.hours * 60 / given.minutes)))
    done = _done(given.state)
    began = time.monotonic()
    totals = dict.fromkeys(_COUNTED, 0)
    wrong: list[dict[str, Any]] = []
    for block in _blocks([seed for seed in seeds if seed not in done], given):
        for name in totals:
            totals[name] += block[name]
        wrong += block["wrong"]
        if given.state is not None:
            with given.state.open("a") as file:
                file.write(json.dumps(block) + "\n")
        for one in block["wrong"]:
            sys.stderr.write(f"seed {one['seed']}: {one['what'][0]}\n")
        if wrong and not given.go_on:
            break
    report = {
        **totals,
        "minutes": given.minutes,
        "virtual_hours": round(totals["seeds"] * given.minutes / 60, 1),
        "seconds": round(time.monotonic() - began, 1),
        "wrong": len(wrong),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    if wrong and given.story:
        return _tell(plan_of(wrong[0]["seed"], given.minutes).text())
    return 1 if wrong else 0


def _given() -> argparse.Namespace:
    parser = parser_of("simulate", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours in all, unless --seeds says how many")
    parser.add_argument("--minutes", type=float, default=6.0, help="virtual minutes of each seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, help="remember here what is done, and go on there")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first seed that is wrong")
    parser.add_argument("--no-story", dest="story", action="store_false", help="do not shrink what is wrong")
    parser.add_argument("--mutant", help="break bide in this way first; --mutant ? lists them")
    parser.add_argument("--plan", type=Path, help="play this plan, and tell its story")
    given = parser.parse_args()
    if given.mutant not in (None, "?", *MUTANTS):
        parser.error(f"--mutant: {given.mutant!r} is not accepted; give one of those that `--mutant ?` lists")
    for name in ("minutes", "hours", "processes"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name}: {getattr(given, name)} is not accepted; give a number above 0")
    return given


def _blocks(seeds: list[int], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Told as they are done."""
    parts = [seeds[first : first + _BLOCK] for first in range(0, len(seeds), _BLOCK)]
    if given.processes == 1 or len(parts) < 2:
        yield from (_played(part, given.minutes, None) for part in parts)
        return
    with ProcessPoolExecutor(given.processes) as pool:
        try:
            yield from pool.map(_played, parts, repeat(given.minutes), repeat(given.mutant))
        finally:
            pool.shutdown(cancel_futures=True)


def _played(seeds: Iterable[int], minutes: float, mutant: str | None) -> dict[str, Any]:
    """How these seeds went. `mutant`: to be applied here, in a process of its own."""
    logging.disable()
    if mutant is not None:
        with applied(mutant):
            return _played(seeds, minutes, None)
    block: dict[str, Any] = {"done": [], "wrong": [], **dict.fromkeys(_COUNTED, 0)}
    for seed in seeds:
        plan = plan_of(seed, minutes)
        played = play(plan)
        judgement = judged(plan, played)
        report = judgement.report
        block["seeds"] += 1
        block["done"].append(seed)
        block["deliveries"] += report.deliveries
        block["calls"] += report.calls
        block["unknown"] += report.unknown
        block["undecided"] += len(report.undecided)
        block["faults"] += sum(not isinstance(step, Ask) for step in plan.steps)
        if judgement.wrong:
            block["wrong"].append({"seed": seed, "what": [one.headline for one in judgement.wrong[:5]]})
    return block


def _done(state: Path | None) -> set[int]:
    """The seeds that were right before."""
    if state is None or not state.exists():
        return set()
    blocks = [json.loads(line) for line in state.read_text().splitlines()]
    return {seed for block in blocks for seed in block["done"]} - {
        one["seed"] for block in blocks for one in block["wrong"]
    }


def _tell(text: str) -> int:
    """What is wrong with this plan, with as few steps as show it."""
    plan = plan_from(text)
    wrong = judged(plan, play(plan)).wrong
    if not wrong:
        sys.stdout.write("nothing is wrong with this plan\n")
        return 0
    small = shrunk(plan, wrong[0])
    sys.stdout.write(story(small.plan, small.wrong) + "\n")
    sys.stdout.write(f"\nthis plan, for --plan:\n{small.plan.text()}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
