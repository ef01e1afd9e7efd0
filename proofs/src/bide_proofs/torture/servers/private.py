"""The base of all private servers under torture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bide.testing.proxy import FaultProxy
from bide_proofs.servers.clock import ServerClock
from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST, ServerMissing
from bide_proofs.servers.server import Running
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.suffering import Suffering, in_thread, trouble_of


class PrivateServer:
    """A `Server`, whose parts go by one clock that can be set, where libfaketime is installed.

    Its parts start, suffer and end on threads, so that its proxies, which live on the event loop, never stand still.
    """

    name: str
    server: Running
    """All its parts together, where its kind needs no more to start and to stop."""
    gives_back = False
    durability: ClassVar[str]
    set_up: ClassVar[str]
    lacks: ClassVar[Mapping[str, str]] = {}
    """Troubles that no server of the kind can have, with the reason."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.urls: Sequence[str] = ()
        self.direct = ""
        self.proxies: Sequence[FaultProxy] = ()
        self.cannot: Mapping[str, str] = {}
        self.environment: Mapping[str, str] = {}
        self.version = ""
        self.nodes: Sequence[OnDisk] = ()
        """The servers that have a disk."""
        self.clock: ServerClock | None = None
        self._no_clock = ""
        try:
            self.clock = ServerClock()
        except ServerMissing as error:
            self._no_clock = str(error)
        self.farthest = suffering.FARTHEST if self.clock else 0.0

    @property
    def ahead(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's."""
        return self.clock.ahead if self.clock else 0.0

    async def start(self) -> None:
        """As `Server`."""
        try:
            await self._start()
        except BaseException as error:
            try:
                await self.stop()
            except Exception as more:  # noqa: BLE001 - what came first says why
                error.add_note(f"and then it could not be stopped: {more!r}")
            raise

    async def _start(self) -> None:
        await in_thread(self.run)
        await self.open()
        refused = next((node.disk.refused for node in self.nodes if node.disk.refused), "")
        found = {suffering.CLOCK: self._no_clock, suffering.DISK: refused, **self.lacks}
        self.cannot = {name: reason for name, reason in found.items() if reason}

    def run(self) -> None:
        """Start all its parts, and set `version`; on a thread."""
        self.server.start()

    async def open(self) -> None:
        """Open the proxies, and set `urls` and `direct`; on the event loop."""
        raise NotImplementedError

    def end(self) -> None:
        """End all its parts; on a thread."""
        self.server.stop()

    async def proxy(self, port: int, *, host: str = HOST, at: int = 0) -> FaultProxy:
        """Open one more of `proxies` before that port, at port `at` if given."""
        proxy = FaultProxy(host, port)
        proxy.port = at
        await proxy.accept()
        self.proxies = (*self.proxies, proxy)
        return proxy

    async def stop(self) -> None:
        """As `Server`."""
        try:
            for proxy in self.proxies:
                await proxy.close()
        finally:
            await in_thread(self.end)

    def troubles(self) -> Mapping[str, Trouble]:
        """As `Server`."""
        there = self.sufferings()
        if self.clock is not None:
            there = {**there, suffering.CLOCK: suffering.clock_set(self.clock)}
        return {name: trouble_of(one) for name, one in there.items() if name not in self.cannot}

    def sufferings(self) -> Mapping[str, Suffering]:
        """The troubles of its parts by name, also those that it `cannot` have here."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """As `Server`."""
        return {"version": self.version, "durability": self.durability, "set-up": self.set_up}
