"""The servers that tests share: what they are called, where they are named, and how each is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bide_proofs.servers.mariadb import MariaDbPair, MariaDbServer
from bide_proofs.servers.postgres import PostgresServer
from bide_proofs.servers.rabbitmq import RabbitMqServer
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_cluster import RedisCluster
from bide_proofs.servers.redis_sentinel import RedisSentinel
from bide_proofs.servers.rocketmq import RocketMqServer
from bide_proofs.servers.server import Running


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of server."""

    variable: str
    """The environment variable with the URL of one that runs already."""
    make: Callable[[Path], Running]
    """A new one, with its data below the given folder, not started."""
    asked_for: bool = False
    """Started only when it is asked for by name: large, or needed by few tests."""


_NEVER = 600_000
"""Milliseconds until others take over: a machine that stands still for a second is no reason to."""
KINDS: Mapping[str, Kind] = {
    "redis": Kind(variable="TEST_REDIS_URL", make=RedisServer),
    "cluster": Kind(variable="TEST_REDIS_CLUSTER_URL", make=partial(RedisCluster, node_timeout=_NEVER)),
    "sentinel": Kind(variable="TEST_REDIS_SENTINEL_URL", make=partial(RedisSentinel, down_after=_NEVER)),
    "postgres": Kind(variable="TEST_POSTGRES_URL", make=PostgresServer),
    "mysql": Kind(variable="TEST_MYSQL_URL", make=MariaDbServer),
    "mysql_replica": Kind(variable="TEST_MYSQL_REPLICA_URL", make=MariaDbPair, asked_for=True),
    "rabbitmq": Kind(variable="TEST_RABBITMQ_URL", make=RabbitMqServer),
    "rocketmq": Kind(variable="TEST_ROCKETMQ_URL", make=RocketMqServer, asked_for=True),
}
OF_REDIS = ("redis", "cluster", "sentinel")
"""The kinds that keep keys."""


class SharedServers:
    """One of each kind, started when it is first asked for, and not at all where the environment names one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = ExitStack()
        self.urls: dict[str, str] = {}
        """Those asked for so far, by kind."""

    def url(self, kind: str) -> str:
        """The URL of a server of the `kind`. Raises ServerMissing, ServerFailed."""
        if kind not in self.urls:
            one = KINDS[kind]
            self.urls[kind] = os.environ.get(one.variable) or self._start(one, self._folder / kind)
        return self.urls[kind]

    def _start(self, kind: Kind, folder: Path) -> str:
        server = kind.make(folder)
        server.start()
        self._started.callback(server.stop)
        return server.url

    def stop(self) -> None:
        """Those that were started here."""
        self._started.close()
