"""A Redis Cluster: three masters, each with a replica, each behind a proxy.

The nodes are at another address of the loopback than their proxies, at the same ports. Clients are told of the proxies'
(as a "hostname", which is what a Cluster tells to clients alone), the other nodes of the nodes' own: so what befalls
the clients' connections does not befall replication.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.private import PrivateServer, remove_all
from bide_proofs.torture.servers.processes import HOST, until
from bide_proofs.torture.servers.redis import memory_full, shared_cannot
from bide_proofs.torture.servers.redis_node import DURABILITY, RedisNode

SLOTS = 16_384
MASTERS = 3
_NODE_TIMEOUT = 15_000
"""Milliseconds of silence after which a node counts as failed: Redis's own default, so that none does that is only
killed and started again, or stands still for a while."""
_AT_ONCE = 1_500
"""The same while a failover is wanted."""
_LONGEST_AWAY = 2.0


class _ClusterNode(RedisNode):
    """One node. Its second port, for the bus, has no proxy."""

    bus = True
    host = "127.0.0.2"

    async def prepare(self) -> None:
        self.proxy.port = self.port
        await super().prepare()

    def directives(self) -> Mapping[str, str | int]:
        return {
            **super().directives(),
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": _NODE_TIMEOUT,
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": 0,  # a replica steps in however long its master has been away
            "cluster-allow-replica-migration": "no",  # each stays with its master
            "cluster-announce-ip": self.host,
            "cluster-announce-hostname": HOST,
            "cluster-preferred-endpoint-type": "hostname",
        }

    async def id(self) -> str:
        """Its name in the cluster, of 40 hexadecimal digits."""
        found: str = await self.ask("CLUSTER", "MYID")
        return found

    async def known(self) -> list[list[str]]:
        """The lines of CLUSTER NODES about nodes that it has shaken hands with, by words."""
        reply: str = await self.ask("CLUSTER", "NODES")
        return [words for line in reply.splitlines() if (words := line.split()) and "handshake" not in words[2]]


class RedisCluster(PrivateServer):
    """Redis Cluster of six nodes."""

    name = "redis-cluster"
    gives_back = True
    """What a slow node has leased too late for who asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.nodes = [
            _ClusterNode(f"node {number}", folder / f"node-{number}", self._clock)
            for number in range(1, 2 * MASTERS + 1)
        ]
        # the nodes themselves, who name to clients the proxies of the others: those have to be healed before
        self.direct = "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        self.proxies = tuple(node.proxy for node in self.nodes)
        self._version = ""

    async def _start(self) -> None:
        for node in self.nodes:
            await node.prepare()
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            await node.ready()
        await self._give_up_after(_AT_ONCE)  # what is new gets about sooner, too
        await self._join()
        await self.await_whole()
        await self._give_up_after(_NODE_TIMEOUT)
        self.urls = ("redis+cluster://" + ",".join(f"{HOST}:{node.proxy.port}" for node in self.nodes),)
        self._version = (await self.nodes[0].info("server"))["redis_version"]
        self.cannot = {
            suffering.CROWDED: "on one Redis server alone: here replicas are among the clients",
            **shared_cannot(self._clock, self.nodes),
        }

    async def _join(self) -> None:
        first, *others = self.nodes
        for number, node in enumerate(self.nodes):
            await node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # else they have to find out who is which
            if number < MASTERS:
                begin, end = SLOTS * number // MASTERS, SLOTS * (number + 1) // MASTERS - 1
                await node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end)
        for node in others:
            await first.ask("CLUSTER", "MEET", node.host, node.port)

        async def met() -> bool:
            return all([len(await node.known()) == len(self.nodes) for node in self.nodes])

        await until(met, "all nodes to meet")
        for master, replica in zip(self.nodes[:MASTERS], self.nodes[MASTERS:], strict=True):
            await replica.ask("CLUSTER", "REPLICATE", await master.id())

    async def stop(self) -> None:
        await remove_all(self.nodes)

    async def clock(self) -> Millis:
        """Milliseconds, by the nodes, which go by one clock."""
        return await self.nodes[0].time()

    async def masters(self) -> list[_ClusterNode]:
        """The nodes that serve slots."""
        return [node for node in self.nodes if await node.is_master()]

    async def await_whole(self) -> None:
        """Until the nodes agree that every slot has a master, and each replica is linked. Raises ServerFailed."""
        await until(self._whole, "the cluster to be whole")

    async def _whole(self) -> bool:
        views: set[tuple[tuple[str, str], ...]] = set()
        for node in self.nodes:
            state = await node.info("cluster")
            if state["cluster_state"] != "ok" or state["cluster_slots_ok"] != str(SLOTS):
                return False
            replication = await node.info("replication")
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return False
            views.add(tuple(sorted((words[0], _role(words)) for words in await node.known())))
        return len(views) == 1 and len(await self.masters()) == MASTERS

    async def replica_of(self, master: _ClusterNode) -> _ClusterNode:
        """The node that follows `master`. Raises LookupError."""
        for node in self.nodes:
            if (await node.info("replication")).get("master_port") == str(master.port):
                return node
        raise LookupError(f"nobody follows {master.name}")

    def _troubles(self) -> Mapping[str, Trouble]:
        async def master(chance: random.Random) -> Node:
            return chance.choice(await self.masters())

        async def replica(chance: random.Random) -> Node:
            return await self.replica_of(chance.choice(await self.masters()))

        return {
            suffering.KILL: suffering.killed(master),
            "kill -9 of a replica": suffering.killed(replica),
            suffering.RESTART: suffering.restarted(master),
            suffering.STILL: suffering.stood_still(master),
            suffering.FAILOVER: self._failover,
            suffering.HAND_OVER: self._hand_over,
            suffering.MEMORY: memory_full(self.masters),
            suffering.DISK: suffering.disk_full(master, lambda node: _node(node).disk),
            suffering.CLOCK: suffering.clock_set(self._clock),
        }

    def lossy(self) -> Mapping[str, Trouble]:
        """What Redis itself may lose acknowledged work by: not for a run that is judged by the promises."""
        return {"failover without notice": self._failover_without_notice}

    async def _failover(self, chance: random.Random) -> str:
        """A master is killed at a moment when its replica has all that it had."""
        return await self._killed(chance, catch_up=True)

    async def _failover_without_notice(self, chance: random.Random) -> str:
        """The same, whatever its replica has: what that lacks was answered and is lost."""
        return await self._killed(chance, catch_up=False)

    async def _killed(self, chance: random.Random, *, catch_up: bool) -> str:
        await self.await_whole()
        old, away = chance.choice(await self.masters()), chance.uniform(0, _LONGEST_AWAY)
        new = await self.replica_of(old)
        took = 0.0
        try:
            if catch_up:
                await old.let_replicas_catch_up()
            await old.kill()
            await self._give_up_after(_AT_ONCE, besides=old)
            took = await until(new.is_master, f"{new.name} to be a master")
            await asyncio.sleep(away)
        finally:
            if old.running:
                await old.ask("CLIENT", "UNPAUSE")
            await old.mend()
            await self.await_whole()  # else one that is just back is still missed
            await self._give_up_after(_NODE_TIMEOUT)
        return f"killed {old.name}, a master; {new.name} served in its place after {took:.1f} s"

    async def _give_up_after(self, milliseconds: int, besides: _ClusterNode | None = None) -> None:
        for node in self.nodes:
            if node is not besides:
                await node.ask("CONFIG", "SET", "cluster-node-timeout", milliseconds)

    async def _hand_over(self, chance: random.Random) -> str:
        """A master and its replica change places, both alive: CLUSTER FAILOVER, by which nothing is lost."""
        await self.await_whole()
        old = chance.choice(await self.masters())
        new = await self.replica_of(old)
        await new.ask("CLUSTER", "FAILOVER")
        took = await until(new.is_master, f"{new.name} to be a master")
        await self.await_whole()
        return f"{new.name} took over from {old.name}, which lived, within {took:.1f} s"

    def about(self) -> dict[str, Any]:
        return {
            "version": f"Redis {self._version}, as a Cluster",
            "durability": f"{DURABILITY}; a failover keeps what the replica had",
            "set-up": "three masters, each with a replica, each behind a proxy, replication not; a failover befalls a "
            "master whose writes are paused (CLIENT PAUSE) until its replica has all that it has, since Redis promises "
            "nothing about what it lacks",
        }


def _node(node: Node) -> _ClusterNode:
    assert isinstance(node, _ClusterNode)
    return node


def _role(words: Sequence[str]) -> str:
    flags = words[2].split(",")
    return "gone" if "fail" in flags else "master" if "master" in flags else words[3]
