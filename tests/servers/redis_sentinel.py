"""Redis under Sentinel: a master, its replicas, and the three who decide which of them the master is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.child import Running, ServerFailed
from tests.servers.redis_server import HOST, RedisServer
from tests.servers.resp import Refused, Reply
from tests.waiting import wait_until

SERVICE = "mymaster"
QUORUM = 2
DOWN_AFTER = 1_000
"""Milliseconds without an answer after which a sentinel takes a server for dead.

A machine that tests do much on may stand still for longer: where no test wants a failover, more of it is better.
"""
FAILOVER_TIMEOUT = 3_000
_FOR_EVER = 100_000_000
_PERIODS = {"publish-period": 200, "info-period": 500, "ask-period": 200, "tilt-period": 1_000}
"""Milliseconds between what sentinels do again and again, and how long they trust nothing after a pause of their own:
shorter than the 2 s, 10 s, 1 s and 30 s that they come with, so that tests are."""


class Sentinel(RedisServer):
    """One of those who watch. The server's own program serves: redis-sentinel is another name for it."""

    def __init__(self, directory: Path, master: RedisServer) -> None:
        super().__init__(directory)
        self._watched = master

    def directives(self) -> dict[str, str]:
        return {
            "bind": HOST,
            "dir": f'"{self.directory.resolve()}"',
            f"sentinel monitor {SERVICE}": f"{HOST} {self._watched.port} {QUORUM}",
            f"sentinel down-after-milliseconds {SERVICE}": str(DOWN_AFTER),
            f"sentinel failover-timeout {SERVICE}": str(FAILOVER_TIMEOUT),
            f"sentinel parallel-syncs {SERVICE}": "1",
        }

    def flags(self) -> list[str]:
        return ["--sentinel"]

    def await_ready(self) -> None:
        super().await_ready()
        with contextlib.suppress(Refused):  # before 7.0 the periods are fixed
            for name, period in _PERIODS.items():
                self.ask("SENTINEL", "DEBUG", name, period)


class RedisSentinel(Running):
    """A master with `replicas` followers and three sentinels with a quorum of two, below `directory`.

    `options` are those of `RedisServer`, for the servers that hold data. When the master dies or hangs for longer than
    `down_after`, in milliseconds, another is master a second later. A server that comes back follows the present one.
    """

    def __init__(self, directory: Path, *, replicas: int = 2, down_after: int = DOWN_AFTER, **options: Any) -> None:
        self.down_after = down_after
        self.servers = [RedisServer(directory / f"server-{one}", **options) for one in range(1 + replicas)]
        first = self.servers[0]
        self.sentinels = [Sentinel(directory / f"sentinel-{one}", first) for one in range(3)]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"{HOST}:{one.port}" for one in self.sentinels) + f"/{SERVICE}/0"

    def start(self) -> None:
        """The replicas are linked; the sentinels know them and each other. Raises `ServerMissing`, `ServerFailed`."""
        try:
            first, *others = self.servers
            first.start()
            for server in others:
                server.options.setdefault("replicaof", f"{HOST} {first.port}")
                server.launch()
            for server in others:
                server.await_ready()
            wait_until(lambda: all(map(_linked, others)), "the replicas to be linked", passes=(OSError, Refused))
            for sentinel in self.sentinels:
                sentinel.launch()
            for sentinel in self.sentinels:
                sentinel.await_ready()
            self.await_whole()
            if self.down_after != DOWN_AFTER:
                self._give_up_after(self.down_after)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """All that run are ended."""
        for one in (*self.sentinels, *self.servers):
            one.kill()

    @property
    def master(self) -> RedisServer:
        """The server that most sentinels name, whether it runs or not. Raises `ServerFailed` when they do not agree."""
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

    def await_master(self, *, other_than: RedisServer) -> RedisServer:
        """The next master, once it takes writes."""

        def promoted() -> bool:
            master = self.master
            return master is not other_than and master.info("replication")["role"] == "master"

        wait_until(promoted, "another master", passes=(OSError, Refused, ServerFailed))
        return self.master

    def await_whole(self) -> None:
        """Until every sentinel sees the others, and every server alive."""
        wait_until(self._whole, "the sentinels to see each other and all servers", passes=(OSError, Refused))

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Meanwhile nobody is taken for dead, however long it is away."""
        self._give_up_after(_FOR_EVER)
        try:
            yield
            self.await_whole()
        finally:
            self._give_up_after(self.down_after)

    def _give_up_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            sentinel.ask("SENTINEL", "SET", SERVICE, "down-after-milliseconds", milliseconds)

    def _whole(self) -> bool:
        for sentinel in self.sentinels:
            master = _fields(sentinel.ask("SENTINEL", "MASTER", SERVICE))
            if (master["flags"], master["num-other-sentinels"]) != ("master", str(len(self.sentinels) - 1)):
                return False
            replicas = sentinel.ask("SENTINEL", "REPLICAS", SERVICE)
            assert isinstance(replicas, list)
            seen = [_fields(one) for one in replicas]
            if len(seen) != len(self.servers) - 1 or any(
                one["flags"] != "slave" or one["master-link-status"] != "ok" for one in seen
            ):
                return False
        return True


def _linked(server: RedisServer) -> bool:
    return server.info("replication").get("master_link_status") == "up"


def _fields(reply: Reply) -> dict[str, str]:
    """A flat list of names and values as a mapping."""
    assert isinstance(reply, list)
    words = [str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
