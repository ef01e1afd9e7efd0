"""Simulate bide under faults, seed after seed, and judge each run: see the package."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from bide_proofs import simulate
from bide_proofs.harness.command import parser_of, positive, whole
from bide_proofs.simulate.judge import judged, shrunk, story
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.plan import Ask, plan_from, plan_of
from bide_proofs.simulate.world import play

_BLOCK = 20
"""The number of seeds that a process plays before it reports their results."""
_COUNTED = ("deliveries", "calls", "unknown", "faults", "undecided")


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
    """Play all requested seeds; return the exit code."""
    seeds = range(given.seed, given.seed + (given.seeds or round(given.hours * 60 / given.minutes)))
    right = _right(given.state)
    began, played, totals, wrong = time.monotonic(), 0, Counter[str](), list[int]()
    for one in _plays([seed for seed in seeds if seed not in right], given):
        played += 1
        totals.update({name: one[name] for name in _COUNTED})
        if given.state is not None:
            with given.state.open("a") as file:
                file.write(json.dumps(one) + "\n")
        if one["wrong"]:
            wrong.append(one["seed"])
            sys.stderr.write(f"seed {one['seed']}: {one['wrong'][0]}\n")
            if not given.go_on:
                break
    report = {
        "seeds": played,
        **{name: totals[name] for name in _COUNTED},
        "minutes": given.minutes,
        "virtual_hours": round(played * given.minutes / 60, 1),
        "seconds": round(time.monotonic() - began, 1),
        "wrong": len(wrong),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    if wrong and given.story:
        return _tell(plan_of(wrong[0], given.minutes).text())
    return 1 if wrong else 0


def _given() -> argparse.Namespace:
    parser = parser_of("bide_proofs.simulate", simulate.__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=whole, help="how many")
    parser.add_argument(
        "--hours", type=positive, default=1.0, help="virtual hours in all, unless --seeds says how many"
    )
    parser.add_argument("--minutes", type=positive, default=6.0, help="virtual minutes of each seed")
    parser.add_argument("--processes", type=whole, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, help="remember here what is done, and go on there")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first seed that is wrong")
    parser.add_argument("--no-story", dest="story", action="store_false", help="do not shrink what is wrong")
    parser.add_argument("--mutant", help="break bide in this way first; --mutant ? lists them")
    parser.add_argument("--plan", type=Path, help="play this plan, and tell its story")
    given = parser.parse_args()
    if given.mutant not in (None, "?", *MUTANTS):
        parser.error(f"--mutant: {given.mutant!r} is not accepted; give one of those that `--mutant ?` lists")
    return given


def _plays(seeds: Sequence[int], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the result of each seed as soon as its block is done."""
    play_one = partial(_played, minutes=given.minutes, mutant=given.mutant)
    if given.processes == 1 or len(seeds) <= _BLOCK:
        yield from map(play_one, seeds)
        return
    with ProcessPoolExecutor(given.processes, initializer=logging.disable) as pool:
        try:
            yield from pool.map(play_one, seeds, chunksize=_BLOCK)
        finally:
            pool.shutdown(cancel_futures=True)


def _played(seed: int, minutes: float, mutant: str | None) -> dict[str, Any]:
    """Play and judge one seed. The `mutant` is applied here too, since this may be a separate process."""
    plan = plan_of(seed, minutes)
    with applied(mutant) if mutant else nullcontext():
        played = play(plan)
    judgement = judged(plan, played)
    report = judgement.report
    return {
        "seed": seed, "deliveries": report.deliveries, "calls": report.calls, "unknown": report.unknown,
        "faults": sum(not isinstance(step, Ask) for step in plan.steps), "undecided": len(report.undecided),
        "wrong": [one.headline for one in judgement.wrong[:5]],
    }  # fmt: skip


def _right(state: Path | None) -> set[int]:
    """The seeds without violations in earlier runs."""
    if state is None or not state.exists():
        return set()
    return {one["seed"] for one in map(json.loads, state.read_text().splitlines()) if not one["wrong"]}


def _tell(text: str) -> int:
    """Print what is wrong with this plan, reduced to as few steps as possible."""
    plan = plan_from(text)
    wrong = judged(plan, play(plan)).wrong
    if not wrong:
        sys.stdout.write("nothing is wrong with this plan\n")
        return 0
    small, why = shrunk(plan, wrong[0])
    sys.stdout.write(f"{story(small, why)}\n\nthis plan, for --plan:\n{small.text()}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
