"""Play mutants of bide, seed after seed, until the judge catches each of them, and record the seed."""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from bide_proofs.harness.command import parser_of, whole
from bide_proofs.simulate import mutants
from bide_proofs.simulate.mutants import MUTANTS
from bide_proofs.simulate.mutants.trial import FIRST, Caught, trial, write, written


def main() -> int:
    parser = parser_of("bide_proofs.simulate.mutants", mutants.__doc__)
    parser.add_argument("--seeds", type=whole, default=1_000, help="so many seeds may a mutant last")
    parser.add_argument("--first", type=whole, default=FIRST, help="so many seeds are played of each in any case")
    parser.add_argument("--only", action="append", metavar="NAME", choices=MUTANTS, help="this mutant; may be repeated")
    parser.add_argument("--results", type=Path, help="where it is written down, a line for each mutant")
    parser.add_argument("--processes", type=whole, default=os.cpu_count() or 1)
    given = parser.parse_args()
    logging.disable()
    names = given.only or list(MUTANTS)
    known: dict[str, Caught] = {}
    if given.results is not None and given.only and given.results.exists():
        known = written(given.results)
    began, missed = time.monotonic(), 0
    for name in names:
        MUTANTS[name].code()  # before the processes are forked
    with ProcessPoolExecutor(given.processes, initializer=logging.disable) as pool:
        found = pool.map(trial, names, repeat(given.seeds), repeat(given.first))
        for name, caught in zip(names, found, strict=True):
            known.pop(name, None)
            if caught is None:
                missed += 1
                sys.stdout.write(f"{name}: NOT CAUGHT within {given.seeds} seeds\n")
            else:
                known[name] = caught
                many = f"{caught.first} of the first {caught.of} seeds catch it"
                sys.stdout.write(f"{name}: caught by seed {caught.seed}, as {caught.by}: {caught.what} ({many})\n")
            sys.stdout.flush()
            if given.results is not None:
                write(given.results, known)
    sys.stdout.write(f"{len(names) - missed} of {len(names)} mutants caught, in {time.monotonic() - began:.0f} s\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
