"""One Redis server behind one proxy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.private import PrivateServer
from bide_proofs.torture.servers.processes import HOST
from bide_proofs.torture.servers.redis_node import DURABILITY, MAXMEMORY, Asking, RedisNode

_FULL = (1.0, 4.0)
_ROOM = (-200_000, 0, 20_000)
"""Bytes of memory that are left to a server that is full, or will be in a moment; fewer than none, and nothing is taken
until some of what is there is done."""
_CROWDED = (0.5, 2.0)

Masters = Callable[[], Awaitable[Sequence[RedisNode]]]


class RedisServer(PrivateServer):
    """Redis, alone."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.node = RedisNode("the server", folder / "server", self._clock)
        self.direct = f"redis://{HOST}:{self.node.port}/0"
        self.proxies = (self.node.proxy,)
        self._version = ""

    async def _start(self) -> None:
        await self.node.prepare()
        await self.node.start()
        self.urls = (f"redis://{HOST}:{self.node.proxy.port}/0",)
        self._version = (await self.node.info("server"))["redis_version"]
        self.cannot = {
            suffering.FAILOVER: "one server has no replica",
            **shared_cannot(self._clock, [self.node]),
        }

    async def stop(self) -> None:
        await self.node.remove()

    async def clock(self) -> Millis:
        """Milliseconds, by the server."""
        return await self.node.time()

    def _troubles(self) -> Mapping[str, Trouble]:
        async def it(chance: random.Random) -> Node:
            return self.node

        async def masters() -> Sequence[RedisNode]:
            return [self.node]

        return {
            suffering.KILL: suffering.killed(it),
            suffering.RESTART: suffering.restarted(it),
            suffering.STILL: suffering.stood_still(it),
            suffering.MEMORY: memory_full(masters),
            suffering.CROWDED: crowded(self.node),
            suffering.DISK: suffering.disk_full(it, lambda node: self.node.disk),
            suffering.CLOCK: suffering.clock_set(self._clock),
        }

    def about(self) -> dict[str, Any]:
        return {
            "version": f"Redis {self._version}",
            "durability": DURABILITY,
            "set-up": "one server behind one proxy; maxmemory 1 GB, noeviction",
        }


def shared_cannot(clock: FakeClock, nodes: Sequence[RedisNode]) -> dict[str, str]:
    """What all kinds of Redis share."""
    found = {suffering.OOM: suffering.KILLED_FOR_MEMORY}
    if clock.refused:
        found[suffering.CLOCK] = clock.refused
    if refused := next((node.disk.refused for node in nodes if node.disk.refused), ""):
        found[suffering.DISK] = refused
    return found


def memory_full(masters: Masters) -> Trouble:
    """The masters have hardly any memory left for new work, and then again as much as ever."""

    async def trouble(chance: random.Random) -> str:
        lasts, room, nodes = chance.uniform(*_FULL), chance.choice(_ROOM), await masters()
        try:
            for node in nodes:
                used = int((await node.info("memory"))["used_memory"])
                await node.ask("CONFIG", "SET", "maxmemory", used + room)
            await asyncio.sleep(lasts)
        finally:
            for node in nodes:
                await node.ask("CONFIG", "SET", "maxmemory", MAXMEMORY)
        return f"left {room // 1_000} kB of memory to each of {len(nodes)} servers for {lasts:.1f} s"

    return trouble


def crowded(node: RedisNode) -> Trouble:
    """Strangers have every connection that there may be, and all clients are thrown out."""

    async def trouble(chance: random.Random) -> str:
        lasts, strangers = chance.uniform(*_CROWDED), chance.randint(5, 20)
        async with AsyncExitStack() as open_to_us:
            asking = await open_to_us.enter_async_context(Asking(node.host, node.port))
            listed: str = await asking("CLIENT", "LIST")
            clients = [dict(part.partition("=")[::2] for part in line.split()) for line in listed.splitlines()]
            for _ in range(strangers):
                await open_to_us.enter_async_context(Asking(node.host, node.port))
            most = (await asking("CONFIG", "GET", "maxclients"))[1]
            try:
                await asking("CONFIG", "SET", "maxclients", 1 + strangers)
                for one in clients:
                    if one["name"] == "bide":
                        await asking("CLIENT", "KILL", "ID", one["id"])
                await asyncio.sleep(lasts)
            finally:
                await asking("CONFIG", "SET", "maxclients", most)
        return f"threw all clients out, and let strangers have all {1 + strangers} connections for {lasts:.1f} s"

    return trouble
