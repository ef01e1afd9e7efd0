"""Plays every mutant, seed after seed, until the judge finds it out; and keeps what came of it, a line for each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from bide.testing.history.report import Violation
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.plan import plan_of
from bide_proofs.simulate.world import play

FIRST = 20
"""So many seeds are played of each mutant in any case: how many of them catch it says how easily it is caught."""
_BLOCK = 10
"""Seeds that a process plays before it tells how they went, of a mutant that the first ones did not catch."""


class Caught(Struct, frozen=True):
    """How a mutant was found out."""

    name: str
    seed: int
    """The first that does."""
    by: str
    """The promise that the judge called broken then."""
    what: str
    """In the judge's words."""
    first: int
    """How many of the first so many seeds catch it."""
    of: int
    """So many."""


def wrongs(name: str, seed: int, minutes: float = 6) -> list[Violation]:
    """What the judge finds wrong with this seed of this mutant, which knows how long it plays.

    With no name: of bide as it is, in so many virtual minutes.
    """
    if not name:
        plan = plan_of(seed, minutes)
        return judged(plan, play(plan)).wrong
    plan = plan_of(seed, MUTANTS[name].minutes)
    with applied(name):
        try:
            played = play(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, bide as it is does not raise it
            return [Violation("defect", "", "", f"the play ended with {error!r}", [])]
    return judged(plan, played).wrong


def trial(names: Sequence[str], seeds: int, processes: int, first: int = FIRST) -> Iterator[tuple[str, Caught | None]]:
    """Each of these mutants, as soon as it is known: how it was caught; None: not within so many seeds.

    The `first` seeds are played of each in any case.
    """
    for name in names:
        MUTANTS[name].code()  # before the processes are forked
    with ProcessPoolExecutor(processes, initializer=logging.disable) as pool:
        found = pool.map(_block, names, [1] * len(names), [first] * len(names))
        left = []
        for name, seen in zip(names, found, strict=True):
            if seen:
                yield name, _caught(name, seen, len(seen), first)
            else:
                left.append(name)
        for name in left:
            yield name, _later(pool, name, seeds, processes, first)


def _later(pool: ProcessPoolExecutor, name: str, seeds: int, processes: int, first: int) -> Caught | None:
    for begin in range(first + 1, seeds + 1, _BLOCK * processes):
        blocks = range(begin, min(begin + _BLOCK * processes, seeds + 1), _BLOCK)
        seen = [
            one for found in pool.map(_block, [name] * len(blocks), blocks, [_BLOCK] * len(blocks)) for one in found
        ]
        if seen:
            return _caught(name, seen, 0, first)
    return None


def _caught(name: str, seen: Sequence[tuple[int, Violation]], first: int, of: int) -> Caught:
    seed, wrong = seen[0]
    return Caught(name, seed, wrong.promise, wrong.what, first, of)


def _block(name: str, begin: int, many: int) -> list[tuple[int, Violation]]:
    """Those of so many seeds that catch it, each with the first that is wrong."""
    return [(seed, wrong[0]) for seed in range(begin, begin + many) if (wrong := wrongs(name, seed))]


def written(path: Path) -> dict[str, Caught]:
    """What is on record. Raises OSError, msgspec.ValidationError."""
    lines = path.read_bytes().splitlines()
    return {one.name: one for one in (msgspec.json.decode(line, type=Caught) for line in lines)}


def write(path: Path, caught: Mapping[str, Caught]) -> None:
    """Put it on record, in the order of `MUTANTS`."""
    lines: Iterable[bytes] = (msgspec.json.encode(caught[name]) for name in MUTANTS if name in caught)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
