"""Two instances of `bide serve` on one private store, each behind a proxy, as are their own ways to the store."""

from __future__ import annotations

import random
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide_proofs.servers.process import HOST
from bide_proofs.servers.server import ServerProcess, stop_all
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.private import PrivateServer
from bide_proofs.torture.servers.suffering import trouble_of

_PATIENCE = 2.0


class _Instance(ServerProcess):
    """One, which keeps its port over a restart."""

    title = "bide serve"
    store = ""

    @property
    def url(self) -> str:
        return _url(self.port)

    def environment(self) -> Mapping[str, str]:
        return {"BIDE_STORE": self.store}

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "bide", "serve", "--port", str(self.port), "--log-level", "warning"]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=_PATIENCE) as answer:
            return bool(answer.status == 200)


class TorturedService(PrivateServer):
    """Over `store`, which is started, tortured and stopped with them."""

    def __init__(self, folder: Path, store: PrivateServer) -> None:
        super().__init__(folder)
        self.name = "http" if store.name == "redis" else f"http-{store.name}"
        self.store = store
        self.clock = store.clock
        self.instances = [_Instance(folder / f"instance-{number}", name=f"instance {number}") for number in (1, 2)]

    async def _start(self) -> None:
        await self.store.start()
        for place, instance in enumerate(self.instances):
            instance.store = self.store.urls[place % len(self.store.urls)]
        await super()._start()
        self.cannot = self.store.cannot

    def run(self) -> None:
        for instance in self.instances:
            instance.launch()
        for instance in self.instances:
            instance.await_ready()

    async def open(self) -> None:
        self.direct = self.instances[0].url
        self.urls = [_url((await self.proxy(instance.port)).port) for instance in self.instances]
        self.proxies = (*self.proxies, *self.store.proxies)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self.store.stop()

    def end(self) -> None:
        stop_all(self.instances)

    def troubles(self) -> Mapping[str, Trouble]:
        def one(chance: random.Random) -> ServerProcess:
            return chance.choice(self.instances)

        return {
            "kill -9 of an instance": trouble_of(suffering.killed(one)),
            "restart of an instance": trouble_of(suffering.restarted(one)),
            "SIGSTOP of an instance": trouble_of(suffering.stood_still(one)),
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
