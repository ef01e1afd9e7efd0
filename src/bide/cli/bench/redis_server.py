"""The Redis behind a store, as a benchmark sees it: through a plain client, beside the store's own connections.

All keys of a namespace `N` begin with `{N}:` or, in its shard 7, with `{N:7}:`; what is in the braces decides where on
a Cluster a key lives.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4

from bide.cli.bench.server import Load
from bide.cli.bench.worker import PAYLOAD
from bide.core.errors import BadInput, StoreUnavailable
from bide.settings import Settings
from bide.wiring import store_maker

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "redis+sentinel")
_AT_ONCE = 1000
_OUTER = re.compile(r"cmdstat_(evalsha|eval|fcall)(_ro)?$|cmdstat_exec$")
"""Commands whose time includes that of the commands that they run, which are counted a second time by themselves."""
_MEASURING = re.compile(r"cmdstat_(info|ping)$")
_HOUR = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Whole microseconds spent on commands since the server began."""

    outer: int
    """On scripts and transactions."""
    others: int
    """On all other commands, whether they came from outside or out of a script: a server does not say which."""

    def since(self, before: Busy) -> int:
        """Of scripts and transactions alone if there were any, as the time of what they ran is in theirs.

        So what was sent beside a script is left out: better too little than the same time twice.
        """
        return self.outer - before.outer or self.others - before.others


class RedisServer:
    """One server, or all masters of a Cluster, and the namespace that the benchmark works in."""

    kind = "redis"
    remembers_heads = True

    def __init__(self, client: Redis | RedisCluster, namespace: str) -> None:
        self.client: Any = client
        self.namespace = namespace

    def make(self) -> None:
        """Opening a store is enough."""

    def size(self) -> int:
        """Bytes of memory that the masters use, whoever put them there."""
        return sum(int(info["used_memory"]) for info in self._info("memory"))

    def load(self) -> Load:
        """What the masters did so far. A request: something read from a client, what is sent together, up to 16 KiB."""
        at = time.monotonic()
        cpu = sum(info["used_cpu_sys"] + info["used_cpu_user"] for info in self._info("cpu"))
        return Load(at=at, cpu=cpu, requests=sum(int(info["total_reads_processed"]) for info in self._info("stats")))

    def busy(self) -> Busy:
        """What the masters spent on commands so far, without reading and sending."""
        outer = others = 0
        for info in self._info("commandstats"):
            for name, figures in info.items():
                if _OUTER.match(name):
                    outer += int(figures["usec"])
                elif not _MEASURING.match(name):
                    others += int(figures["usec"])
        return Busy(outer=outer, others=others)

    def clear(self, namespace: str | None = None) -> None:
        """Remove every key of `namespace`, or of this one."""
        for master in self._masters():
            for keys in _in_batches(_keys_of(master, namespace or self.namespace)):
                # keys with one tag live in one slot: others in one call are an error on a Cluster
                by_tag: dict[bytes, list[bytes]] = {}
                for key in keys:
                    by_tag.setdefault(key.partition(b"}")[0], []).append(key)
                for together in by_tag.values():
                    master.unlink(*together)

    def is_empty(self) -> bool:
        """Whether the namespace has no keys at all."""
        return not any(True for master in self._masters() for _ in _keys_of(master, self.namespace))

    def watch(self) -> CommandWatch:
        """By its own count of the time that it spent on commands."""
        return CommandWatch(self)

    def raw(self) -> RawRedis:
        return RawRedis(self)

    def flush(self) -> None:
        """It appends as it goes; a rewrite of its file that has begun is left to itself."""

    def health(self) -> Mapping[str, int]:
        return {"used_bytes": self.size()}

    def snapshot(self) -> AbstractContextManager[None]:
        raise BadInput("--snapshot", self.kind, "a database that has them: PostgreSQL, MySQL")

    @property
    def is_cluster(self) -> bool:
        return hasattr(self.client, "get_primaries")

    def _masters(self) -> list[Any]:
        if not self.is_cluster:
            return [self.client]
        return [self.client.get_redis_connection(node) for node in self.client.get_primaries()]

    def _info(self, section: str) -> list[dict[str, Any]]:
        return [master.info(section) for master in self._masters()]


class CommandWatch:
    """How long a server, which works for nobody else, is busy with it, in microseconds."""

    step = 1.0

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def start(self) -> None:
        self._began = self._server.busy()

    def stop(self) -> float:
        return self._server.busy().since(self._began)


