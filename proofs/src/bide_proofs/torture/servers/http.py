"""Two instances of `bide serve` on one private store. Proxies stand before each instance and before the store."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bide_proofs.servers.process import HOST
from bide_proofs.servers.server import ServiceProcess, start_all, stop_all
from bide_proofs.torture.server import PrivateServer, Trouble, fault_on, killed, restarted, stood_still


class TorturedService(PrivateServer):
    """Two instances over `store`, which is started, tortured and stopped with them."""

    name = "http"

    def __init__(self, folder: Path, store: PrivateServer) -> None:
        super().__init__(folder)
        self.store = store
        self.clock = store.clock
        self.instances = [ServiceProcess(folder / f"instance-{number}", name=f"instance {number}") for number in (1, 2)]

    async def start(self) -> None:
        await self.store.start()
        for place, instance in enumerate(self.instances):
            instance.store = self.store.urls[place % len(self.store.urls)]
        await super().start()
        self.cannot = self.store.cannot

    def run(self) -> None:
        start_all(self.instances)

    async def open(self) -> None:
        self.direct = self.instances[0].url
        self.urls = [f"http://{HOST}:{(await self.proxy(instance.port)).port}" for instance in self.instances]
        self.proxies = (*self.proxies, *self.store.proxies)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self.store.stop()

    def end(self) -> None:
        stop_all(self.instances)

    def troubles(self) -> Mapping[str, Trouble]:
        def one(chance: random.Random) -> ServiceProcess:
            return chance.choice(self.instances)

        return {
            "kill -9 of an instance": fault_on(one, killed),
            "restart of an instance": fault_on(one, restarted),
            "SIGSTOP of an instance": fault_on(one, stood_still),
            **self.store.troubles(),
        }

    def about(self) -> dict[str, Any]:
        behind = self.store.about()
        return {
            **behind,
            "set-up": f"two instances of bide serve, each behind a proxy; the store: "
            f"{behind['set-up']}; the troubles of the server are the store's",
        }
