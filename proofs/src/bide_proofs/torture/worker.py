"""A worker process of a run: works on all topics until it is told to end, or worse."""

from __future__ import annotations

from bide_proofs.harness.child import Parent, ready
from bide_proofs.torture.child import Actor, main
from bide_proofs.torture.topics import handle


async def _work(actor: Actor, parent: Parent) -> None:
    handle(actor.app, actor.chance)
    worker = actor.app.worker()
    if await actor.until_open(worker.__aenter__, parent.over):
        try:
            ready()
            await parent.over.wait()
        finally:
            await worker.__aexit__()


if __name__ == "__main__":
    main(_work)
