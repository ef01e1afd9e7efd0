"""A `bide serve` of its own before the store: what the client and the workers then reach it through."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import Self

from bide.cli.bench.workers import BenchFault
from bide_proofs.soak.crew import environment
from bide_proofs.trial import PATIENCE

_TAIL = 2_000


class Service:
    """One process, on a port of this machine; `async with`."""

    def __init__(self, store: str, folder: Path) -> None:
        self._store = store
        self._log = folder / "service.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Until it answers. Raises BenchFault where it does not."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bide", "serve", "--port", str(self._port), "--log-level", "warning"),
                env={**environment(), "BIDE_STORE": self._store},
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + PATIENCE
        while self._process.returncode is None and time.monotonic() < until:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return self
        await self.__aexit__()
        raise BenchFault(f"the service did not start: {self.said()}")

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), PATIENCE)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def wrong(self) -> list[str]:
        """After the end: whether it ended by itself, or not as it should."""
        code = self._process.returncode
        return [f"the service ended with {code}: {self.said()}"] if code else []

    def said(self) -> str:
        """The last that it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
