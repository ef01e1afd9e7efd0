"""One instance of `bide serve`, which writes down what it leases, settles and posts."""

from __future__ import annotations

import os

import msgspec

from bide_proofs.harness.child import Parent
from bide_proofs.harness.service import serve
from bide_proofs.torture.child import Actor, main

GIVEN = "KILL_SERVICE"
"""The variable of the environment that holds `Given`, as JSON."""


class Given(msgspec.Struct, frozen=True):
    """The settings of all instances."""

    ports: list[int]
    """By slot."""
    config: str


async def _serve(actor: Actor, parent: Parent) -> None:
    given = msgspec.json.decode(os.environ[GIVEN], type=Given)
    slot = int(actor.spec.name.partition("-")[2].partition(".")[0])
    await serve(actor.app, parent, given.ports[slot], given.config)


if __name__ == "__main__":
    main(_serve)
