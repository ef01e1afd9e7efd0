"""A client process of a run: several callers on one app."""

from __future__ import annotations

import asyncio
import random

from bide.testing.history.recording import RecordedClient
from bide_proofs.torture.child import Child, main, ready
from bide_proofs.torture.load import CALLERS, Caller


async def _ask(child: Child, over: asyncio.Event) -> None:
    duty = child.duty
    if not await child.until_open(child.app.open, over):
        return
    ready()
    callers = [
        Caller(
            RecordedClient(child.app, child.journal, f"{duty.who}/{number}"), child.clock,
            random.Random(f"{duty.seed}/{number}"), duty.farthest,
        )
        for number in range(CALLERS)
    ]  # fmt: skip
    await asyncio.gather(*(caller.run(duty.rate / CALLERS, over) for caller in callers))
    await child.app.close()


if __name__ == "__main__":
    main(_ask)
