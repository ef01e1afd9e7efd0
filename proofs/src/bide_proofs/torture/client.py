"""A client process of a run: several callers on one app."""

from __future__ import annotations

import asyncio
import random

from bide.testing.history.recording import RecordedClient
from bide_proofs.harness.child import Parent, ready
from bide_proofs.torture.child import Actor, main
from bide_proofs.torture.load import CALLERS, Caller


async def _ask(actor: Actor, parent: Parent) -> None:
    spec = actor.spec
    if not await actor.until_open(actor.app.open, parent.over):
        return
    ready()
    callers = [
        Caller(
            RecordedClient(actor.app, actor.journal, f"{spec.name}/{number}"), actor.clock,
            random.Random(f"{spec.seed}/{number}"), spec.farthest,
        )
        for number in range(CALLERS)
    ]  # fmt: skip
    await asyncio.gather(*(caller.run(spec.rate / CALLERS, parent.over) for caller in callers))
    await actor.app.close()


if __name__ == "__main__":
    main(_ask)
