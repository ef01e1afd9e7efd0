"""A service that has the store calls alone, on a real socket of this machine, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.service.prompt_server import PromptServer
from tests.waiting import until

from bide.engine.client import Client
from bide.engine.config import EngineConfig
from bide.ports import Store, remote
from bide.service.access import ANONYMOUS_CALLER, AccessRefused, Caller, Unauthorized
from bide.service.remote import StoreCalls
from bide.stores.http import HttpStore

CallerOf = Callable[[str | None], Caller]
"""Who shows this Authorization header; raises AccessRefused."""
HOST = "127.0.0.1"


class Service:
    """The store calls over `make_store`, on a port that it keeps over a restart."""

    def __init__(
        self,
        make_store: Callable[[], Store],
        *,
        trusting: bool = False,
        caller_of: CallerOf = lambda _: ANONYMOUS_CALLER,
        payload_limit: int = 2 << 20,
        body_limit: int = 8 << 20,
    ) -> None:
        self._make_store = make_store
        self._trusting = trusting
        self._caller_of = caller_of
        self._terms = EngineConfig(payload_limit=payload_limit)
        self._body_limit = body_limit
        self.body_taken = body_limit
        """Bytes of a body that are taken, whatever clients are told."""
        self.port = 0
        self.asked: list[str] = []
        """The operations that were asked for, in order."""
        self.before: Callable[[str], Awaitable[Response | None]] | None = None
        """Called with each operation: what it returns is the answer."""
        self._client: Client | None = None
        self.calls: StoreCalls
        self._server: PromptServer | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        self._client = await Client(self._make_store, config=self._terms).open()
        self.calls = StoreCalls(self._client, trusting=self._trusting, body_limit=self._body_limit)
        app = Starlette(routes=[Route("/v1/store/{operation}", self._call, methods=["POST"])])
        config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, timeout_graceful_shutdown=1)
        server = self._server = PromptServer(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        # asyncio turns Nagle's algorithm off where it is told that this is TCP; else an answer takes 40 ms
        listening = socket.socket(proto=socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, self.port))
        self.port = listening.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(server._serve(sockets=[listening]))
        await until(lambda: server.started, "the server listens")

    async def stop(self, *, abrupt: bool = False) -> None:
        """Nothing listens any more, and who had a connection is cut off."""
        assert self._server is not None
        assert self._task is not None
        assert self._client is not None
        if abrupt:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        self._server.force_exit = True
        self._server.end()
        await self._task
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self.calls.close()
        await self._client.close()

    async def restart(self) -> None:
        """Another instance at the same port, which knows nothing of the first."""
        await self.stop(abrupt=True)
        await self.start()

    async def _call(self, request: Request) -> Response:
        operation: str = request.path_params["operation"]
        self.asked.append(operation)
        if self.before is not None:
            instead = await self.before(operation)
            if instead is not None:
                return instead
        try:
            caller = self._caller_of(request.headers.get("authorization"))
            body = await request.body()
            if len(body) > self.body_taken:
                return problem(413, "the body is too large")
            if operation == "listen":
                return StreamingResponse(self.calls.listen(body, caller), media_type=remote.STREAM_TYPE)
        except AccessRefused as refused:
            return problem(refused.status, refused.detail)
        answered = await self.calls.answer(operation, body, caller)
        return Response(answered.body, answered.status, dict(answered.headers), answered.content_type)


def problem(status: int, detail: str) -> Response:
    """As the service says it outside of the store calls."""
    return Response(f'{{"detail": "{detail}"}}', status, media_type="application/problem+json")


def only(token: str, caller: Caller) -> CallerOf:
    """Whoever shows this token is this caller; nobody else is let in."""

    def caller_of(header: str | None) -> Caller:
        if header is None:
            raise Unauthorized("a token is needed", sent=False)
        if header != f"Bearer {token}":
            raise Unauthorized("this token is not known here")
        return caller

    return caller_of


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Service]:
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[HttpStore]:
    store = HttpStore(url, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened(service: Service, **options: Any) -> AsyncIterator[HttpStore]:
    """The service while it runs, by way of a store at its URL."""
    async with serving(service), connected(service.url, **options) as store:
        yield store
