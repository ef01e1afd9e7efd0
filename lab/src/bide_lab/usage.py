"""What the servers of a cell use, as this machine shows it: processes are found by the ports that they listen on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from bide.cli.bench.server import family, spent, stat

_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


class ServerUse:
    """All servers of a cell together. None where one is not to be seen: on another machine, or somebody else's."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls
        ports = {port for url in urls.values() if (port := urlsplit(url).port)}
        found = _listeners(ports)
        self._processes = [Path("/proc") / str(pid) for pid in sorted(set(found.values()))]
        self._whole = set(found) == ports

    def cpu(self) -> float | None:
        """Seconds of processor time so far, of the servers and their children."""
        try:
            return sum(_spent(place) for place in self._processes) if self._whole else None
        except OSError:
            return None

    async def size(self) -> int | None:
        """Bytes that they hold: in memory, or for a database in its tables; None where one does not say."""
        sizes = [await _size(kind, url) for kind, url in self._urls.items()]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            return sum(known)
        return self._resident() if set(self._urls) == {"rabbitmq"} else None

    def _resident(self) -> int | None:
        if not self._whole:
            return None
        total = 0
        for process in self._processes:
            with suppress(OSError):
                total += int((process / "statm").read_text(encoding="ascii").split()[1])
        return total * os.sysconf("SC_PAGE_SIZE")


def _spent(process: Path) -> float:
    """Seconds of all threads that it and its children have now, and what children took that have ended."""
    total = stat(process).waited
    for place in family(process):
        for thread in (place / "task").glob("*"):
            with suppress(OSError):  # it ended a moment ago
                total += spent(thread)
    return total


async def _size(kind: str, url: str) -> int | None:
    """By the server's own account."""
    if kind == "redis":
        from redis.asyncio import Redis

        async with Redis.from_url(url) as redis:
            return int((await redis.info("memory"))["used_memory"])
    if kind == "postgres":
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            return int(await connection.fetchval("SELECT pg_database_size(current_database())"))
        finally:
            await connection.close()
    return None


def _listeners(ports: Iterable[int]) -> dict[int, int]:
    """By port: the process that listens there, the eldest if several share the socket."""
    wanted = set(ports)
    sockets: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                port = int(words[1].rpartition(":")[2], 16)
                if words[3] == _LISTENS and port in wanted:
                    sockets[f"socket:[{words[9]}]"] = port
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    port = sockets.get(os.readlink(descriptor), 0)
                    if port and int(process.name) < found.get(port, 1 << 62):
                        found[port] = int(process.name)
    return found
