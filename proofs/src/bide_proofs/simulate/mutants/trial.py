"""Plays a mutant, seed after seed, until the judge finds it out; and what is on record of that, a line for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from bide.testing.history.report import Violation
from bide_proofs.harness.command import markdown_table
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.plan import plan_of
from bide_proofs.simulate.world import play

FIRST = 20
"""So many seeds are played of each mutant in any case: how many of them catch it says how easily it is caught."""


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
    """The judge's findings on this seed of this mutant, which knows how long it plays.

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


def trial(name: str, seeds: int, first: int = FIRST) -> Caught | None:
    """How this mutant is caught; None: not within so many seeds. The `first` of them are played in any case."""
    seen: list[tuple[int, Violation]] = []
    for seed in range(1, seeds + 1):
        if seed > first and seen:
            break
        if wrong := wrongs(name, seed):
            seen.append((seed, wrong[0]))
    if not seen:
        return None
    seed, violation = seen[0]
    return Caught(name, seed, violation.promise, violation.what, sum(one <= first for one, _ in seen), first)


def written(path: Path) -> dict[str, Caught]:
    """The catches on record. Raises OSError, msgspec.ValidationError."""
    lines = path.read_bytes().splitlines()
    return {one.name: one for one in (msgspec.json.decode(line, type=Caught) for line in lines)}


def write(path: Path, caught: Mapping[str, Caught]) -> None:
    """Put it on record, in the order of `MUTANTS`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(caught[name]) + b"\n" for name in MUTANTS if name in caught))


def table(results: Path) -> str:
    """The table of docs/correctness.md, in the order of the promises. Raises OSError, msgspec.ValidationError."""
    caught, rows = written(results), []
    for mutant in sorted(MUTANTS.values(), key=lambda one: int(one.promise[1:])):
        one = caught.get(mutant.name)
        how = ("not caught", "·", "·") if one is None else (f"{one.seed}", f"{one.first} of {one.of}", one.by)
        where = f"`{mutant.where.replace(':', '.').removeprefix('bide.')}`"
        rows.append([mutant.promise, f"`{mutant.name}`", mutant.says, where, *how])
    heads = ["promise", "mutant", "what was changed", "where", "first seed", "of the first seeds", "found as"]
    return markdown_table(heads, rows) + "\n"
