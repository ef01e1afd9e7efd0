"""A Redis master with two replicas, and three Sentinels who decide which of them is the master.

Each server is known to everybody, also to the others, by the address of its proxy. So clients are sent to proxies, and
what befalls connections befalls replication too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide.testing.proxy import FaultProxy
from bide.testing.torture.server import Trouble
from bide.testing.torture.servers import suffering
from bide.testing.torture.servers.clocks import FakeClock
from bide.testing.torture.servers.node import Node
from bide.testing.torture.servers.processes import HOST, ServerFailed, until
from bide.testing.torture.servers.redis import memory_full, shared_cannot
from bide.testing.torture.servers.redis_node import DURABILITY, RedisNode, Refused

SERVICE = "mymaster"
QUORUM = 2
_DOWN_AFTER = 30_000
"""Milliseconds of silence after which a master is taken for dead: Sentinel's own default, so that none is who is only
killed and started again, or stands still for a while."""
_AT_ONCE = 1_000
"""The same while a failover is wanted."""
_LONGEST_AWAY = 2.0
_PERIODS = {"publish-period": 200, "info-period": 500, "ask-period": 200, "tilt-period": 1_000}
"""Milliseconds between what sentinels do again and again, and how long they trust nothing after a pause of their own:
shorter than the 2 s, 10 s, 1 s and 30 s that they come with, so that there are more failovers in a run."""


class _Server(RedisNode):
    """One that holds data; it follows `first`, if it is not that one."""

    first: _Server | None = None

    def directives(self) -> Mapping[str, str | int]:
        follows: dict[str, str | int] = {}
        if self.first is not None:
            follows = {"replicaof": f"{HOST} {self.first.proxy.port}"}
        return {
            **super().directives(), "replica-announce-ip": HOST, "replica-announce-port": self.proxy.port, **follows
        }  # fmt: skip


class _Sentinel(RedisNode):
    """One of those who watch. It keeps nothing, and goes by the machine's clock."""

    def __init__(self, name: str, folder: Path, first: _Server) -> None:
        super().__init__(name, folder)
        self._first = first

    async def prepare(self) -> None:
        self.home.make()
        await self.proxy.accept()

    def directives(self) -> Mapping[str, str | int]:
        return {
            "bind": HOST,
            "port": self.port,
            "dir": f'"{self.home.path.resolve()}"',
            f"sentinel monitor {SERVICE}": f"{HOST} {self._first.proxy.port} {QUORUM}",
            f"sentinel down-after-milliseconds {SERVICE}": _DOWN_AFTER,
            f"sentinel failover-timeout {SERVICE}": 10_000,
            f"sentinel parallel-syncs {SERVICE}": 1,
        }

    def command(self) -> Sequence[str]:
        return [*super().command(), "--sentinel"]

    async def ready(self) -> float:
        took = await super().ready()
        with contextlib.suppress(Refused):  # before 7.0 the periods are fixed
            for name, period in _PERIODS.items():
                await self.ask("SENTINEL", "DEBUG", name, period)
        return took


