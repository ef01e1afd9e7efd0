"""Redis with replicas that take over: a Cluster of three masters and their replicas, and a master under Sentinel.

With the default time-outs, failovers are as quick as tests need. A busy machine may stand still for longer than
`NODE_TIMEOUT` or `DOWN_AFTER`, so tests without failovers should use longer ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide_proofs.servers.process import HOST, ServerFailed, until
from bide_proofs.servers.redis import RedisServer, Refused, Reply
from bide_proofs.servers.server import SeveralServers, start_all


class ReplicatedRedis(SeveralServers):
    """Several servers; a replica takes over from a master that is silent for `gives_up_after` milliseconds."""

    gives_up_after: int

    @property
    def masters(self) -> Sequence[RedisServer]:
        """The running servers that accept writes."""
        raise NotImplementedError

    def await_whole(self) -> None:
        """Wait until the running servers agree on the masters, and their replicas are linked."""
        until(self._whole, "the servers to be whole")

    def _whole(self) -> bool:
        raise NotImplementedError

    def await_master(self, *, other_than: RedisServer) -> RedisServer:
        """Wait until another server has replaced a master that is away, and return it."""
        raise NotImplementedError

    def give_up_after(self, milliseconds: int) -> None:
        """Set the silence after which a server counts as dead."""
        raise NotImplementedError


# --- Cluster


SLOTS = 16_384
MASTERS = 3
NODE_TIMEOUT = 1_500
"""Milliseconds without an answer after which a node counts as failed; a replica is master about as long after that."""


class ClusterNode(RedisServer):
    """One node, with its second port 10,000 above."""

    def directives(self) -> dict[str, str]:
        return super().directives() | {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": "0",  # a replica takes over however long its master has been away
            "cluster-allow-replica-migration": "no",  # each replica stays with its master, so that pairs are known
        }

    @property
    def id(self) -> str:
        """Its id in the cluster, 40 hexadecimal digits."""
        return str(self.ask("CLUSTER", "MYID"))

    def known(self) -> list[list[str]]:
        """The lines of CLUSTER NODES, split into words, without nodes whose handshake is not complete."""
        reply = self.ask("CLUSTER", "NODES")
        assert isinstance(reply, str)
        return [words for line in reply.splitlines() if (words := line.split()) and "handshake" not in words[2]]


class RedisCluster(ReplicatedRedis):
    """Six nodes below `directory`, of class `kind`, with the `options` of `RedisServer`.

    Any one master may die: its slots are served again after twice the `node_timeout`, in milliseconds.
    The nodes are joined by plain commands and not by `redis-cli --cluster create`, which waits in whole seconds and may
    not be installed. A start takes about 2 s: a node that starts as a master waits that long before it serves.
    """

    def __init__(
        self,
        directory: Path,
        *,
        node_timeout: int = NODE_TIMEOUT,
        kind: type[ClusterNode] = ClusterNode,
        options: Mapping[str, str] | None = None,
        **given: Any,
    ) -> None:
        self.gives_up_after = node_timeout
        options = {"cluster-node-timeout": str(node_timeout), **(options or {})}
        self.nodes: Sequence[ClusterNode] = [
            kind(directory / f"node-{number}", name=f"node {number}", options=options, **given)
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
        """Start all nodes, and wait until every slot is served and every replica is linked."""
        joined = all((node.data / "nodes.conf").exists() for node in self.nodes)
        start_all(self.nodes)
        self.give_up_after(NODE_TIMEOUT)  # with a longer time-out, starting nodes wait longer, too
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
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # else the nodes must resolve equal epochs first
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
        """Wait until the replica of a master that is away has replaced it, and return the replica."""
        new = self.replica_of(other_than)
        until(lambda: new.is_master, f"{new.name} to be a master")
        return new

    def replica_of(self, master: RedisServer) -> ClusterNode:
        """The node that follows `master`. The pair never changes; the two only exchange roles."""
        return self.nodes[(self.nodes.index(master) + MASTERS) % len(self.nodes)]


def _role(words: Sequence[str]) -> str:
    flags = words[2].split(",")
    return "gone" if "fail" in flags else "master" if "master" in flags else words[3]


# --- Sentinel


SERVICE = "mymaster"
QUORUM = 2
DOWN_AFTER = 1_000
"""Milliseconds without an answer after which a server counts as dead for a sentinel."""
FAILOVER_TIMEOUT = 3_000
_PERIODS = {"publish-period": 200, "info-period": 500, "ask-period": 200, "tilt-period": 1_000}
"""Milliseconds between the regular actions of sentinels, and of the time for which they trust no state after a pause of
their own: shorter than the defaults of 2 s, 10 s, 1 s and 30 s, so that tests are quicker."""


class Sentinel(RedisServer):
    """One sentinel. It is the server's own program: redis-sentinel is another name for it."""

    def __init__(self, directory: Path, master: RedisServer, *, failover_timeout: int, name: str) -> None:
        super().__init__(directory, name=name)
        self._watched = master
        self._failover_timeout = failover_timeout

    def directives(self) -> dict[str, str]:
        return {
            f"sentinel monitor {SERVICE}": f"{HOST} {self._watched.port} {QUORUM}",
            f"sentinel down-after-milliseconds {SERVICE}": str(DOWN_AFTER),
            f"sentinel failover-timeout {SERVICE}": str(self._failover_timeout),
            f"sentinel parallel-syncs {SERVICE}": "1",
        }

    def command(self) -> Sequence[str]:
        return [*super().command(), "--sentinel"]

    def await_ready(self) -> float:
        took = super().await_ready()
        with contextlib.suppress(Refused):  # before 7.0 the periods are fixed
            for name, period in _PERIODS.items():
                self.ask("SENTINEL", "DEBUG", name, period)
        return took


