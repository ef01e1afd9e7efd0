"""One Redis server, durable as docs/redis.md asks for, and what it is asked past every proxy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.disks import Disk
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.processes import program, until

_DISK = 512 << 20
MAXMEMORY = 1 << 30
"""As in deploy/compose.yaml."""
_SILENCE = 60.0
"""Seconds without an answer to us."""
DURABILITY = "appendonly yes, appendfsync everysec: what was answered outlives a kill of the process"


class RedisNode(Node):
    """With its append-only file on a disk of its own."""

    def __init__(self, name: str, folder: Path, clock: FakeClock | None = None) -> None:
        super().__init__(name, folder, clock)
        self.disk = Disk(folder / "disk", size=_DISK)

    async def prepare(self) -> None:
        """The folders and the proxy are there; nothing runs yet."""
        self.home.make()
        self.disk.make()
        await self.proxy.accept()

    def directives(self) -> Mapping[str, str | int]:
        """Its configuration; a name may have a space in it, and so begin a longer line."""
        return {
            "bind": self.host,
            "port": self.port,
            "dir": f'"{self.disk.place.resolve()}"',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory": MAXMEMORY,
            "maxmemory-policy": "noeviction",
            # through a file: without one a replica waits up to 5 s for others before it gets anything
            "repl-diskless-sync": "no",
        }

    def command(self) -> Sequence[str]:
        configuration = self.home.path / "redis.conf"
        if not configuration.exists():  # the server itself rewrites it when it is told to follow another
            lines = [f"{name} {rest}\n" for name, rest in self.directives().items()]
            configuration.write_text("".join(lines), encoding="utf-8")
        return [program("redis-server", "redis-server"), str(configuration)]

    async def has_room(self) -> None:
        """The append-only file is written anew: one that a full disk cut short may be refused at the next start."""

        async def written() -> bool:
            told = await self.info("persistence")
            return told["aof_rewrite_in_progress"] == told["aof_rewrite_scheduled"] == "0"

        await until(written, f"{self.name} to be done with writing its file anew")
        await self.ask("BGREWRITEAOF")
        await until(written, f"{self.name} to write its file anew")

    async def answers(self) -> bool:
        return (await self.info("server"))["process_id"] == str(self.pid) and await self.ask("PING") == "PONG"

    async def ask(self, *words: str | int) -> Any:
        """The reply to one command, on a connection of its own, past the proxy. Raises Refused for an error, OSError
        where nobody answers."""
        return (await self.ask_all(words))[0]

    async def ask_all(self, *commands: Sequence[str | int]) -> list[Any]:
        """Several, one after the other, on one connection."""
        async with Asking(self.host, self.port) as asking:
            return [await asking(*words) for words in commands]

    async def info(self, section: str) -> dict[str, str]:
        """What INFO (or for "cluster" CLUSTER INFO) says, field by field."""
        words = ("CLUSTER", "INFO") if section == "cluster" else ("INFO", section)
        reply: str = await self.ask(*words)
        return dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)

    async def is_master(self) -> bool:
        """What it takes itself for; who does not answer is none."""
        try:
            return (await self.info("replication"))["role"] == "master"
        except OSError:
            return False

    async def is_linked(self) -> bool:
        """Whether it follows a master that it hears."""
        return (await self.info("replication")).get("master_link_status") == "up"

    async def time(self) -> Millis:
        """Milliseconds, by its own clock."""
        seconds, micros = await self.ask("TIME")
        return int(seconds) * 1_000 + int(micros) // 1_000

    async def let_replicas_catch_up(self, *, pause: int = 120_000) -> None:
        """Nothing is written from now on, for at most `pause` ms, and all replicas that are linked have all that was.

        Raises ServerFailed when they do not come to have it, or there is none.
        """
        await self.ask("CLIENT", "PAUSE", pause, "WRITE")

        async def have_it() -> bool:
            told = await self.info("replication")
            replicas = [rest for name, rest in told.items() if name.startswith("slave") and "offset=" in rest]
            reached = [dict(part.split("=") for part in rest.split(",")) for rest in replicas]
            there = [one for one in reached if one["state"] == "online"]
            return bool(there) and all(one["offset"] == told["master_repl_offset"] for one in there)

        await until(have_it, f"the replicas of {self.name} to have what it has")

    async def remove(self) -> None:
        """As Node; in order a master would wait for its replicas, and what was answered is written anyway."""
        await self.kill()
        await super().remove()
        self.disk.remove()


class Refused(OSError):
    """An error reply, such as LOADING; the message is the server's."""


class Asking:
    """A connection to one server, as a context; called with the words of a command, it returns the reply."""

    def __init__(self, host: str, port: int) -> None:
        from redis.asyncio.connection import Connection

        self._connection = Connection(
            host=host, port=port, socket_timeout=_SILENCE, socket_connect_timeout=_SILENCE, protocol=2,
            decode_responses=True, client_name="torture", retry_on_timeout=False, retry=None,
        )  # fmt: skip

    async def __aenter__(self) -> Asking:
        from redis.exceptions import RedisError

        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
        except RedisError as error:
            await self._connection.disconnect(nowait=True)
            raise OSError(f"no connection to port {self._connection.port}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.disconnect(nowait=True)

    async def __call__(self, *words: str | int) -> Any:
        from redis.exceptions import RedisError, ResponseError

        try:
            await self._connection.send_command(*words)
            return await self._connection.read_response()
        except ResponseError as error:
            raise Refused(f"{' '.join(map(str, words[:2]))}: {error}") from error
        except RedisError as error:
            raise OSError(f"port {self._connection.port}: {error}") from error
