"""Two instances of `bide serve` on one private store, each behind a proxy, as are their own ways to the store."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.private import PrivateServer, remove_all
from bide_proofs.torture.servers.processes import HOST

_PATIENCE = 2.0


class _Instance(Node):
    """One, which keeps its port over a restart."""

    async def prepare(self, store: str) -> None:
        """Its folder and its proxy are there, and it knows where the store is."""
        self._environment = {"BIDE_STORE": store}
        self.home.make()
        await self.proxy.accept()

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "bide", "serve", "--port", str(self.port), "--log-level", "warning"]

    async def answers(self) -> bool:
        import aiohttp

        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE)) as session,
                session.get(f"http://{HOST}:{self.port}/healthz") as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{self.name}: {error}") from error


class HttpServer(PrivateServer):
    """Over `store`, which is started, tortured and stopped with them."""

    def __init__(self, folder: Path, store: PrivateServer) -> None:
        super().__init__(folder)
        self.name = "http" if store.name == "redis" else f"http-{store.name}"
        self.store = store
        self._clock = store.shared_clock
        self.farthest = store.farthest
        self.instances = [_Instance(f"instance {number}", folder / f"instance-{number}") for number in (1, 2)]
        self.direct = _url(self.instances[0].port)

    async def _start(self) -> None:
        await self.store.start()
        for place, instance in enumerate(self.instances):
            await instance.prepare(self.store.urls[place % len(self.store.urls)])
            instance.launch()
        for instance in self.instances:
            await instance.ready()
        self.urls = tuple(_url(instance.proxy.port) for instance in self.instances)
        self.proxies = (*(instance.proxy for instance in self.instances), *self.store.proxies)
        self.cannot = self.store.cannot

    async def stop(self) -> None:
        try:
            await remove_all(self.instances)
        finally:
            await self.store.stop()

    async def clock(self) -> Millis:
        """Milliseconds, by the store behind."""
        return await self.store.clock()

    def _troubles(self) -> Mapping[str, Trouble]:
        async def one(chance: random.Random) -> Node:
            return chance.choice(self.instances)

        return {
            "kill -9 of an instance": suffering.killed(one),
            "restart of an instance": suffering.restarted(one),
            "SIGSTOP of an instance": suffering.stood_still(one),
            **self.store.troubles(),
        }

    def about(self) -> dict[str, Any]:
        behind = self.store.about()
        return {
            **behind,
            "set-up": f"two instances of bide serve, each behind a proxy; the store: "
            f"{behind['set-up']}; the troubles of the server are the store's",
        }


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"
