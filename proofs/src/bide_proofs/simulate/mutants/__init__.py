"""Builds of bide that are broken on purpose, each in one place: what the simulation has to catch.

A judge who finds nothing wrong has said something only if it does find what is wrong. So for every promise there are
mutants that break it, and `python -m bide_proofs.simulate.mutants` plays seed after seed of each until one shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

from bide.core.errors import BadInput
from bide_proofs.simulate.mutants.catalogue import OF_STORES, OF_THE_ENGINE, OF_THE_LIFECYCLE, Mutant

__all__ = ["MUTANTS", "Mutant", "applied"]

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {mutant.name: mutant for mutant in (*OF_THE_LIFECYCLE, *OF_STORES, *OF_THE_ENGINE)}
)
"""All of them, by name."""


def applied(name: str) -> AbstractContextManager[None]:
    """The program as this mutant of it, for as long as it lasts. Raises BadInput for a name that there is not."""
    if name not in MUTANTS:
        raise BadInput("mutant", name, f"one of {', '.join(MUTANTS)}")
    return MUTANTS[name].applied()
