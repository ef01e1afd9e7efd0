"""One instance of `bide serve`, which records its leases, settles and posts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from bide.service import serving
from bide_proofs.harness.processes import ready
from bide_proofs.servers.process import HOST, listens, until
from bide_proofs.torture.child import Actor, main

PORTS, CONFIG = "KILL_SERVICE_PORTS", "KILL_SERVICE_CONFIG"
"""Environment variables: the ports of all instances, by slot, and the file with their settings."""


async def _serve(actor: Actor, over: asyncio.Task[None]) -> None:
    """Report ready once the instance accepts calls, and serve until the parent asks this process to end."""
    port = int(os.environ[PORTS].split()[int(actor.spec.name.partition("-")[2].partition(".")[0])])
    drains: list[Callable[[str], object]] = []
    config = serving.config_of(os.environ[CONFIG], (), ())
    instance = asyncio.create_task(
        serving.serve(
            actor.app, config, host=HOST, port=port, insecure=False, shown_store="",
            begin=lambda drain, _: drains.append(drain),
        )
    )  # fmt: skip
    await asyncio.to_thread(until, lambda: instance.done() or listens(port), "the instance to listen")
    if not instance.done():
        ready()
    await asyncio.wait([instance, over], return_when=asyncio.FIRST_COMPLETED)
    for drain in drains:
        drain("the parent is over")
    await instance


if __name__ == "__main__":
    main(_serve)
