"""The table of mutants in docs/correctness.md: what was changed, and which seed finds it out."""

from __future__ import annotations

from pathlib import Path

from bide_proofs.simulate.mutants import MUTANTS
from bide_proofs.simulate.mutants.trial import written


def table(results: Path) -> str:
    """One row per mutant, in the order of the promises. Raises OSError, msgspec.ValidationError."""
    caught = written(results)
    lines = [
        "| promise | mutant | what was changed | where | first seed | of the first seeds | found as |",
        "|---|---|---|---|---|---|---|",
    ]
    for mutant in sorted(MUTANTS.values(), key=lambda one: int(one.promise[1:])):
        one = caught.get(mutant.name)
        how = "not caught | · | ·" if one is None else f"{one.seed} | {one.first} of {one.of} | {one.by}"
        where = f"`{mutant.where.removeprefix('bide.')}`"
        lines.append(f"| {mutant.promise} | `{mutant.name}` | {mutant.says} | {where} | {how} |")
    return "\n".join(lines) + "\n"
