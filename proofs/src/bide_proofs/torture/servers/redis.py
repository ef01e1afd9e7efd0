"""Redis: what all deployments of it suffer, and one server behind one proxy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST, until
from bide_proofs.servers.redis import RedisServer, ReplicatedRedis
from bide_proofs.servers.resp import Connection, Refused
from bide_proofs.torture.server import (
    CROWDED,
    DISK,
    FAILOVER,
    HAND_OVER,
    KILL,
    MEMORY,
    OOM,
    RESTART,
    STILL,
    Trouble,
    Wait,
)
from bide_proofs.torture.servers.private import (
    CONNECTIONS,
    FULL_FOR,
    KILLED_FOR_MEMORY,
    LONGEST_AWAY,
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
_PAUSE = 120_000
"""Milliseconds for which nothing may be written to a master at most."""


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


class _OfRedis(PrivateServer):
    """What befalls every deployment of Redis."""

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
            KILL: befalls(master, killed),
            RESTART: befalls(master, restarted),
            STILL: befalls(master, stood_still),
            MEMORY: self._memory_full,
            DISK: befalls(master, disk_full),
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


class TorturedRedis(_OfRedis):
    """Redis, alone."""

    name = "redis"
    server: RedisOnDisk
    durability = DURABILITY
    set_up = "one server behind one proxy; maxmemory 1 GB, noeviction"
    lacks: ClassVar[Mapping[str, str]] = {OOM: KILLED_FOR_MEMORY, FAILOVER: "one server has no replica"}

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

        return {**super().troubles_of_kind(), CROWDED: befalls(server, crowded)}


class TorturedReplicas(_OfRedis):
    """Masters with replicas, each behind a proxy; they replicate past it.

    A failover befalls a master whose replicas have all that it has: Redis promises nothing about what they lack.
    """

    at_once: ClassVar[int]
    """Milliseconds of silence after which a server is given up while a failover is wanted."""
    server: ReplicatedRedis

    @property
    def masters(self) -> Sequence[RedisServer]:
        return self.server.masters

    def troubles_of_kind(self) -> Mapping[str, Trouble]:
        def replica(chance: random.Random) -> OnDisk:
            masters: Sequence[object] = self.masters
            return chance.choice([node for node in self.nodes if node not in masters])

        return {
            **super().troubles_of_kind(),
            "kill -9 of a replica": befalls(replica, killed),
            FAILOVER: self.failover,
            HAND_OVER: self.hand_over,
        }

    def failover(self, chance: random.Random, wait: Wait) -> str:
        """Kill a master at a moment when its replicas have all that it has."""
        self.server.await_whole()
        old, away = chance.choice(self.server.masters), chance.uniform(0, LONGEST_AWAY)
        try:
            let_replicas_catch_up(old)
            old.kill()
            self.server.give_up_after(self.at_once)
            new = self.server.await_master(other_than=old)
            self.prepare_return(old, new)
            wait(away)
        finally:
            if old.running:
                old.ask("CLIENT", "UNPAUSE")
            old.mend()
            self.server.await_whole()  # else one that is just back is still missed
            self.server.give_up_after(self.server.gives_up_after)
        return f"killed {old.name}, a master; {new.name} served in its place, and the old one followed it later"

    def prepare_return(self, old: RedisServer, new: RedisServer) -> None:
        """Let `old`, which is dead, follow `new` from its next start on."""

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Let a master and its replica change places, both alive; nothing is lost."""
        raise NotImplementedError


def let_replicas_catch_up(master: RedisServer) -> None:
    """Pause writes until CLIENT UNPAUSE, and wait until all linked replicas have everything.

    Raises ServerFailed when they do not come to have it, or there is none.
    """
    master.ask("CLIENT", "PAUSE", _PAUSE, "WRITE")

    def have_it() -> bool:
        told = master.info("replication")
        replicas = [rest for name, rest in told.items() if name.startswith("slave") and "offset=" in rest]
        reached = [dict(part.split("=") for part in rest.split(",")) for rest in replicas]
        there = [one for one in reached if one["state"] == "online"]
        return bool(there) and all(one["offset"] == told["master_repl_offset"] for one in there)

    until(have_it, f"the replicas of {master.name} to have what it has")