class RedisSentinel:
    """Redis under Sentinel."""

    name = "redis-sentinel"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.clock_of_it = FakeClock(folder / "clock")
        names = ("server 1", "server 2", "server 3")
        self.servers = [_Server(name, folder / name.replace(" ", "-"), self.clock_of_it) for name in names]
        for follower in self.servers[1:]:
            follower.first = self.servers[0]
        self.sentinels = [
            _Sentinel(f"sentinel {number}", folder / f"sentinel-{number}", self.servers[0]) for number in (1, 2, 3)
        ]
        self.urls: Sequence[str] = ()
        self.proxies: Sequence[FaultProxy] = tuple(node.proxy for node in (*self.servers, *self.sentinels))
        self.cannot: Mapping[str, str] = {}
        self._master = self.servers[0]
        self._version = ""

    @property
    def direct(self) -> str:
        """The master that there is now: the Sentinels know it by the address of its proxy only."""
        return f"redis://{HOST}:{self._master.port}/0"

    async def start(self) -> None:
        nodes = (*self.servers, *self.sentinels)
        try:
            for node in nodes:
                await node.prepare()
            for node in nodes:
                node.launch()
            for node in nodes:
                await node.ready()
            await self.await_whole()
        except BaseException:
            await self.stop()
            raise
        hosts = ",".join(f"{HOST}:{sentinel.proxy.port}" for sentinel in self.sentinels)
        self.urls = (f"redis+sentinel://{hosts}/{SERVICE}/0",)
        self._version = (await self.servers[0].info("server"))["redis_version"]
        self.cannot = {
            "too many connections": "on one Redis server alone: here replicas and Sentinels are among the clients",
            **shared_cannot(self.clock_of_it, self.servers),
        }

    async def stop(self) -> None:
        for node in (*self.sentinels, *self.servers):
            await node.remove()

    async def clock(self) -> Millis:
        """Milliseconds, by the servers, which go by one clock."""
        return await (await self.master()).time()

    async def master(self) -> _Server:
        """The one that most Sentinels name. Raises ServerFailed when they do not agree."""
        named: list[int] = []
        for sentinel in self.sentinels:
            named.append(int((await sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE))[1]))
        for port in set(named):
            if named.count(port) >= QUORUM:
                self._master = next(server for server in self.servers if server.proxy.port == port)
                return self._master
        raise ServerFailed(f"the Sentinels name {named}, and no master that {QUORUM} agree on")

    async def await_whole(self) -> None:
        """Until every Sentinel sees the others, and every server alive and linked. Raises ServerFailed."""
        await until(self._whole, "the Sentinels to see each other and all servers")

    async def _whole(self) -> bool:
        for sentinel in self.sentinels:
            master = _fields(await sentinel.ask("SENTINEL", "MASTER", SERVICE))
            if (master["flags"], master["num-other-sentinels"]) != ("master", str(len(self.sentinels) - 1)):
                return False
            replicas = [_fields(one) for one in await sentinel.ask("SENTINEL", "REPLICAS", SERVICE)]
            if len(replicas) != len(self.servers) - 1:
                return False
            if any(one["flags"] != "slave" or one["master-link-status"] != "ok" for one in replicas):
                return False
        master_now = await self.master()
        return await master_now.is_master()

    def troubles(self) -> Mapping[str, Trouble]:
        async def master(chance: random.Random) -> Node:
            return await self.master()

        async def replica(chance: random.Random) -> Node:
            there = await self.master()
            return chance.choice([server for server in self.servers if server is not there])

        async def sentinel(chance: random.Random) -> Node:
            return chance.choice(self.sentinels)

        async def masters() -> Sequence[RedisNode]:
            return [await self.master()]

        found = {
            "kill": suffering.killed(master),
            "kill a replica": suffering.killed(replica),
            "kill a Sentinel": suffering.killed(sentinel),
            "restart": suffering.restarted(master),
            "stand still": suffering.stood_still(master),
            "failover": self._failover,
            "hand-over": self._hand_over,
            "memory full": memory_full(masters),
            "disk full": suffering.disk_full(master, lambda node: _server(node).disk),
            "clock": suffering.clock_set(self.clock_of_it),
        }
        return {name: trouble for name, trouble in found.items() if name not in self.cannot}

    def lossy(self) -> Mapping[str, Trouble]:
        """What Redis itself may lose acknowledged work by: not for a run that is judged by the promises."""
        return {"failover without notice": self._failover_without_notice}

    async def _failover(self, chance: random.Random) -> str:
        """The master is killed at a moment when its replicas have all that it had."""
        return await self._killed(chance, catch_up=True)

    async def _failover_without_notice(self, chance: random.Random) -> str:
        """The same, whatever its replicas have: what they lack was answered and is lost."""
        return await self._killed(chance, catch_up=False)

    async def _killed(self, chance: random.Random, *, catch_up: bool) -> str:
        await self.await_whole()
        old, away = await self.master(), chance.uniform(0, _LONGEST_AWAY)
        took = 0.0
        try:
            if catch_up:
                await old.let_replicas_catch_up()
            await old.kill()
            took = await self._another(old)
            await asyncio.sleep(away)
        finally:
            if old.running:
                await old.ask("CLIENT", "UNPAUSE")
            await self._give_up_after(_DOWN_AFTER)
            await old.mend()
            await self.await_whole()
        new = await self.master()
        return f"killed {old.name}, the master; {new.name} was it after {took:.1f} s, and the old one followed it later"

    async def _another(self, old: _Server) -> float:
        """Until the Sentinels have found that the master is dead, and made another; seconds."""
        await self._give_up_after(_AT_ONCE)

        async def promoted() -> bool:
            master = await self.master()
            return master is not old and await master.is_master()

        return await until(promoted, "another master")

    async def _give_up_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            await sentinel.ask("SENTINEL", "SET", SERVICE, "down-after-milliseconds", milliseconds)

    async def _hand_over(self, chance: random.Random) -> str:
        """Master and replica change places, both alive, as docs/redis.md has it for an upgrade."""
        await self.await_whole()
        old = await self.master()
        took = 0.0
        try:
            await old.let_replicas_catch_up()
            await chance.choice(self.sentinels).ask("SENTINEL", "FAILOVER", SERVICE)
            took = await self._another_alive(old)
        finally:
            await old.ask("CLIENT", "UNPAUSE")
            await self.await_whole()
        return f"{(await self.master()).name} took over from {old.name}, which lived, within {took:.1f} s"

    async def _another_alive(self, old: _Server) -> float:
        async def follows() -> bool:  # and is no master for anybody any more
            return await self.master() is not old and not await old.is_master()

        return await until(follows, "the old master to follow the new one")

    def about(self) -> dict[str, Any]:
        return {
            "version": f"Redis {self._version}",
            "durability": f"{DURABILITY}; a failover keeps what the replicas had",
            "set-up": "a master, two replicas and three Sentinels, each behind a proxy, replication too; a failover "
            "befalls a master whose writes are paused (CLIENT PAUSE) until its replicas have all that it has, since "
            "Redis promises nothing about what they lack",
        }


def _server(node: Node) -> _Server:
    assert isinstance(node, _Server)
    return node


def _fields(reply: Sequence[str]) -> dict[str, str]:
    """A flat list of names and values as a mapping."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
