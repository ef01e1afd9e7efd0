"""Stores that need no server of ours: a file of SQLite, and a server that somebody else has started."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from bide.testing.proxy import FaultProxy
from bide.wiring import without_secrets
from bide_proofs.harness.stores import own_namespace
from bide_proofs.servers.disk import Disk
from bide_proofs.torture.server import Server, Trouble

_SIZE = 48 * 1024 * 1024
"""Bytes of the filesystem that is filled."""
_BELOW_RESERVE = 6 * 1024 * 1024
"""Bytes left free when it is nearly full: fewer than the 16 MiB that are kept for what is there."""
FARTHEST = 2.0
"""Seconds by which the clock of a file's callers is set wrong, all of them together: for a file it is the store's."""
_PORTS = {"redis": 6379, "postgresql": 5432, "postgres": 5432, "mysql": 3306, "mariadb": 3306, "http": 8420}
_HOLDS_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""
"""A program of its own: two connections of one process would be no trouble to others, or too much."""
_NO_SERVER = "there is no server: the processes open the file themselves"


class SqliteFile:
    """A file, on a small filesystem of its own where that may be mounted, so that it can be full."""

    name = "sqlite"
    gives_back = False
    proxies: Sequence[FaultProxy] = ()

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        self.ahead = 0.0
        self.farthest = FARTHEST
        self.environment: Mapping[str, str] = {}
        self.urls: Sequence[str] = ()
        self.direct = ""
        self.cannot: Mapping[str, str] = {}
        self._folder = folder
        self._path = path
        self._file = ""
        self._disk: Disk | None = None

    async def start(self) -> None:
        cannot = dict.fromkeys(("connections reset", "half-open", "server restart", "failover", "OOM"), _NO_SERVER)
        if self._path is None:
            self._disk = Disk(self._folder / "disk", size=_SIZE)
            self._disk.make()
            place = self._disk.place
            if self._disk.refused:
                cannot["disk full"] = self._disk.refused
        else:
            cannot["disk full"] = "the file is where it was asked for; without a path it gets a filesystem of its own"
            place = self._path.parent
        self._file = str(self._path or place / "torture.db")
        self.direct = f"sqlite:///{quote(self._file)}"
        self.urls = (self.direct,)
        self.cannot = cannot

    def troubles(self) -> Mapping[str, Trouble]:
        troubles: dict[str, Trouble] = {
            "another process holds the write lock": self._locked,
            "clock jump": self._jump,
        }
        if self._disk is not None and self._disk.mounted:
            troubles |= {"disk nearly full": self._nearly_full, "disk full": self._full}
        return troubles

    async def stop(self) -> None:
        if self._disk is not None:
            self._disk.remove()

    def about(self) -> dict[str, Any]:
        return {
            "version": sqlite3.sqlite_version,
            "durability": "synchronous=FULL: what is acknowledged survives a power cut; leases and extensions NORMAL",
            "filesystem": "that of the path"
            if self._disk is None or self._disk.refused
            else f"tmpfs of {_SIZE >> 20} MiB",
        }

    async def _nearly_full(self, chance: random.Random) -> str:
        assert self._disk is not None
        ballast, seconds = self._disk.place / "ballast", chance.uniform(1, 4)
        try:
            await asyncio.to_thread(_write_until, ballast, _BELOW_RESERVE)
            found = os.statvfs(self._disk.place)
            await asyncio.sleep(seconds)
        finally:
            ballast.unlink(missing_ok=True)
        return f"the disk had {found.f_bavail * found.f_frsize} bytes left for {seconds:.1f} s"

    async def _full(self, chance: random.Random) -> str:
        assert self._disk is not None
        seconds = chance.uniform(0.5, 3)
        try:
            used = await asyncio.to_thread(self._disk.fill)
            await asyncio.sleep(seconds)
        finally:
            self._disk.free()
        return f"the disk was full for {seconds:.1f} s with {used} bytes on it"

    async def _locked(self, chance: random.Random) -> str:
        seconds = chance.uniform(0.2, 8)
        holder = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _HOLDS_LOCK, self._file,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert holder.stdout is not None
        try:
            held = await holder.stdout.readline() == b"held\n"
            if held:
                await asyncio.sleep(seconds)
        finally:
            if holder.returncode is None:
                os.kill(holder.pid, signal.SIGKILL)
            await holder.wait()
        return (
            f"another process held the write lock for {seconds:.1f} s" if held else "the write lock was not to be had"
        )

    async def _jump(self, chance: random.Random) -> str:
        before, self.ahead = self.ahead, chance.choice((0.0, chance.uniform(-FARTHEST, FARTHEST)))
        await asyncio.sleep(chance.uniform(0.5, 3))
        return f"the clock of every process went from {before:+.1f} s to {self.ahead:+.1f} s"


def _write_until(ballast: Path, left: int) -> None:
    """Fills the filesystem until so many bytes are free on it."""
    with ballast.open("ab", buffering=0) as file:
        while True:
            found = os.statvfs(ballast.parent)
            excess = found.f_bavail * found.f_frsize - left
            if excess <= 0:
                return
            try:
                file.write(bytes(min(excess, 1 << 20)))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return
                raise


class SomebodysServer:
    """A server that runs already, with a proxy before it; it is not stopped, filled or told another time."""

    def __init__(self, url: str) -> None:
        self.name = urlsplit(url).scheme
        self.gives_back = self.name == "redis+cluster"
        self.ahead = self.farthest = 0.0
        self.environment: Mapping[str, str] = {}
        self.urls: Sequence[str] = ()
        self.direct = url
        self.proxies: Sequence[FaultProxy] = ()
        self.cannot: Mapping[str, str] = dict.fromkeys(
            ("server restart", "failover", "disk full", "OOM", "clock jump"), "the server is somebody else's"
        )
        self._entered = AsyncExitStack()

    async def start(self) -> None:
        async with AsyncExitStack() as entered:
            url = self.direct = await entered.enter_async_context(own_namespace(self.direct, "torture"))
            parts = urlsplit(url)
            port = None if "," in parts.netloc else parts.port or _PORTS.get(parts.scheme)
            if parts.hostname is None or port is None:
                why = "there is no one host and port before which a proxy could stand: give --server instead"
                self.cannot = {**self.cannot, "connections reset": why, "half-open": why}
                self.urls = (url,)
            else:
                # two ways to it, so that one can be cut off while the other is not
                self.proxies = [await entered.enter_async_context(FaultProxy(parts.hostname, port)) for _ in range(2)]
                self.urls = [_through(url, proxy.port) for proxy in self.proxies]
            self._entered = entered.pop_all()

    def troubles(self) -> Mapping[str, Trouble]:
        return {}

    async def stop(self) -> None:
        await self._entered.aclose()

    def about(self) -> dict[str, Any]:
        return {"url": without_secrets(self.direct), "durability": "as the server is set up"}


def _through(url: str, port: int) -> str:
    """`url`, by way of a port of this machine."""
    parts = urlsplit(url)
    who, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{who}{at}127.0.0.1:{port}"))


def server_at(url: str, folder: Path) -> Server:
    """The store at this URL."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return SqliteFile(folder, Path(unquote(parts.path.removeprefix("/"))).absolute())
    return SomebodysServer(url)
