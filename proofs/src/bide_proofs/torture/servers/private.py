"""What all servers of our own have in common towards those who torture them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide.testing.proxy import FaultProxy
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.node import Node


async def remove_all(nodes: Iterable[Node]) -> None:
    """Each is removed, whatever becomes of the others. Raises what the first has failed with."""
    errors: list[Exception] = []
    for node in nodes:
        try:
            await node.remove()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]


class PrivateServer:
    """A `Server`, whose parts go by one clock that can be set, where libfaketime is installed."""

    name: str
    gives_back = False

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.urls: Sequence[str] = ()
        self.direct = ""
        self.proxies: Sequence[FaultProxy] = ()
        self.cannot: Mapping[str, str] = {}
        self.environment: Mapping[str, str] = {}
        self._clock = FakeClock()
        self.farthest = self._clock.farthest

    @property
    def shared_clock(self) -> FakeClock:
        """For who stands before it."""
        return self._clock

    @property
    def ahead(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's."""
        return self._clock.ahead

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._clock.shift(seconds)

    async def clock(self) -> Millis:
        """Milliseconds, by the store itself."""
        raise NotImplementedError

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
        """It runs, and `urls`, `direct`, `proxies` and `cannot` are known."""
        raise NotImplementedError

    async def stop(self) -> None:
        """As `Server`."""
        raise NotImplementedError

    def troubles(self) -> Mapping[str, Trouble]:
        """As `Server`."""
        return {name: trouble for name, trouble in self._troubles().items() if name not in self.cannot}

    def _troubles(self) -> Mapping[str, Trouble]:
        """All there are, also those that it `cannot` have here."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """As `Server`."""
        raise NotImplementedError
