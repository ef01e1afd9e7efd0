"""`bide serve` as a child of a process group, on an app of the caller's making."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bide.app import Bide
from bide.core.instants import Millis
from bide.service import serving
from bide_proofs.harness.child import Parent, ready
from bide_proofs.servers.process import HOST

_LOOK = 0.02


async def serve(app: Bide, parent: Parent, port: int, config: str | None = None) -> None:
    """Serve, with the settings file `config`, until the parent tells us to end; it is told once we can be called."""
    drains: list[Callable[[str], object]] = []

    def begin(drain: Callable[[str], object], _: Millis) -> None:
        drains.append(drain)

    instance = asyncio.create_task(
        serving.serve(
            app, serving.config_of(config, (), ()), host=HOST, port=port, insecure=False, shown_store="", begin=begin
        )
    )
    while not instance.done() and not await _answers(port):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_LOOK)
    if not instance.done():
        ready()
    over = asyncio.create_task(parent.over.wait())
    await asyncio.wait([instance, over], return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    for drain in drains:
        drain("the parent is over")
    await instance


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True
