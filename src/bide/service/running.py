"""Runs an instance under uvicorn: from the settings to the last answer."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from math import ceil
from typing import Protocol

import uvicorn

from bide.app import Bide
from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.service.config import MOST_CONNECTIONS, ServeConfig, TopicConfig, read_config
from bide.service.heads import BoundedHeads
from bide.service.server import Service
from bide.service.serving import Serving

_log = logging.getLogger("bide.serve")
_BACKLOG = 2048
_KEEP_ALIVE = 75
"""Seconds that an idle connection of a client is kept: longer than proxies keep theirs, so that they close first."""


class Beside(Protocol):
    """Something that runs in the same process, with handlers on the same app."""

    async def ready(self) -> None:
        """Called before anything of the store is worked on; may raise BadInput, StoreError."""
        ...

    def beside(self, where: str) -> AbstractAsyncContextManager[None]:
        """Entered once the app is open and its handlers are at work, and left once the last call is answered."""
        ...


async def serve(
    app: Bide, config: ServeConfig, *, host: str, port: int, insecure: bool, shown_store: str,
    begin: Callable[[Callable[[str], object], Millis], object], company: Beside | None = None,
) -> None:  # fmt: skip
    """Serve until told to stop: `begin` is given what drains, and the grace, before anything is begun.

    Raises BadInput, SetupError, StoreError.
    """
    told = asyncio.Event()

    def drain(why: str) -> None:
        _log.info("%s: draining; a second one ends at once", why)
        told.set()

    listening = _bind(host, port)
    try:
        if company is not None:
            await company.ready()
        serving = Serving(app, config, host=host, insecure=insecure)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            begin(drain, app.terms.grace)
            await stack.enter_async_context(serving)
            shown, number = listening.getsockname()[:2]
            where = f"http://[{shown}]:{number}" if ":" in shown else f"http://{shown}:{number}"
            listening.listen(_BACKLOG)  # who reads or is told where it is may call at once
            _log.info("bide serve: %s from %s, pid %d", where, shown_store, os.getpid())
            if serving.open_to_all:
                _log.warning("as long as there is no token, whoever reaches %s may do anything (bide token add)", where)
            if company is None:
                await _run_server(serving, listening, told)
            else:
                async with company.beside(where):
                    await _run_server(serving, listening, told)
    finally:
        listening.close()
    _log.info("bide serve: pid %d has stopped", os.getpid())


async def _run_server(serving: Serving, listening: socket.socket, told: asyncio.Event) -> None:
    """Webhooks and connections have one grace, which begins for both with the first signal."""
    loop = asyncio.get_running_loop()
    grace = serving.app.terms.grace / 1000
    server = _Server(under_uvicorn(serving.service, grace, serving.config.connections))

    async def let_go() -> None:
        await told.wait()
        server.should_exit = True
        cutting = loop.call_later(grace, server.cut)
        try:
            await serving.let_go()
            await ended.wait()
        finally:
            cutting.cancel()

    ended = asyncio.Event()
    letting_go = asyncio.ensure_future(let_go())
    try:
        await server.serve(sockets=[listening])
    finally:
        ended.set()
        if not told.is_set():
            letting_go.cancel()
        await asyncio.gather(letting_go, return_exceptions=True)


def under_uvicorn(service: Service, grace: float, connections: int = MOST_CONNECTIONS) -> uvicorn.Config:
    """How the service is run, for so many connections at most.

    A call that runs for longer than `grace` seconds after the signal is cancelled.
    """
    return uvicorn.Config(
        service, http=BoundedHeads, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=True, timeout_keep_alive=_KEEP_ALIVE, backlog=_BACKLOG, timeout_graceful_shutdown=ceil(grace) + 1,
        proxy_headers=False, limit_concurrency=connections,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Leaves the signals to the command, from before it starts until everything is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """End the connections whose client neither reads nor sends: each has had the whole grace."""
        connections = list(self.server_state.connections)
        if connections:
            _log.warning("%d connections were open after the grace, and are cut", len(connections))
        for connection in connections:
            connection.transport.abort()


def config_of(path: str | None, webhooks: Sequence[str], allow: Sequence[str]) -> ServeConfig:
    """What the file says, and the options. Raises BadInput."""
    config = ServeConfig() if path is None else read_config(path)
    for given in webhooks:
        topic, equals, url = given.partition("=")
        if not equals or not topic or not url:
            raise BadInput("--webhook", given, "TOPIC=URL, such as order.close=https://shop.example/hooks")
        if topic in config.topics:
            raise BadInput("--webhook", given, f"a topic that the file does not speak of; {topic} is in it")
        config.topics[topic] = TopicConfig(webhook=url)
    config.webhooks.allow.extend(allow)
    return config


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a wrong address is said before anything is opened. Raises SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio sets no TCP_NODELAY
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        advice = ""
        if error.errno == errno.EADDRINUSE:
            advice = f"; give another port, such as --port {port % 65_535 + 1}, or --port 0 for any that is free"
        raise SetupError(f"--host {host} --port {port}: cannot listen there: {error}{advice}") from None
    listening.set_inheritable(True)
    return listening
