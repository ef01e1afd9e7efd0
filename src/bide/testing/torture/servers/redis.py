"""One Redis server behind one proxy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide.testing.proxy import FaultProxy
from bide.testing.torture.server import Trouble
from bide.testing.torture.servers import suffering
from bide.testing.torture.servers.clocks import FakeClock
from bide.testing.torture.servers.node import Node
from bide.testing.torture.servers.processes import HOST
from bide.testing.torture.servers.redis_node import DURABILITY, MAXMEMORY, Asking, RedisNode

_FULL = (1.0, 4.0)
_ROOM = 20_000
"""Bytes of memory that are left to a server that is as good as full."""
_CROWDED = (0.5, 2.0)

Masters = Callable[[], Awaitable[Sequence[RedisNode]]]


class RedisServer:
    """Redis, alone."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.clock_of_it = FakeClock(folder / "clock")
        self.node = RedisNode("the server", folder / "server", self.clock_of_it)
        self.urls: Sequence[str] = ()
        self.direct = f"redis://{HOST}:{self.node.port}/0"
        self.proxies: Sequence[FaultProxy] = (self.node.proxy,)
        self.cannot: Mapping[str, str] = {}
        self._version = ""

    async def start(self) -> None:
        try:
            await self.node.prepare()
            await self.node.start()
        except BaseException:
            await self.stop()
            raise
        self.urls = (f"redis://{HOST}:{self.node.proxy.port}/0",)
        self._version = (await self.node.info("server"))["redis_version"]
        self.cannot = {
            "failover": "one server has no replica",
            **shared_cannot(self.clock_of_it, [self.node]),
        }

    async def stop(self) -> None:
        await self.node.remove()

    async def clock(self) -> Millis:
        """Milliseconds, by the server."""
        return await self.node.time()

    def troubles(self) -> Mapping[str, Trouble]:
        async def it(chance: random.Random) -> Node:
            return self.node

        async def masters() -> Sequence[RedisNode]:
            return [self.node]

        found = {
            "kill": suffering.killed(it),
            "restart": suffering.restarted(it),
            "stand still": suffering.stood_still(it),
            "memory full": memory_full(masters),
            "too many connections": crowded(self.node),
            "disk full": suffering.disk_full(it, lambda node: self.node.disk),
            "clock": suffering.clock_set(self.clock_of_it),
        }
        return {name: trouble for name, trouble in found.items() if name not in self.cannot}

    def about(self) -> dict[str, Any]:
        return {
            "version": f"Redis {self._version}",
            "durability": DURABILITY,
            "set-up": "one server behind one proxy; maxmemory 1 GB, noeviction",
        }


def shared_cannot(clock: FakeClock, nodes: Sequence[RedisNode]) -> dict[str, str]:
    """What all kinds of Redis share."""
    found = {"out of memory": suffering.KILLED_FOR_MEMORY}
    if clock.refused:
        found["clock"] = clock.refused
    if refused := next((node.disk.refused for node in nodes if node.disk.refused), ""):
        found["disk full"] = refused
    return found


def memory_full(masters: Masters) -> Trouble:
    """The masters have hardly any memory left for new work, and then again as much as ever."""

    async def trouble(chance: random.Random) -> str:
        lasts, nodes = chance.uniform(*_FULL), await masters()
        try:
            for node in nodes:
                used = int((await node.info("memory"))["used_memory"])
                await node.ask("CONFIG", "SET", "maxmemory", used + _ROOM)
            await asyncio.sleep(lasts)
        finally:
            for node in nodes:
                await node.ask("CONFIG", "SET", "maxmemory", MAXMEMORY)
        return f"left {_ROOM // 1_000} kB of memory to {len(nodes)} masters for {lasts:.1f} s"

    return trouble


def crowded(node: RedisNode) -> Trouble:
    """Strangers have every connection that there may be, and all clients are thrown out."""

    async def trouble(chance: random.Random) -> str:
        lasts, strangers = chance.uniform(*_CROWDED), chance.randint(5, 20)
        async with AsyncExitStack() as open_to_us:
            asking = await open_to_us.enter_async_context(Asking(node.port))
            listed: str = await asking("CLIENT", "LIST")
            clients = [dict(part.partition("=")[::2] for part in line.split()) for line in listed.splitlines()]
            for _ in range(strangers):
                await open_to_us.enter_async_context(Asking(node.port))
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
