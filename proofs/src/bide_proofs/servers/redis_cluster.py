"""A Redis Cluster of our own: three masters, each with a replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from bide_proofs.servers.process import until
from bide_proofs.servers.redis import RedisServer, ReplicatedRedis
from bide_proofs.servers.server import start_all

SLOTS = 16_384
MASTERS = 3
NODE_TIMEOUT = 1_500
"""Milliseconds without an answer after which a node counts as failed; a replica is master about as long after that.

A machine that tests do much on may stand still for longer: where no test wants a failover, more of it is better.
"""


class ClusterNode(RedisServer):
    """One node, with its second port 10,000 above."""

    bus = True

    def __init__(self, directory: Path, *, node_timeout: int, **options: Any) -> None:
        super().__init__(directory, **options)
        self._node_timeout = node_timeout

    def directives(self) -> dict[str, str]:
        return super().directives() | {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(self._node_timeout),
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": "0",  # a replica steps in however long its master has been away
            "cluster-allow-replica-migration": "no",  # each stays with its master, so that it is known who follows whom
        }

    @property
    def id(self) -> str:
        """Its name in the cluster, of 40 hexadecimal digits."""
        return str(self.ask("CLUSTER", "MYID"))

    def known(self) -> list[list[str]]:
        """The lines of CLUSTER NODES about nodes that it has shaken hands with, by words."""
        reply = self.ask("CLUSTER", "NODES")
        assert isinstance(reply, str)
        return [words for line in reply.splitlines() if (words := line.split()) and "handshake" not in words[2]]


class RedisCluster(ReplicatedRedis):
    """Six nodes below `directory`, with the `options` of `RedisServer`.

    Any one master may die: its slots are served again after twice the `node_timeout`, in milliseconds.
    Joined by plain commands and not by `redis-cli --cluster create`, which waits in whole seconds and has to be there.
    A start takes about 2 s, since a node that starts as a master waits so long before it serves.
    """

    node: ClassVar[type[ClusterNode]] = ClusterNode

    def __init__(self, directory: Path, *, node_timeout: int = NODE_TIMEOUT, **options: Any) -> None:
        self.gives_up_after = node_timeout
        self.nodes: Sequence[ClusterNode] = [
            self.node(directory / f"node-{number}", node_timeout=node_timeout, name=f"node {number}", **options)
            for number in range(1, 2 * MASTERS + 1)
        ]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    @property
    def masters(self) -> list[ClusterNode]:
        """The nodes that run and serve slots."""
        return [node for node in self.nodes if node.running and node.is_master]

    @property
    def parts(self) -> Sequence[ClusterNode]:
        return self.nodes

    def start_parts(self) -> None:
        """Start all, and wait until every slot is served and every replica is linked."""
        joined = all((node.data / "nodes.conf").exists() for node in self.nodes)
        start_all(self.nodes)
        self.give_up_after(NODE_TIMEOUT)  # nodes that begin wait the longer, too
        if not joined:
            self._join()
        self.await_whole()
        self.give_up_after(self.gives_up_after)

    def give_up_after(self, milliseconds: int) -> None:
        for node in filter(lambda node: node.running, self.nodes):
            node.ask("CONFIG", "SET", "cluster-node-timeout", milliseconds)

    def _join(self) -> None:
        first, *others = self.nodes
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # else they have to find out who is which
            if number < MASTERS:
                slots = range(SLOTS * number // MASTERS, SLOTS * (number + 1) // MASTERS)
                node.ask("CLUSTER", "ADDSLOTS", *slots)
        for node in others:
            first.ask("CLUSTER", "MEET", node.host, node.port)
        until(lambda: all(len(node.known()) == len(self.nodes) for node in self.nodes), "all nodes to meet")
        for master in self.nodes[:MASTERS]:
            self.replica_of(master).ask("CLUSTER", "REPLICATE", master.id)

    def _whole(self) -> bool:
        running = [node for node in self.nodes if node.running]
        for node in running:
            state = node.info("cluster")
            if state["cluster_state"] != "ok" or state["cluster_slots_ok"] != str(SLOTS):
                return False
            if not (node.is_master or node.is_linked):
                return False
        views = {tuple(sorted((words[0], _role(words)) for words in node.known())) for node in running}
        return len(views) == 1 and len(self.masters) == MASTERS

    def await_master(self, *, other_than: RedisServer) -> ClusterNode:
        """Wait until its replica serves in place of a master that is away, and return it."""
        new = self.replica_of(other_than)
        until(lambda: new.is_master, f"{new.name} to be a master")
        return new

    def replica_of(self, master: RedisServer) -> ClusterNode:
        """The node that follows `master`, as it always will: they only change places."""
        return self.nodes[(self.nodes.index(master) + MASTERS) % len(self.nodes)]

    def master_of(self, slot: int) -> ClusterNode:
        """The node that serves `slot`, as a node that runs sees it. Raises LookupError when no such node is known."""
        for node in filter(lambda node: node.running, self.nodes):
            ranges = node.ask("CLUSTER", "SLOTS")
            assert isinstance(ranges, list)
            for one in ranges:
                first, last, master, *_ = cast(tuple[int, int, list[Any]], one)
                if first <= slot <= last and (owner := self._node_at(master[1])).running:
                    return owner
        raise LookupError(f"no running node serves slot {slot}")

    def _node_at(self, port: int) -> ClusterNode:
        return next(node for node in self.nodes if node.port == port)

    def slot_of(self, key: str) -> int:
        """The slot that the servers put `key` into."""
        slot = next(node for node in self.nodes if node.running).ask("CLUSTER", "KEYSLOT", key)
        assert isinstance(slot, int)
        return slot


def _role(words: Sequence[str]) -> str:
    flags = words[2].split(",")
    return "gone" if "fail" in flags else "master" if "master" in flags else words[3]
