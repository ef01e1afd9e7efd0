"""An instance of the service for tests: real, on a free port of this machine, in this loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from tests.service.prompt_server import PromptServer
from tests.waiting import PATIENCE

from bide import Bide
from bide.service.serving import ServeConfig, ServiceInstance, under_uvicorn

T = TypeVar("T")


class Instance:
    """A running instance."""

    def __init__(self, url: str, serving: ServiceInstance, app: Bide, server: PromptServer) -> None:
        self.url = url
        self.serving = serving
        self.app = app
        self.server = server
        self._loop = asyncio.get_running_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this in its loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)


@asynccontextmanager
async def served(store: Any, config: ServeConfig | None = None, **settings: Any) -> AsyncIterator[Instance]:
    """An instance on `store`, in the running loop."""
    app = Bide(store, **settings)
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # as `running` does
        listening.bind(("127.0.0.1", 0))
        listening.listen(2048)  # who calls before the server is up waits for it
        async with ServiceInstance(app, config or ServeConfig(), host="127.0.0.1") as serving:
            server = PromptServer(under_uvicorn(serving.service, app.config.grace / 1000, serving.config.connections))
            running = asyncio.ensure_future(server.serve(sockets=[listening]))
            try:
                yield Instance(f"http://127.0.0.1:{listening.getsockname()[1]}", serving, app, server)
            finally:
                await serving.drain()
                server.end()
                await running
