"""Redis: what all deployments of it suffer, and one server behind one proxy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST, until
from bide_proofs.servers.redis import RedisServer, ReplicatedRedis
from bide_proofs.servers.resp import Connection
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.private import PrivateServer
from bide_proofs.torture.servers.suffering import FULL_FOR, LONGEST_AWAY, Suffering, Wait

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

    def has_room(self) -> None:
        """The append-only file is written anew: one that a full disk cut short may be refused at the next start."""
        self.forget_history()


class TorturedRedis(PrivateServer):
    """Redis, alone."""

    name = "redis"
    server: RedisOnDisk
    durability = DURABILITY
    set_up = "one server behind one proxy; maxmemory 1 GB, noeviction"
    lacks: ClassVar[Mapping[str, str]] = {
        suffering.OOM: suffering.KILLED_FOR_MEMORY,
        suffering.FAILOVER: "one server has no replica",
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RedisOnDisk(folder / "server", clock=self.clock, options=OPTIONS, name="the server")
        self.nodes = [self.server]

    def run(self) -> None:
        super().run()
        self.version = f"Redis {self.server.info('server')['redis_version']}"

    async def open(self) -> None:
        self.direct = self.server.url
        self.urls = (f"redis://{HOST}:{(await self.proxy(self.server.port)).port}/0",)

    def sufferings(self) -> Mapping[str, Suffering]:
        def it(chance: random.Random) -> OnDisk:
            return self.server

        return {
            suffering.KILL: suffering.killed(it),
            suffering.RESTART: suffering.restarted(it),
            suffering.STILL: suffering.stood_still(it),
            suffering.MEMORY: memory_full(lambda: [self.server]),
            suffering.CROWDED: crowded(self.server),
            suffering.DISK: suffering.disk_full(it),
        }


class TorturedReplicas(PrivateServer):
    """Masters with replicas, each behind a proxy; they replicate past it.

    A failover befalls a master whose replicas have all that it has: Redis promises nothing about what they lack.
    """

    at_once: ClassVar[int]
    """Milliseconds of silence after which a server is given up while a failover is wanted."""
    server: ReplicatedRedis

    def run(self) -> None:
        super().run()
        self.version = f"Redis {self.server.masters[0].info('server')['redis_version']}"

    def master(self, chance: random.Random) -> OnDisk:
        """One of those that clients write to."""
        return _on_disk(chance.choice(self.server.masters))

    def replica(self, chance: random.Random) -> OnDisk:
        """One that follows a master."""
        masters: Sequence[object] = self.server.masters
        return chance.choice([node for node in self.nodes if node not in masters])

    def sufferings(self) -> Mapping[str, Suffering]:
        return {
            suffering.KILL: suffering.killed(self.master),
            "kill -9 of a replica": suffering.killed(self.replica),
            suffering.RESTART: suffering.restarted(self.master),
            suffering.STILL: suffering.stood_still(self.master),
            suffering.FAILOVER: self.failover,
            suffering.HAND_OVER: self.hand_over,
            suffering.MEMORY: memory_full(lambda: self.server.masters),
            suffering.DISK: suffering.disk_full(self.master),
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


def _on_disk(server: RedisServer) -> OnDisk:
    assert isinstance(server, OnDisk)
    return server


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


def memory_full(masters: Callable[[], Sequence[RedisServer]]) -> Suffering:
    """Leave the masters hardly any memory for a while."""

    def suffered(chance: random.Random, wait: Wait) -> str:
        lasts, room, nodes = chance.uniform(*FULL_FOR), chance.choice(_ROOM), masters()
        try:
            for node in nodes:
                node.ask("CONFIG", "SET", "maxmemory", int(node.info("memory")["used_memory"]) + room)
            wait(lasts)
        finally:
            for node in nodes:
                node.ask("CONFIG", "SET", "maxmemory", MAXMEMORY)
        return f"left {room // 1_000} kB of memory to each of {len(nodes)} servers for {lasts:.1f} s"

    return suffered


def crowded(server: RedisServer) -> Suffering:
    """Throw all clients out, and let strangers take every connection."""

    def suffered(chance: random.Random, wait: Wait) -> str:
        lasts, strangers = chance.uniform(*suffering.CROWDED_FOR), chance.randint(5, 20)
        with ExitStack() as open_to_us:
            asking = open_to_us.enter_context(Connection(server.host, server.port))
            listed = str(asking.ask("CLIENT", "LIST"))
            clients = [dict(part.partition("=")[::2] for part in line.split()) for line in listed.splitlines()]
            for _ in range(strangers):
                open_to_us.enter_context(Connection(server.host, server.port))
            most = asking.ask("CONFIG", "GET", "maxclients")
            assert isinstance(most, list)
            try:
                asking.ask("CONFIG", "SET", "maxclients", 1 + strangers)
                for one in clients:
                    if one["name"] == "bide":
                        asking.ask("CLIENT", "KILL", "ID", one["id"])
                wait(lasts)
            finally:
                asking.ask("CONFIG", "SET", "maxclients", str(most[1]))
        return f"threw all clients out, and let strangers have all {1 + strangers} connections for {lasts:.1f} s"

    return suffered
