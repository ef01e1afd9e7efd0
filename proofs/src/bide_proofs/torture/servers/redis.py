"""Redis: what all deployments of it suffer, and one server behind one proxy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import Connection, RedisServer, Refused
from bide_proofs.torture.server import Common, Trouble, Wait
from bide_proofs.torture.servers.private import (
    CONNECTIONS,
    FULL_FOR,
    KILLED_FOR_MEMORY,
    PrivateServer,
    befalls,
    crowded,
    disk_full,
    killed,
    restarted,
    stood_still,
)

MAXMEMORY = 1 << 30
"""As in deploy/compose.yaml."""
OPTIONS = {"maxmemory": str(MAXMEMORY), "maxmemory-policy": "noeviction"}
DURABILITY = "appendonly yes, appendfsync everysec: what was answered outlives a kill of the process"
_ROOM = (-200_000, 0, 20_000)
"""Bytes of memory that are left to a server that is full, or will be in a moment; fewer than none, and nothing is taken
until some of what is there is done."""


class RedisOnDisk(OnDisk, RedisServer):
    """With its append-only file on a disk of its own."""

    size = 512 << 20

    @property
    def data(self) -> Path:
        return self.disk_place

    def fill(self) -> None:
        self.make_disk()

    def stranger(self) -> Connection:
        connection = Connection(self.host, self.port)
        connection.ask("PING")  # one too many is told so, and let in for that
        return connection

    def throw_out(self, stranger: Connection) -> None:
        for line in str(stranger.ask("CLIENT", "LIST")).splitlines():
            client = dict(part.partition("=")[::2] for part in line.split())
            if client["name"] == "bide":
                with contextlib.suppress(Refused):  # it has gone by itself since
                    stranger.ask("CLIENT", "KILL", "ID", client["id"])

    def has_room(self) -> None:
        """The append-only file is written anew: one that a full disk cut short may be refused at the next start."""
        self.forget_history()


class TorturedOfRedis(PrivateServer):
    """The troubles of every deployment of Redis."""

    @property
    def masters(self) -> Sequence[RedisServer]:
        """The servers that run and take writes."""
        raise NotImplementedError

    def run(self) -> None:
        super().run()
        self.version = f"Redis {self.masters[0].info('server')['redis_version']}"

    def troubles_of_kind(self) -> Mapping[str, Trouble]:
        def master(chance: random.Random) -> RedisServer:
            return chance.choice(self.masters)

        return {
            Common.KILL: befalls(master, killed),
            Common.RESTART: befalls(master, restarted),
            Common.STILL: befalls(master, stood_still),
            Common.MEMORY: self._memory_full,
            Common.DISK: befalls(master, disk_full),
        }

    def _memory_full(self, chance: random.Random, wait: Wait) -> str:
        """Leave the masters hardly any memory for a while."""
        lasts, room, nodes = chance.uniform(*FULL_FOR), chance.choice(_ROOM), self.masters
        try:
            for node in nodes:
                node.ask("CONFIG", "SET", "maxmemory", int(node.info("memory")["used_memory"]) + room)
            wait(lasts)
        finally:
            for node in nodes:
                node.ask("CONFIG", "SET", "maxmemory", MAXMEMORY)
        return f"left {room // 1_000} kB of memory to each of {len(nodes)} servers for {lasts:.1f} s"


class TorturedRedis(TorturedOfRedis):
    """Redis, alone."""

    name = "redis"
    server: RedisOnDisk
    durability = DURABILITY
    set_up = "one server behind one proxy; maxmemory 1 GB, noeviction"
    lacks: ClassVar[Mapping[str, str]] = {Common.OOM: KILLED_FOR_MEMORY, Common.FAILOVER: "one server has no replica"}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        options = {**OPTIONS, "maxclients": str(CONNECTIONS)}
        self.server = RedisOnDisk(folder / "server", clock=self.clock, options=options, name="the server")
        self.nodes = [self.server]

    @property
    def masters(self) -> Sequence[RedisServer]:
        return [self.server]

    async def open(self) -> None:
        self.direct = self.server.url
        self.urls = (f"redis://{HOST}:{(await self.proxy(self.server.port)).port}/0",)

    def troubles_of_kind(self) -> Mapping[str, Trouble]:
        def server(chance: random.Random) -> RedisOnDisk:
            return self.server

        return {**super().troubles_of_kind(), Common.CROWDED: befalls(server, crowded)}