class RedisSentinel(ReplicatedRedis):
    """A master with two followers and three sentinels with a quorum of two, below `directory`.

    `options` are those of `RedisServer`, for the servers with data. When the master dies or hangs for longer than
    `down_after`, in milliseconds, another is master a second later. A server that returns follows the current master.
    """

    def __init__(
        self,
        directory: Path,
        *,
        down_after: int = DOWN_AFTER,
        failover_timeout: int = FAILOVER_TIMEOUT,
        kind: type[RedisServer] = RedisServer,
        **options: Any,
    ) -> None:
        self.gives_up_after = down_after
        self.servers = [
            kind(directory / f"server-{number}", name=f"server {number}", **options) for number in (1, 2, 3)
        ]
        self.sentinels = [
            Sentinel(
                directory / f"sentinel-{number}", self.servers[0],
                failover_timeout=failover_timeout, name=f"sentinel {number}",
            )
            for number in (1, 2, 3)
        ]  # fmt: skip

    @property
    def url(self) -> str:
        return url_of(*(sentinel.port for sentinel in self.sentinels))

    @property
    def parts(self) -> Sequence[RedisServer]:
        return *self.sentinels, *self.servers

    def start_parts(self) -> None:
        """Start all servers, and wait until the replicas are linked and the sentinels know them and each other."""
        first, *others = self.servers
        first.start()
        for server in others:
            server.options.setdefault("replicaof", f"{HOST} {first.port}")
        start_all(others)
        until(lambda: all(server.is_linked for server in others), "the replicas to be linked")
        start_all(self.sentinels)
        self.await_whole()
        if self.gives_up_after != DOWN_AFTER:
            self.give_up_after(self.gives_up_after)

    @property
    def master(self) -> RedisServer:
        """The server that most sentinels name, even if it does not run. Raises ServerFailed if they do not agree."""
        named: list[int] = []
        for sentinel in self.sentinels:
            if sentinel.running:
                address = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                assert isinstance(address, list)
                named.append(int(str(address[1])))
        for port in set(named):
            if named.count(port) >= QUORUM:
                return next(server for server in self.servers if server.port == port)
        raise ServerFailed(f"the sentinels name {named}, and no master that {QUORUM} agree on")

    @property
    def masters(self) -> list[RedisServer]:
        """The one master."""
        return [self.master]

    def await_master(self, *, other_than: RedisServer) -> RedisServer:
        """Wait until another server is the master and accepts writes, and return it."""
        until(lambda: self.master is not other_than and self.master.is_master, "another master")
        return self.master

    def give_up_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            sentinel.ask("SENTINEL", "SET", SERVICE, "down-after-milliseconds", milliseconds)

    def _whole(self) -> bool:
        for sentinel in self.sentinels:
            master = _fields(sentinel.ask("SENTINEL", "MASTER", SERVICE))
            if (master["flags"], master["num-other-sentinels"]) != ("master", str(len(self.sentinels) - 1)):
                return False
            replicas = sentinel.ask("SENTINEL", "REPLICAS", SERVICE)
            assert isinstance(replicas, list)
            seen = [(one["flags"], one["master-link-status"]) for one in map(_fields, replicas)]
            if seen != [("slave", "ok")] * (len(self.servers) - 1):
                return False
        return self.master.is_master


def url_of(*ports: int) -> str:
    """The URL with sentinels at these ports."""
    return f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in ports)}/{SERVICE}/0"


def _fields(reply: Reply) -> dict[str, str]:
    """Convert a flat list of names and values to a mapping."""
    assert isinstance(reply, list)
    words = [str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
