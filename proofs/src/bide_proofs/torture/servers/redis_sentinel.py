"""A Redis master with two replicas, and three Sentinels who decide which of them is the master, each behind a proxy.

Between a Sentinel and its proxy stands who tells clients the port of a server's proxy in place of the server's own. So
what befalls the clients' connections does not befall replication, nor those who watch over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_sentinel import SERVICE, RedisSentinel, url_of
from bide_proofs.torture.server import CROWDED, OOM, Trouble, Wait
from bide_proofs.torture.servers.private import KILLED_FOR_MEMORY, befalls, killed
from bide_proofs.torture.servers.redis import (
    DURABILITY,
    OPTIONS,
    RedisOnDisk,
    TorturedReplicas,
    let_replicas_catch_up,
)

_DOWN_AFTER = 30_000
"""Milliseconds of silence after which a master is taken for dead: Sentinel's own default, so that none is who is only
killed and started again, or stands still for a while."""


class _Servers(RedisSentinel):
    server = RedisOnDisk


class _Teller:
    """Passes on what clients and Sentinels say to each other, with the ports of the servers' proxies for their own.

    Both have five digits, so that no length in an answer changes.
    """

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        """The port of its proxy, by that of a server."""
        self._listening: list[asyncio.Server] = []

    async def listen(self, port: int) -> int:
        """Listen for clients of the Sentinel at `port`. Returns the port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection(HOST, port)
                ways = (self._pass_on(reader, there_writer), self._pass_on(there_reader, writer, told=True))
                await asyncio.gather(*ways, return_exceptions=True)
            writer.close()

        server = await asyncio.start_server(serve, HOST, 0)
        self._listening.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, told: bool = False) -> None:
        try:
            while data := await reader.read(65_536):
                for own, proxy in self.told.items() if told else ():
                    data = data.replace(b"$5\r\n%d\r\n" % own, b"$5\r\n%d\r\n" % proxy)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def close(self) -> None:
        for server in self._listening:
            server.close()
        self._listening.clear()


class TorturedSentinel(TorturedReplicas):
    """Redis under Sentinel."""

    name = "redis-sentinel"
    at_once = 1_000
    durability = f"{DURABILITY}; a failover keeps what the replicas had"
    set_up = (
        "a master, two replicas and three Sentinels, each behind a proxy, replication not; a "
        "failover befalls a master whose writes are paused (CLIENT PAUSE) until its replicas have all that it has, "
        "since Redis promises nothing about what they lack"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        OOM: KILLED_FOR_MEMORY,
        CROWDED: "on one Redis server alone: here replicas and Sentinels are among the clients",
    }
    server: _Servers

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = _Servers(
            folder, down_after=_DOWN_AFTER, failover_timeout=10_000, clock=self.clock, options=OPTIONS
        )
        self.nodes = [server for server in self.server.servers if isinstance(server, RedisOnDisk)]
        self._teller = _Teller()

    async def open(self) -> None:
        self.direct = self.server.url
        for server in self.nodes:
            self._teller.told[server.port] = (await self.proxy(server.port)).port
        told = [await self.proxy(await self._teller.listen(sentinel.port)) for sentinel in self.server.sentinels]
        self.urls = (url_of(*(proxy.port for proxy in told)),)

    async def stop(self) -> None:
        self._teller.close()
        await super().stop()

    def troubles_of_kind(self) -> Mapping[str, Trouble]:
        sentinel = befalls(lambda chance: chance.choice(self.server.sentinels), killed)
        return {**super().troubles_of_kind(), "kill -9 of a Sentinel": sentinel}

    def prepare_return(self, old: RedisServer, new: RedisServer) -> None:
        """Configure it as a replica. It would take itself for the master otherwise, and lose what it answers."""
        lines = old.configuration.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith(("replicaof ", "slaveof "))]
        follows = f"replicaof {HOST} {new.port}"
        old.configuration.write_text("\n".join([*kept, follows, ""]), encoding="utf-8")

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Change master and replica as docs/redis.md does it for an upgrade.

        Nothing is written to the old one until it follows the new. It is told that by us, since the connection by which
        a Sentinel would tell it waits in the same line: it has published something there.
        """
        self.server.await_whole()
        old = self.server.master
        try:
            let_replicas_catch_up(old)
            chance.choice(self.server.sentinels).ask("SENTINEL", "FAILOVER", SERVICE)
            new = self.server.await_master(other_than=old)
            old.ask("REPLICAOF", HOST, new.port)
        finally:
            old.ask("CLIENT", "UNPAUSE")
            self.server.await_whole()
        return f"{new.name} took over from {old.name}, which lived"
