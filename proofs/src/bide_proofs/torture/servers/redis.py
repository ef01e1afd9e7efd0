"""Redis alone, as a Cluster and under Sentinel: a failover loses no answered change.

Faults of the clients' connections affect neither replication nor the Sentinels.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST, until
from bide_proofs.servers.redis import Connection, RedisServer, Refused
from bide_proofs.servers.redis_replicas import (
    SERVICE,
    ClusterNode,
    RedisCluster,
    RedisSentinel,
    ReplicatedRedis,
    url_of,
)
from bide_proofs.torture.server import (
    CONNECTIONS,
    FULL_FOR,
    LONGEST_AWAY,
    Common,
    PrivateServer,
    Trouble,
    Wait,
    fault_on,
    killed,
)

MAXMEMORY = 1 << 30
"""As in deploy/compose.yaml."""
OPTIONS = {"maxmemory": str(MAXMEMORY), "maxmemory-policy": "noeviction"}
DURABILITY = "appendonly yes, appendfsync everysec: what was answered outlives a kill of the process"
_ROOM = (-200_000, 0, 20_000)
"""Bytes of memory left to a server that is full or nearly full. With a negative number it takes no task until some of
its tasks are done."""
_WHOLE = (
    "replication not; a failover strikes a master whose writes are paused (CLIENT PAUSE) until its replicas have all "
    "that it has, since Redis promises nothing about what they lack"
)
_PAUSE = 120_000
"""The most milliseconds for which writes to a master are paused."""
_NODE_TIMEOUT = 15_000
"""Milliseconds of silence after which a node counts as failed: Redis's default. A node that is only killed and
restarted, or stands still for a while, does not count as failed."""
_DOWN_AFTER = 30_000
"""Milliseconds of silence after which a master counts as dead: Sentinel's default. A master that is only killed and
restarted, or stands still for a while, does not count as dead."""


class RedisOnDisk(OnDisk, RedisServer):
    """A server with its append-only file on its own disk."""

    size = 512 << 20

    @property
    def data(self) -> Path:
        return self.disk_place

    def stranger(self) -> Connection:
        connection = Connection(self.host, self.port)
        connection.ask("PING")  # Redis accepts a connection beyond the limit only to send an error
        return connection

    def throw_out(self, stranger: Connection) -> None:
        for line in str(stranger.ask("CLIENT", "LIST")).splitlines():
            client = dict(part.partition("=")[::2] for part in line.split())
            if client["name"] == "bide":
                with contextlib.suppress(Refused):  # the client has disconnected since
                    stranger.ask("CLIENT", "KILL", "ID", client["id"])

    def has_room(self) -> None:
        """Rewrite the append-only file: the next start may refuse a file that a full disk truncated."""
        self.forget_history()


class TorturedOfRedis(PrivateServer):
    """The troubles of every deployment of Redis."""

    @property
    def masters(self) -> Sequence[RedisServer]:
        """The running servers that accept writes."""
        raise NotImplementedError

    def run(self) -> None:
        super().run()
        self.version = f"Redis {self.masters[0].info('server')['redis_version']}"

    def victim(self, chance: random.Random) -> RedisServer:
        return chance.choice(self.masters)

    def further_troubles(self) -> Mapping[str, Trouble]:
        return {Common.MEMORY: self._memory_full}

    def _memory_full(self, chance: random.Random, wait: Wait) -> str:
        """Leave the masters almost no memory for a while."""
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
    """A single Redis server."""

    name = "redis"
    server: RedisOnDisk
    durability = DURABILITY
    set_up = "one server behind one proxy; maxmemory 1 GB, noeviction"
    lacks: ClassVar[Mapping[str, str]] = {Common.FAILOVER: "one server has no replica"}

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


# --- with replicas


class TorturedReplicas(TorturedOfRedis):
    """Masters with replicas, each behind a proxy; replication bypasses the proxies.

    A failover only strikes a master whose replicas have all its data: Redis promises nothing about data that they lack.
    """

    durability = f"{DURABILITY}; a failover keeps what the replicas had"
    at_once: ClassVar[int]
    """Milliseconds of silence after which a server counts as dead while a failover is wanted."""
    lacks: ClassVar[Mapping[str, str]] = {
        Common.CROWDED: "on one Redis server alone: here replicas and Sentinels are among the clients"
    }
    server: ReplicatedRedis

    @property
    def masters(self) -> Sequence[RedisServer]:
        return self.server.masters

    def further_troubles(self) -> Mapping[str, Trouble]:
        def replica(chance: random.Random) -> OnDisk:
            masters: Sequence[object] = self.masters
            return chance.choice([node for node in self.nodes if node not in masters])

        return {
            **super().further_troubles(),
            "kill -9 of a replica": fault_on(replica, killed),
            Common.FAILOVER: self.failover,
            Common.HAND_OVER: self.hand_over,
        }

    def failover(self, chance: random.Random, wait: Wait) -> str:
        """Kill a master when its replicas have all its data."""
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
            self.server.await_whole()  # else a server that has just returned is not yet seen
            self.server.give_up_after(self.server.gives_up_after)
        return f"killed {old.name}, a master; {new.name} served in its place, and the old one followed it later"

    def prepare_return(self, old: RedisServer, new: RedisServer) -> None:
        """Configure `old`, which is dead, to follow `new` from its next start on."""

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Let a master and its replica change places while both are alive; no change is lost."""
        raise NotImplementedError