class RawRedis:
    """Pipelines of SET and ZADD pairs, in a namespace of its own; on a Cluster spread over as many tags as ours is."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._namespace = f"bench-limit-{uuid4().hex}"
        tags = [f"{self._namespace}:{shard}" for shard in range(16)] if server.is_cluster else [self._namespace]
        self._prefixes = [f"{{{tag}}}:" for tag in tags]

    def store(self, keys: Sequence[str]) -> None:
        due_at = time.time_ns() // 1_000_000 + _HOUR
        pipeline = self._server.client.pipeline(transaction=False)
        for key, prefix in zip(keys, cycle(self._prefixes), strict=False):
            pipeline.set(prefix + key, PAYLOAD)
            pipeline.zadd(prefix + "due", {key: due_at})
        pipeline.execute()

    def close(self) -> None:
        self._server.clear(self._namespace)


def _keys_of(master: Any, namespace: str) -> Iterator[bytes]:
    prefix = re.compile(rb"\{%b(:[0-9]+)?\}:" % re.escape(namespace.encode()))
    pattern = f"{{{namespace}[:}}]*"  # a store takes no namespace with a sign that means something in a pattern
    return (key for key in master.scan_iter(match=pattern, count=_AT_ONCE) if prefix.match(key))


def _in_batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for key in keys:
        batch.append(key)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def redis_server(url: str) -> Iterator[tuple[RedisServer, str]]:
    """The server that `url` names, and the URL with a fresh namespace unless it names one.

    Raises BadInput, MissingExtra, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    namespace = query.get("namespace") or f"bench-{uuid4().hex}"
    if not query.get("namespace"):
        url = f"{url}{'&' if '?' in url else '?'}namespace={namespace}"
    store_maker(url, Settings())  # says what is wrong with it, or missing
    from redis import RedisError

    try:
        client = connect(url)
        try:
            client.ping()
            yield RedisServer(client, namespace), url
        finally:
            client.close()
    except RedisError as error:
        raise StoreUnavailable(f"the Redis server of the benchmark: {error}") from error


def connect(url: str) -> Any:
    """A plain client for a URL that the store accepts."""
    from redis import Redis, RedisCluster
    from redis.cluster import ClusterNode
    from redis.sentinel import Sentinel

    new_node: Any = ClusterNode  # these two have no annotations
    new_sentinel: Any = Sentinel
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    username, password = _credentials(parts.netloc)
    options: dict[str, Any] = {"username": username, "password": password}
    options |= {name: value for name, value in query.items() if name.startswith("ssl_")}
    if parts.scheme == "rediss" or query.get("tls") in {"1", "true"}:
        options["ssl"] = True
    path = [unquote(one) for one in parts.path.split("/") if one]
    if parts.scheme == "redis+cluster":
        return RedisCluster(startup_nodes=[new_node(*one) for one in _hosts(parts.netloc, 6379)], **options)
    options["db"] = int(query.get("db", 0))
    if parts.scheme == "unix":
        return Redis(unix_socket_path=unquote(parts.path), **options)
    if parts.scheme == "redis+sentinel":
        for_sentinels = {name: query.get(f"sentinel_{name}") for name in ("username", "password")}
        sentinel = new_sentinel(_hosts(parts.netloc, 26379), sentinel_kwargs=for_sentinels)
        options["db"] = int(path[1]) if len(path) > 1 else options["db"]
        return sentinel.master_for(path[0], **options)
    [(host, port)] = _hosts(parts.netloc, 6379)
    options["db"] = int(path[0]) if path else options["db"]
    return Redis(host=host, port=port, **options)


def _credentials(netloc: str) -> tuple[str | None, str | None]:
    """User and password; one word alone is the password."""
    username, colon, password = netloc.rpartition("@")[0].partition(":")
    if not colon:
        username, password = "", username
    return unquote(username) or None, unquote(password) or None


def _hosts(netloc: str, default_port: int) -> list[tuple[str, int]]:
    """Each host with its port, `[::1]:6379` too."""
    hosts = []
    for one in (netloc.rpartition("@")[2] or "localhost").split(","):
        host, colon, port = one.rpartition(":")
        named = bool(colon) and port.isdigit()
        hosts.append(((host if named else one).strip("[]"), int(port) if named else default_port))
    return hosts
