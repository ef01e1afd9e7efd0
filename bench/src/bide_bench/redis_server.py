"""The Redis server of a benchmark, seen through a plain client besides the store's own connections.

All keys of a namespace `N` begin with `{N}:` or, in its shard 7, with `{N:7}:`; the text in
braces decides on which node of a Cluster a key lives.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from bide.core.errors import StoreUnavailable
from bide.wiring import address_of
from bide_bench.target import Load, Raw, Stop, Target, due_in_an_hour, named_part
from bide_bench.worker import PAYLOAD

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "redis+sentinel")
_OUTER = re.compile(r"cmdstat_(evalsha|eval|fcall)(_ro)?$|cmdstat_exec$")
"""Commands whose time includes the commands that they run, which are also counted by themselves."""
_MEASURING = re.compile(r"cmdstat_(info|ping)$")


class Busy(NamedTuple):
    """Microseconds spent on commands since the server started."""

    outer: int
    """On scripts and transactions."""
    others: int
    """On all other commands, sent by clients or run by scripts: the server does not tell them apart."""

    def since(self, before: Busy) -> int:
        """The time since `before`: of scripts and transactions alone, if there were any, as it includes what they ran.

        Other commands sent at the same time are then left out: better too little than the same time twice.
        """
        return self.outer - before.outer or self.others - before.others


class RedisServer(Target):
    """One server, or all masters of a Cluster, and the namespace that the benchmark works in."""

    kind = "redis"
    remembers_heads = True
    step = 1.0

    def __init__(self, url: str, client: Redis | RedisCluster, namespace: str) -> None:
        super().__init__(url)
        self.client: Any = client
        self.namespace = namespace

    async def make(self) -> None:
        """Nothing to do: a namespace begins with its first key."""

    async def clear(self) -> None:
        self.remove(self.namespace)

    async def is_empty(self) -> bool:
        """True if the namespace has no keys."""
        return not any(True for master in self.masters() for _ in _keys_of(master, self.namespace))

    async def size(self) -> int:
        """Bytes of memory that the masters use, including other clients' data."""
        return sum(int(info["used_memory"]) for info in self._info("memory"))

    async def health(self) -> Mapping[str, int]:
        return {"used_bytes": await self.size()}

    async def load(self) -> Load:
        """The load of all masters. A request is one read from a client: up to 16 KiB sent together."""
        at = time.monotonic()
        cpu = sum(info["used_cpu_sys"] + info["used_cpu_user"] for info in self._info("cpu"))
        return Load(at, cpu, sum(int(info["total_reads_processed"]) for info in self._info("stats")))

    async def measure(self) -> Stop:
        """Measure the time that the server spends on commands, by its own count."""
        before = self.busy()
        return lambda: self.busy().since(before)

    def busy(self) -> Busy:
        """The time that the masters spent on commands, without reading and sending."""
        outer = others = 0
        for info in self._info("commandstats"):
            for name, figures in info.items():
                if _OUTER.match(name):
                    outer += int(figures["usec"])
                elif not _MEASURING.match(name):
                    others += int(figures["usec"])
        return Busy(outer, others)

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        """Pipelines of SET and ZADD pairs; on a Cluster spread over as many hash tags as a bide store."""
        namespace = f"bench-limit-{uuid4().hex}"
        tags = [f"{namespace}:{shard}" for shard in range(16)] if self.is_cluster else [namespace]

        async def store(keys: Sequence[str]) -> None:
            due_at = due_in_an_hour()
            pipeline = self.client.pipeline(transaction=False)
            for key, tag in zip(keys, cycle(tags), strict=False):
                pipeline.set(f"{{{tag}}}:{key}", PAYLOAD)
                pipeline.zadd(f"{{{tag}}}:due", {key: due_at})
            pipeline.execute()

        try:
            yield store
        finally:
            self.remove(namespace)

    def remove(self, namespace: str) -> None:
        """Remove every key of `namespace`."""
        for master in self.masters():
            found = _keys_of(master, namespace)
            while keys := list(islice(found, 1000)):
                # on a Cluster, the keys of one call must share a hash tag
                by_tag: dict[bytes, list[bytes]] = {}
                for key in keys:
                    by_tag.setdefault(key.partition(b"}")[0], []).append(key)
                for together in by_tag.values():
                    master.unlink(*together)

    @property
    def is_cluster(self) -> bool:
        return hasattr(self.client, "get_primaries")

    def masters(self) -> list[Any]:
        """A client for each master."""
        if not self.is_cluster:
            return [self.client]
        return [self.client.get_redis_connection(node) for node in self.client.get_primaries()]

    def _info(self, section: str) -> list[dict[str, Any]]:
        return [master.info(section) for master in self.masters()]


def _keys_of(master: Any, namespace: str) -> Iterator[bytes]:
    prefix = re.compile(rb"\{%b(:[0-9]+)?\}:" % re.escape(namespace.encode()))
    pattern = f"{{{namespace}[:}}]*"  # namespaces contain no wildcard characters
    return (key for key in master.scan_iter(match=pattern, count=1000) if prefix.match(key))


@asynccontextmanager
async def redis_server(url: str) -> AsyncIterator[RedisServer]:
    """Connect to the server that `url` names, with a fresh namespace unless the URL names one.

    Raises BadInput, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    url = named_part(url, "namespace", f"bench-{uuid4().hex}")
    address = address_of(url)  # raises for a bad URL
    from redis import RedisError

    try:
        client = connect(address)
        try:
            client.ping()
            yield RedisServer(url, client, address.namespace)
        finally:
            client.close()
    except RedisError as error:
        raise StoreUnavailable(f"the Redis server of the benchmark: {error}") from error


def connect(address: Any) -> Any:
    """A plain client for an address of the store's."""
    from redis import Redis, RedisCluster
    from redis.cluster import ClusterNode
    from redis.sentinel import Sentinel

    new_node: Any = ClusterNode  # these two have no annotations
    new_sentinel: Any = Sentinel
    options: dict[str, Any] = {"username": address.username, "password": address.password}
    if address.tls:
        options |= {"ssl": True, **address.tls_options}
    if address.kind == "cluster":
        return RedisCluster(startup_nodes=[new_node(*host) for host in address.hosts], **options)
    if address.kind == "sentinel":
        for_sentinels = {"username": address.sentinel_username, "password": address.sentinel_password}
        sentinel = new_sentinel(address.hosts, sentinel_kwargs=for_sentinels)
        return sentinel.master_for(address.service, db=address.db, **options)
    if address.path is not None:
        return Redis(unix_socket_path=address.path, db=address.db, **options)
    [(host, port)] = address.hosts
    return Redis(host=host, port=port, db=address.db, **options)
