"""A Redis Cluster: three masters, each with a replica, each behind a proxy.

The nodes are at another address of the loopback than their proxies, at the same ports. Clients are told of the proxies'
(as a "hostname", which is what a Cluster tells to clients alone), the other nodes of the nodes' own: so what befalls
the clients' connections does not befall replication.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis_cluster import ClusterNode, RedisCluster
from bide_proofs.torture.server import CROWDED, OOM, Wait
from bide_proofs.torture.servers.private import KILLED_FOR_MEMORY
from bide_proofs.torture.servers.redis import DURABILITY, OPTIONS, RedisOnDisk, TorturedReplicas

_NODE_TIMEOUT = 15_000
"""Milliseconds of silence after which a node counts as failed: Redis's own default, so that none does that is only
killed and started again, or stands still for a while."""


class _Node(RedisOnDisk, ClusterNode):
    """One node. Its second port, for the bus, has no proxy."""

    host = "127.0.0.2"

    def directives(self) -> dict[str, str]:
        return super().directives() | {
            "cluster-announce-ip": self.host,
            "cluster-announce-hostname": HOST,
            "cluster-preferred-endpoint-type": "hostname",
        }


class _Cluster(RedisCluster):
    node = _Node


class TorturedCluster(TorturedReplicas):
    """Redis Cluster of six nodes."""

    name = "redis-cluster"
    gives_back = True
    """A slow node may lease what nobody waits for any more."""
    at_once = 1_500
    durability = f"{DURABILITY}; a failover keeps what the replica had"
    set_up = (
        "three masters, each with a replica, each behind a proxy, replication not; a failover befalls a "
        "master whose writes are paused (CLIENT PAUSE) until its replica has all that it has, since Redis promises "
        "nothing about what it lacks"
    )
    lacks: ClassVar[Mapping[str, str]] = {
        OOM: KILLED_FOR_MEMORY,
        CROWDED: "on one Redis server alone: here replicas are among the clients",
    }
    server: _Cluster

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = _Cluster(folder, node_timeout=_NODE_TIMEOUT, clock=self.clock, options=OPTIONS)
        self.nodes = [node for node in self.server.nodes if isinstance(node, _Node)]

    async def open(self) -> None:
        # the nodes themselves, who name to clients the proxies of the others: those have to be healed before
        self.direct = self.server.url
        for node in self.nodes:
            await self.proxy(node.port, host=node.host, at=node.port)
        self.urls = ("redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes),)

    def hand_over(self, chance: random.Random, wait: Wait) -> str:
        """Change them by CLUSTER FAILOVER."""
        self.server.await_whole()
        old = chance.choice(self.server.masters)
        self.server.replica_of(old).ask("CLUSTER", "FAILOVER")
        new = self.server.await_master(other_than=old)
        self.server.await_whole()
        return f"{new.name} took over from {old.name}, which lived"
