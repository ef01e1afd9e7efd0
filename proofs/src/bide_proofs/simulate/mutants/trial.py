"""Play a mutant, seed after seed, until the judge catches it. Read and write the record of catches, a line for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from bide.testing.history.report import Violation
from bide_proofs.harness.command import markdown_table
from bide_proofs.simulate import recurring
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.mutants import MUTANTS, applied
from bide_proofs.simulate.plan import plan_of
from bide_proofs.simulate.world import play

FIRST = 20
"""The number of seeds always played of each mutant: the number that catch it shows how easily it is caught."""


class Caught(Struct, frozen=True):
    """The record of a caught mutant."""

    name: str
    seed: int
    """The first seed that catches it."""
    by: str
    """The promise that the judge found broken with that seed."""
    what: str
    """The judge's sentence."""
    first: int
    """The number of the first `of` seeds that catch it."""
    of: int
    """The number of seeds that are always played."""


def wrongs(name: str, seed: int, minutes: float = 6) -> list[Violation]:
    """The judge's findings on this seed of this mutant, which sets the length of its play.

    With an empty name, bide itself is played, for `minutes` virtual minutes.
    """
    if not name:
        plan = plan_of(seed, minutes)
        return judged(plan, play(plan)).wrong
    if MUTANTS[name].recurring:
        promise = MUTANTS[name].promise
        return [Violation(promise, "", "", what, []) for what in recurring.wrongs(seed, name)]
    plan = plan_of(seed, MUTANTS[name].minutes)
    with applied(name):
        try:
            played = play(plan)
        except Exception as error:  # noqa: BLE001 - without the mutant, bide raises no error here
            return [Violation("defect", "", "", f"the play ended with {error!r}", [])]
    return judged(plan, played).wrong


def trial(name: str, seeds: int, first: int = FIRST) -> Caught | None:
    """Play up to `seeds` seeds of this mutant; None if none catches it. The `first` of them are always played."""
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
    """Read the recorded catches, by name. Raises OSError, msgspec.ValidationError."""
    lines = path.read_bytes().splitlines()
    return {one.name: one for one in (msgspec.json.decode(line, type=Caught) for line in lines)}


def write(path: Path, caught: Mapping[str, Caught]) -> None:
    """Record the catches, in the order of `MUTANTS`."""
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
