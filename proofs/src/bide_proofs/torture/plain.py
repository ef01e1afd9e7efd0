"""Stores that need no server of ours: a SQLite file, and a server that runs already."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from bide.testing.proxy import FaultProxy
from bide.wiring import without_secrets
from bide_proofs.harness.command import own_place
from bide_proofs.servers.disk import ROOM, Disk
from bide_proofs.torture.server import FARTHEST, Common, Server, Trouble, Wait, for_a_while

_SIZE = 48 * 1024 * 1024
"""The size in bytes of the filesystem that is filled."""
_BELOW_RESERVE = 6 * 1024 * 1024
"""Bytes left free when it is nearly full: fewer than the 16 MiB that are reserved for existing tasks."""
_PORTS = {"redis": 6379, "postgresql": 5432, "postgres": 5432, "mysql": 3306, "mariadb": 3306, "http": 8420}
_HOLDS_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""
"""A separate program: two connections of one process would disturb the others not at all, or too much."""
_NO_SERVER = "there is no server: the processes open the file themselves"
_THROUGH_PROXIES = ("connections reset", "half-open")


class SqliteFile(Server):
    """A file, on its own small filesystem if one may be mounted, so that it can be full.

    Its callers share one clock, which is the store's and can be set.
    """

    name = "sqlite"
    farthest = FARTHEST

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        super().__init__()
        self._disk = Disk(_SIZE)
        self._place = folder / "disk"
        self._own = path is None
        self._file = str(path or self._place / "torture.db")

    async def start(self) -> None:
        refused = "the file is where it was asked for; without a path it gets a filesystem of its own"
        if self._own:
            self._disk.make(self._place)
            refused = self._disk.refused
        without_server = (*_THROUGH_PROXIES, Common.RESTART, Common.FAILOVER, Common.OOM)
        self.cannot = dict.fromkeys(without_server, _NO_SERVER)
        if refused:
            self.cannot[Common.DISK] = refused
        self.direct = f"sqlite:///{quote(self._file)}"
        self.urls = (self.direct,)

    def troubles(self) -> Mapping[str, Trouble]:
        troubles: dict[str, Trouble] = {"another process holds the write lock": self._locked, Common.CLOCK: self._jump}
        if self._disk.mounted:
            troubles |= {
                "disk nearly full": partial(self._full, _BELOW_RESERVE),
                Common.DISK: partial(self._full, ROOM),
            }
        return troubles

    async def stop(self) -> None:
        self._disk.remove()

    def about(self) -> dict[str, Any]:
        return {
            "version": sqlite3.sqlite_version,
            "durability": "synchronous=FULL: what is acknowledged survives a power cut; leases and extensions NORMAL",
            "filesystem": f"tmpfs of {_SIZE >> 20} MiB" if self._disk.mounted else "that of the path",
        }

    def _full(self, left: int, chance: random.Random, wait: Wait) -> str:
        """Leave only `left` bytes free on the disk for a while."""
        seconds = chance.uniform(0.5, 4)
        used, _ = for_a_while(partial(self._disk.fill, left), self._disk.free, seconds, wait)
        return f"the disk was full for {seconds:.1f} s but for {left} bytes, with {used} on it"

    def _locked(self, chance: random.Random, wait: Wait) -> str:
        seconds = chance.uniform(0.2, 8)
        words, pipe = [sys.executable, "-c", _HOLDS_LOCK, self._file], subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True) as holder:
            assert holder.stdout is not None
            try:
                held = holder.stdout.readline() == b"held\n"
                if held:
                    wait(seconds)
            finally:
                holder.kill()
        return (
            f"another process held the write lock for {seconds:.1f} s" if held else "the write lock was not to be had"
        )

    def _jump(self, chance: random.Random, wait: Wait) -> str:
        before, self.ahead = self.ahead, chance.choice((0.0, chance.uniform(-FARTHEST, FARTHEST)))
        wait(chance.uniform(0.5, 3))
        return f"the clock of every process went from {before:+.1f} s to {self.ahead:+.1f} s"


class RunningServer(Server):
    """A server that runs already, behind a proxy. It is never stopped, filled up or given another time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.name = urlsplit(url).scheme
        self.gives_back = self.name == "redis+cluster"
        self.cannot = dict.fromkeys(
            (Common.RESTART, Common.FAILOVER, Common.DISK, Common.OOM, Common.CLOCK), "the server is not one of ours"
        )
        self._entered = AsyncExitStack()

    async def start(self) -> None:
        if self.name != "http":  # an instance of the service has its own store
            self.direct = (await self._entered.enter_async_context(own_place(self.direct, made=True))).url
        url = self.direct
        parts = urlsplit(url)
        port = None if "," in parts.netloc else parts.port or _PORTS.get(parts.scheme)
        if parts.hostname is None or port is None:
            why = "there is no one host and port before which a proxy could stand: give --server instead"
            self.cannot = {**self.cannot, **dict.fromkeys(_THROUGH_PROXIES, why)}
            self.urls = (url,)
        else:
            # two proxies, so that one can be cut off while the other is not
            self.proxies = [
                await self._entered.enter_async_context(FaultProxy(parts.hostname, port)) for _ in range(2)
            ]  # fmt: skip
            self.urls = [_through(url, proxy.port) for proxy in self.proxies]

    async def stop(self) -> None:
        await self._entered.aclose()

    def about(self) -> dict[str, Any]:
        return {"url": without_secrets(self.direct), "durability": "as the server is set up"}


def _through(url: str, port: int) -> str:
    """`url` through a port of this machine."""
    parts = urlsplit(url)
    who, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{who}{at}127.0.0.1:{port}"))


def server_at(url: str, folder: Path) -> Server:
    """The store at this URL."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return SqliteFile(folder, Path(unquote(parts.path.removeprefix("/"))).absolute())
    return RunningServer(url)
