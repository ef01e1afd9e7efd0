"""A worker process of a run: works on all topics until it is told to end, or worse."""

from __future__ import annotations

import asyncio

from bide_proofs.torture.child import Child, main, ready
from bide_proofs.torture.topics import handle


async def _work(child: Child, over: asyncio.Event) -> None:
    app = child.app
    handle(app, child.chance)
    worker = app.worker()
    if await child.until_open(worker.__aenter__, over):
        try:
            ready()
            await over.wait()
        finally:
            await worker.__aexit__()


if __name__ == "__main__":
    main(_work)
