"""Where bide may run on Redis: one server, one with Sentinels, a Cluster. What breaks servers breaks them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from bide.stores.redis import RedisStore
from bide_proofs.servers.redis import RedisServer, Reply, Word
from bide_proofs.servers.redis_replicas import SERVICE, ClusterNode, RedisCluster, RedisSentinel, ReplicatedRedis

FOR_EVER = 100_000_000
"""Milliseconds."""
DEPLOYMENTS = ("single", "sentinel", "cluster")


class Servers:
    """The servers of one deployment, which is theirs who have it: to be killed, paused, set up otherwise.

    Whoever shares it with others leaves it whole.
    """

    def __init__(self, deployment: str, folder: Path, **options: Any) -> None:
        self.deployment = deployment
        self.running: RedisServer | RedisSentinel | RedisCluster
        match deployment:
            case "single":
                self.running = one = RedisServer(folder, **options)
                self.data: Sequence[RedisServer] = [one]
            case "sentinel":
                self.running = watched = RedisSentinel(folder, **options)
                self.data = watched.servers
            case "cluster":
                self.running = cluster = RedisCluster(folder, **options)
                self.data = cluster.nodes
            case _:
                raise ValueError(f"{deployment!r} is none of {DEPLOYMENTS}")

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def masters(self) -> list[RedisServer]:
        """Those that clients write to."""
        match self.running:
            case RedisSentinel() as watched:
                return [watched.master]
            case RedisCluster() as cluster:
                return list(cluster.masters)
            case one:
                return [one]

    @property
    def sentinels(self) -> Sequence[RedisServer]:
        return self.running.sentinels if isinstance(self.running, RedisSentinel) else ()

    def ask(self, *words: Word) -> list[Reply]:
        """Each master's reply. Raises `OSError`, `Refused`."""
        return [master.ask(*words) for master in self.masters]

    def keys(self) -> dict[str, int]:
        """Every key, and in how many milliseconds it ends; -1: never."""
        found: dict[str, int] = {}
        for master in self.masters:
            names = master.ask("KEYS", "*")
            assert isinstance(names, list)
            for name in map(str, names):
                ends = master.ask("PTTL", name)
                assert isinstance(ends, int)
                found[name] = ends
        return found

    def await_whole(self) -> None:
        if not isinstance(self.running, RedisServer):
            self.running.await_whole()

    def fail_over(self) -> RedisServer:
        """A master is killed, and another takes its place. Returns the dead one."""
        match self.running:
            case RedisSentinel() as watched:
                old: RedisServer = watched.master
                old.kill()
                watched.await_master(other_than=old)
            case RedisCluster() as cluster:
                old = cluster.masters[0]
                old.kill()
                cluster.await_whole()
            case _:
                raise ValueError("a server alone has no other to take its place")
        return old

    def change_places(self) -> None:
        """A master and its replica, both alive."""
        match self.running:
            case RedisSentinel() as watched:
                old: RedisServer = watched.master
                watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
                watched.await_master(other_than=old)
            case RedisCluster() as cluster:
                replica = cluster.replica_of(cluster.masters[0])
                replica.ask("CLUSTER", "FAILOVER")
                wait_until(lambda: replica.is_master, "the replica to be the master")
            case _:
                raise ValueError("a server alone has no replica")

    @contextmanager
    def set_up(self, **directives: str | int) -> Iterator[None]:
        """Every master, by CONFIG SET, with - for _; afterwards as it was."""
        with _set(self.masters, {name.replace("_", "-"): value for name, value in directives.items()}):
            yield

    @contextmanager
    def nearly_full(self, room: int) -> Iterator[None]:
        """No master has more than `room` bytes of memory left."""
        before = {master: _number(master, "maxmemory") for master in self.masters}
        for master in before:
            # what was deleted is freed by another thread
            wait_until(lambda one=master: one.info("memory")["lazyfree_pending_objects"] == "0", "what is freed late")  # type: ignore[misc]
            master.ask("CONFIG", "SET", "maxmemory", int(master.info("memory")["used_memory"]) + room)
        try:
            yield
        finally:
            for master, limit in before.items():
                master.ask("CONFIG", "SET", "maxmemory", limit)

    def patient(self) -> AbstractContextManager[None]:
        """Meanwhile no other master is made, however long one is away; for what is done to it and put right again."""
        return nullcontext() if isinstance(self.running, RedisServer) else patient(self.running)


@contextmanager
def patient(servers: ReplicatedRedis) -> Iterator[None]:
    """Take no server for dead meanwhile, however long it is away. News spreads more slowly, too.

    A node that is started in it does not know, which does no harm: it alone cannot say that another has failed.
    """
    servers.give_up_after(FOR_EVER)
    try:
        yield
        servers.await_whole()  # else one that is just back is still missed
    finally:
        servers.give_up_after(servers.gives_up_after)


@contextmanager
def _set(servers: Sequence[RedisServer], directives: dict[str, str | int]) -> Iterator[None]:
    before = [(server, name, _setting(server, name)) for server in servers for name in directives]
    for server in servers:
        for name, value in directives.items():
            server.ask("CONFIG", "SET", name, value)
    try:
        yield
    finally:
        for server, name, value in before:
            server.ask("CONFIG", "SET", name, value)


def _setting(server: RedisServer, name: str) -> str:
    reply = server.ask("CONFIG", "GET", name)
    assert isinstance(reply, list)
    return str(reply[1])


def _number(server: RedisServer, name: str) -> int:
    return int(_setting(server, name))


def slot_of(cluster: RedisCluster, store: RedisStore, shard: int) -> int:
    """The slot that the servers put a shard's keys into."""
    slot = cluster.masters[0].ask("CLUSTER", "KEYSLOT", store._open().layout.tags[shard])
    assert isinstance(slot, int)
    return slot


def master_of(cluster: RedisCluster, slot: int) -> ClusterNode:
    """The node that serves `slot`, as a node that runs sees it."""
    ranges: Any = next(node for node in cluster.nodes if node.running).ask("CLUSTER", "SLOTS")
    [port] = [master[1] for first, last, master, *_ in ranges if first <= slot <= last]
    return next(node for node in cluster.nodes if node.port == port)
