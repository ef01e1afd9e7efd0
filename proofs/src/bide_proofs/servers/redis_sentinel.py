"""Redis under Sentinel: a master, its replicas, and the three who decide which of them the master is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bide_proofs.servers.process import HOST, ServerFailed, until
from bide_proofs.servers.redis import RedisServer, Refused, ReplicatedRedis, Reply
from bide_proofs.servers.server import start_all

SERVICE = "mymaster"
QUORUM = 2
DOWN_AFTER = 1_000
"""Milliseconds without an answer after which a sentinel takes a server for dead.

A machine that tests do much on may stand still for longer: where no test wants a failover, more of it is better.
"""
FAILOVER_TIMEOUT = 3_000
_PERIODS = {"publish-period": 200, "info-period": 500, "ask-period": 200, "tilt-period": 1_000}
"""Milliseconds between what sentinels do again and again, and how long they trust nothing after a pause of their own:
shorter than the 2 s, 10 s, 1 s and 30 s that they come with, so that tests are."""


class Sentinel(RedisServer):
    """One of those who watch. The server's own program serves: redis-sentinel is another name for it."""

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

    `options` are those of `RedisServer`, for the servers that hold data. When the master dies or hangs for longer than
    `down_after`, in milliseconds, another is master a second later. A server that comes back follows the present one.
    """

    server: ClassVar[type[RedisServer]] = RedisServer

    def __init__(
        self,
        directory: Path,
        *,
        down_after: int = DOWN_AFTER,
        failover_timeout: int = FAILOVER_TIMEOUT,
        **options: Any,
    ) -> None:
        self.gives_up_after = down_after
        self.servers = [
            self.server(directory / f"server-{number}", name=f"server {number}", **options) for number in (1, 2, 3)
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
        """Start all, and wait until the replicas are linked and the sentinels know them and each other."""
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
        """The server that most sentinels name, whether it runs or not. Raises ServerFailed when they do not agree."""
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
        """Wait until another server is the master and takes writes, and return it."""
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
    """The URL by way of sentinels at these ports."""
    return f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in ports)}/{SERVICE}/0"


def _fields(reply: Reply) -> dict[str, str]:
    """A flat list of names and values as a mapping."""
    assert isinstance(reply, list)
    words = [str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