def let_replicas_catch_up(master: RedisServer) -> None:
    """Pause writes until CLIENT UNPAUSE, and wait until all linked replicas have all data.

    Raises ServerFailed if they do not get there, or if there is no replica.
    """
    master.ask("CLIENT", "PAUSE", _PAUSE, "WRITE")

    def have_it() -> bool:
        told = master.info("replication")
        replicas = [rest for name, rest in told.items() if name.startswith("slave") and "offset=" in rest]
        reached = [dict(part.split("=") for part in rest.split(",")) for rest in replicas]
        there = [one for one in reached if one["state"] == "online"]
        return bool(there) and all(one["offset"] == told["master_repl_offset"] for one in there)

    until(have_it, f"the replicas of {master.name} to have what it has")


# --- Cluster


class _Node(RedisOnDisk, ClusterNode):
    """One node. Its second port, for the cluster bus, has no proxy."""

    host = "127.0.0.2"

    def directives(self) -> dict[str, str]:
        return super().directives() | {
            "cluster-announce-ip": self.host,
            "cluster-announce-hostname": HOST,
            "cluster-preferred-endpoint-type": "hostname",
        }


class TorturedCluster(TorturedReplicas):
    """A Redis Cluster: three masters, each with a replica, each behind a proxy.

    The nodes use another loopback address than their proxies, with the same ports. The Cluster announces the proxies'
    address to clients (as a "hostname", which only clients get), and the nodes' own address to other nodes.
    """

    name = "redis-cluster"
    gives_back = True
    """A slow node may lease for a caller that no longer waits."""
    at_once = 1_500
    set_up = f"three masters, each with a replica, each behind a proxy, {_WHOLE}"
    server: RedisCluster

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RedisCluster(folder, node_timeout=_NODE_TIMEOUT, kind=_Node, clock=self.clock, options=OPTIONS)
        self.nodes = [node for node in self.server.nodes if isinstance(node, _Node)]

    async def open(self) -> None:
        # the nodes themselves; since they name the others' proxies to clients, the proxies must be healed first
        self.direct = self.server.url
        for node in self.nodes:
            await self.proxy(node.port, host=node.host, at=node.port)
        self.urls = ("redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes),)

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Hand over by CLUSTER FAILOVER."""
        self.server.await_whole()
        old = chance.choice(self.server.masters)
        self.server.replica_of(old).ask("CLUSTER", "FAILOVER")
        new = self.server.await_master(other_than=old)
        self.server.await_whole()
        return f"{new.name} took over from {old.name}, which lived"


# --- Sentinel


class _Teller:
    """Passes data between clients and Sentinels, and replaces the ports of servers by those of their proxies.

    Both have five digits, so that no length in an answer changes.
    """

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        """The port of each server's proxy, by the server's port."""
        self._listening: list[asyncio.Server] = []

    async def listen(self, port: int) -> int:
        """Listen for clients of the Sentinel at `port`; return the port to connect to."""

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
    """A Redis master with two replicas, and three Sentinels that choose the master, each behind a proxy.

    There is a `_Teller` between each Sentinel and its proxy.
    """

    name = "redis-sentinel"
    at_once = 1_000
    set_up = f"a master, two replicas and three Sentinels, each behind a proxy, {_WHOLE}"
    server: RedisSentinel

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RedisSentinel(
            folder, down_after=_DOWN_AFTER, failover_timeout=10_000, kind=RedisOnDisk, clock=self.clock, options=OPTIONS
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

    def further_troubles(self) -> Mapping[str, Trouble]:
        sentinel = fault_on(lambda chance: chance.choice(self.server.sentinels), killed)
        return {**super().further_troubles(), "kill -9 of a Sentinel": sentinel}

    def prepare_return(self, old: RedisServer, new: RedisServer) -> None:
        """Configure `old` as a replica. Otherwise it would act as the master, and lose the writes that it accepts.

        The Sentinels get their normal patience back at once. Otherwise, if a busy machine stalled the new master for a
        second, there would be a second failover, to a replica that lacks the newest writes.
        """
        self.server.give_up_after(self.server.gives_up_after)
        lines = old.configuration.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith(("replicaof ", "slaveof "))]
        follows = f"replicaof {HOST} {new.port}"
        old.configuration.write_text("\n".join([*kept, follows, ""]), encoding="utf-8")

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Exchange master and replica as docs/redis.md describes for an upgrade.

        The old master accepts no write until it follows the new one. The harness sends it REPLICAOF itself, since the
        Sentinel's connection is blocked by the pause: the Sentinel has published something on it.
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
