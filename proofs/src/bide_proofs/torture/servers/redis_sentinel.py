"""A Redis master with two replicas, and three Sentinels who decide which of them is the master, each behind a proxy.

Between a Sentinel and its proxy stands who tells clients the port of a server's proxy in place of the server's own. So
what befalls the clients' connections does not befall replication, nor those who watch over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.private import PrivateServer, remove_all
from bide_proofs.torture.servers.processes import HOST, ServerFailed, until
from bide_proofs.torture.servers.redis import memory_full, shared_cannot
from bide_proofs.torture.servers.redis_node import DURABILITY, RedisNode, Refused

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
            follows = {"replicaof": f"{HOST} {self.first.port}"}
        return {**super().directives(), **follows}

    def follow(self, master: _Server) -> None:
        """From its next start on it does. Else it would take itself for the master until a Sentinel comes by, and
        whatever it answered meanwhile would be lost."""
        configuration = self.home.path / "redis.conf"
        lines = configuration.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith(("replicaof ", "slaveof "))]
        configuration.write_text("\n".join([*kept, f"replicaof {HOST} {master.port}", ""]), encoding="utf-8")


class _Sentinel(RedisNode):
    """One of those who watch. It keeps nothing, and goes by the machine's clock."""

    def __init__(self, name: str, folder: Path, first: _Server, teller: _Teller) -> None:
        super().__init__(name, folder)
        self._first = first
        self._teller = teller

    async def prepare(self) -> None:
        self.home.make()
        self.proxy.target_port = await self._teller.listen(self.port)
        await self.proxy.accept()

    def directives(self) -> Mapping[str, str | int]:
        return {
            "bind": HOST,
            "port": self.port,
            "dir": f'"{self.home.path.resolve()}"',
            f"sentinel monitor {SERVICE}": f"{HOST} {self._first.port} {QUORUM}",
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


class _Teller:
    """Passes on what clients and Sentinels say to each other, with the ports of the servers' proxies for their own.

    Both have five digits, so that no length in an answer changes.
    """

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers
        self._listening: list[asyncio.Server] = []

    async def listen(self, port: int) -> int:
        """Where clients reach the Sentinel at `port`."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection(HOST, port)
                ways = (self._pass_on(reader, there_writer), self._pass_on(there_reader, writer, told=True))
                await asyncio.gather(*ways, return_exceptions=True)
            writer.close()

        server = await asyncio.start_server(serve, HOST, 0)
        self._listening.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, told: bool = False) -> None:
        try:
            while data := await reader.read(65_536):
                for server in self._servers if told else ():
                    data = data.replace(b"$5\r\n%d\r\n" % server.port, b"$5\r\n%d\r\n" % server.proxy.port)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def close(self) -> None:
        for server in self._listening:
            server.close()
        self._listening.clear()


class RedisSentinel(PrivateServer):
    """Redis under Sentinel."""

    name = "redis-sentinel"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = ("server 1", "server 2", "server 3")
        self.servers = [_Server(name, folder / name.replace(" ", "-"), self._clock) for name in names]
        for follower in self.servers[1:]:
            follower.first = self.servers[0]
        self._teller = _Teller(self.servers)
        self.sentinels = [
            _Sentinel(f"sentinel {number}", folder / f"sentinel-{number}", self.servers[0], self._teller)
            for number in (1, 2, 3)
        ]
        self.direct = _url(sentinel.port for sentinel in self.sentinels)
        self.proxies = tuple(node.proxy for node in (*self.servers, *self.sentinels))
        self._version = ""

    async def _start(self) -> None:
        nodes = (*self.servers, *self.sentinels)
        for node in nodes:
            await node.prepare()
        for node in nodes:
            node.launch()
        for node in nodes:
            await node.ready()
        await self.await_whole()
        self.urls = (_url(sentinel.proxy.port for sentinel in self.sentinels),)
        self._version = (await self.servers[0].info("server"))["redis_version"]
        self.cannot = {
            suffering.CROWDED: "on one Redis server alone: here replicas and Sentinels are among the clients",
            **shared_cannot(self._clock, self.servers),
        }

    async def stop(self) -> None:
        self._teller.close()
        await remove_all((*self.sentinels, *self.servers))

    async def clock(self) -> Millis:
        """Milliseconds, by the servers, which go by one clock."""
        return await (await self.master()).time()

    async def master(self) -> _Server:
        """The one that most Sentinels name. Raises ServerFailed when they do not agree."""
        words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        named = [int((await sentinel.ask(*words))[1]) for sentinel in self.sentinels]
        for port in set(named):
            if named.count(port) >= QUORUM:
                return next(server for server in self.servers if server.port == port)
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

    def _troubles(self) -> Mapping[str, Trouble]:
        async def master(chance: random.Random) -> Node:
            return await self.master()

        async def replica(chance: random.Random) -> Node:
            there = await self.master()
            return chance.choice([server for server in self.servers if server is not there])

        async def sentinel(chance: random.Random) -> Node:
            return chance.choice(self.sentinels)

        async def masters() -> Sequence[RedisNode]:
            return [await self.master()]

        return {
            suffering.KILL: suffering.killed(master),
            "kill -9 of a replica": suffering.killed(replica),
            "kill -9 of a Sentinel": suffering.killed(sentinel),
            suffering.RESTART: suffering.restarted(master),
            suffering.STILL: suffering.stood_still(master),
            suffering.FAILOVER: self._failover,
            suffering.HAND_OVER: self._hand_over,
            suffering.MEMORY: memory_full(masters),
            suffering.DISK: suffering.disk_full(master, lambda node: _server(node).disk),
            suffering.CLOCK: suffering.clock_set(self._clock),
        }

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
            await self._give_up_after(_AT_ONCE)
            took = await self._another(old)
            await asyncio.sleep(away)
        finally:
            await self._give_up_after(_DOWN_AFTER)
            if old.running:
                await old.ask("CLIENT", "UNPAUSE")
            elif catch_up and (new := await self.master()) is not old:
                old.follow(new)
            await old.mend()
            await self.await_whole()
        new = await self.master()
        return f"killed {old.name}, the master; {new.name} was it after {took:.1f} s, and the old one followed it later"

    async def _another(self, old: _Server) -> float:
        """Until the Sentinels have made another master; seconds."""

        async def promoted() -> bool:
            master = await self.master()
            return master is not old and await master.is_master()

        return await until(promoted, "another master")

    async def _give_up_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            await sentinel.ask("SENTINEL", "SET", SERVICE, "down-after-milliseconds", milliseconds)

    async def _hand_over(self, chance: random.Random) -> str:
        """Master and replica change places, both alive, as docs/redis.md has it for an upgrade.

        Nothing is written to the old one until it follows the new. It is told that by us, since the connection by which
        a Sentinel would tell it waits in the same line: it has published something there.
        """
        await self.await_whole()
        old, took, asked = await self.master(), 0.0, False
        try:
            await old.let_replicas_catch_up()
            asked = True
            await chance.choice(self.sentinels).ask("SENTINEL", "FAILOVER", SERVICE)
        finally:
            if asked:
                took = await self._another(old)
                await old.ask("REPLICAOF", HOST, (await self.master()).port)
            await old.ask("CLIENT", "UNPAUSE")
            await self.await_whole()
        return f"{(await self.master()).name} took over from {old.name}, which lived, within {took:.1f} s"

    def about(self) -> dict[str, Any]:
        return {
            "version": f"Redis {self._version}",
            "durability": f"{DURABILITY}; a failover keeps what the replicas had",
            "set-up": "a master, two replicas and three Sentinels, each behind a proxy, replication not; a "
            "failover befalls a master whose writes are paused (CLIENT PAUSE) until its replicas have all that it has, "
            "since Redis promises nothing about what they lack",
        }


def _url(ports: Iterable[int]) -> str:
    return f"redis+sentinel://{','.join(f'{HOST}:{port}' for port in ports)}/{SERVICE}/0"


def _server(node: Node) -> _Server:
    assert isinstance(node, _Server)
    return node


def _fields(reply: Sequence[str]) -> dict[str, str]:
    """A flat list of names and values as a mapping."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
