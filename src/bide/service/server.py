"""The service as an ASGI application: routes a request to its call or page, authenticates the caller, answers, counts.

Paths are matched as they were sent, still percent-encoded, so that keys such as `a/b`, `%` and `?` work. Every error is
answered as `application/problem+json`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from functools import partial

from bide.core.errors import BadInput, OutcomeUnknown, StoreError
from bide.core.options import TRACE_HEADERS
from bide.engine.client import Client
from bide.engine.session import acting_as
from bide.ports.remote import STREAM_TYPE
from bide.service.access import Access, AccessRefused, Networks, TokenBucket, Verb, audit, audit_refused, audit_unknown
from bide.service.console.pages import Router
from bide.service.contract import CALLS, document
from bide.service.health import Health
from bide.service.metrics import Metrics
from bide.service.remote import StoreCalls
from bide.service.requests import (
    CONTENT_TYPE,
    OPEN_LIMIT,
    ClientDisconnected,
    Problem,
    Receive,
    Reply,
    Request,
    Routes,
    Scope,
    Send,
    StreamingReply,
    encode,
    problem_of,
    segment,
)
from bide.service.verbs import Verbs

_log = logging.getLogger("bide.service")
_OPEN = frozenset({b"/healthz", b"/readyz", b"/openapi.json"})
"""Paths that need no authentication, since they reveal nothing about tasks."""
_WITHOUT_QUERY = frozenset(call.name for call in CALLS if not call.query)
_FAREWELL = 1.0
"""The most seconds for sending the end of a stream."""
_GONE = 499
"""The status counted for a caller who disconnects before the answer, as in nginx."""


Page = Callable[[Request], Awaitable[Reply | StreamingReply]]


class Service:
    """The application: the calls of the contract, the store calls of bide's own clients, health, metrics, console."""

    def __init__(
        self, client: Client, access: Access, verbs: Verbs, store_calls: StoreCalls,
        *, health: Health, metrics: Metrics, console: Router, proxies: Networks = (),
    ) -> None:  # fmt: skip
        self._client = client
        self._access = access
        self._store_calls = store_calls
        self._metrics = metrics
        self._console = console
        self._proxies = proxies
        self._loop = asyncio.get_running_loop()
        self._health = health
        self._routes: Routes[tuple[str, Page]] = Routes(
            [
                *((call.method, call.path, (call.name, getattr(verbs, call.name))) for call in CALLS),
                ("GET", "/healthz", ("/healthz", self._live)),
                ("GET", "/readyz", ("/readyz", self._ready)),
                ("GET", "/metrics", ("/metrics", self._exposition)),
                ("GET", "/openapi.json", ("openapi", self._document)),
                ("POST", "/v1/store/{operation}", ("store", self._store)),
            ]
        )
        self._complaints = TokenBucket(1, 1.0, self._loop.time())
        """Limits the log to one line a second, since every request fails while the store is unavailable."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = self._loop.time()
        request = Request(scope, receive)
        request.proxies = self._proxies
        name = "unknown"
        reply: Reply | StreamingReply | None
        try:
            request.check_host()
            name, page, known = self._route(request)
            if not known:
                request.reauthorize = partial(self._authenticate, request)
                await request.reauthorize()
                await request.read()
                if request.raw_query and name in _WITHOUT_QUERY:
                    accepted = "no query; a question mark within a topic or a key is %3F"
                    raise BadInput("query", request.raw_query.decode("latin-1"), accepted)
            elif name != "console":  # a page reads its body itself, after authenticating the viewer
                await request.read(OPEN_LIMIT)
            with acting_as(request.caller.name, audit), self._traced(request):
                reply = await page(request)
            status = 200 if isinstance(reply, StreamingReply) else reply.status
        except ClientDisconnected:
            reply, status = None, _GONE
        except Exception as error:  # noqa: BLE001 - every error is answered
            self._note(request, name, error)
            problem = problem_of(error)
            reply = Reply(problem.status, problem.body, CONTENT_TYPE, problem.headers)
            status = reply.status
        if isinstance(reply, Reply):
            await _send(reply, send, head=request.method == "HEAD")
        request.body = b""  # the request itself lives until the garbage collector runs
        self._metrics.request(name, status, self._loop.time() - started)
        if isinstance(reply, StreamingReply):
            await self._stream(reply, request, send)

    # --- from request to answer

    def _traced(self, request: Request) -> AbstractContextManager[None]:
        """Continue the caller's trace, if the app is traced."""
        carrier = self._client.carrier
        if carrier is None:
            return nullcontext()
        return carrier.received(
            {name: value for name in TRACE_HEADERS if (value := request.header(name.encode())) is not None}
        )

    def _route(self, request: Request) -> tuple[str, Page, bool]:
        """Return the name of the call, its endpoint, and True if it needs no authentication here. Raises Problem."""
        path, method = request.path, request.method
        route = self._routes.find(path)
        if route is None:
            if path.split(b"/")[1:2] != [b"v1"]:
                page = self._console.find(request)
                if page is not None:
                    return "console", page, True
                if "text/html" in (request.header(b"accept") or ""):
                    return "unknown", self._console.not_found, True
            raise Problem(404, "no-such-call", "There is no such call", "see /openapi.json for all calls")
        calls, parts = route
        request.segments = tuple(segment(raw, name) for name, raw in parts.items())
        found = calls.get(method)
        if found is None:
            allowed = ", ".join(sorted(calls))
            raise Problem(
                405, "not-allowed", "This method is not supported here", f"{method}: give {allowed}",
                headers={"allow": allowed}, field="method", accepted=allowed,
            )  # fmt: skip
        return *found, path in _OPEN

    async def _authenticate(self, request: Request) -> float:
        request.caller = await self._access.caller_of_request(request.headers)
        return self._access.lasts

    def _note(self, request: Request, name: str, error: Exception) -> None:
        """Log what an operator has to know of a failed call: a refusal, an unavailable store, a defect."""
        if isinstance(error, AccessRefused):
            audit_refused(error, request.peer)
        elif isinstance(error, StoreError):
            if self._complaints.take(self._loop.time()):
                _log.warning("%s: %s", name, error)
            if isinstance(error, OutcomeUnknown):
                topic, key = request.segments if len(request.segments) == 2 else (None, None)
                audit_unknown(request.caller.name, name, topic, key)
        elif problem_of(error).status == 500:
            _log.exception("a defect in %s", name, exc_info=error)

    async def _stream(self, streaming: StreamingReply, request: Request, send: Send) -> None:
        """Send the stream until it ends, the client disconnects, or the caller loses access."""
        headers = [*_HEADERS, (b"content-type", streaming.content_type.encode()), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def pump() -> None:
            async with aclosing(streaming.parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})

        try:
            await request.while_connected(pump())
        except ClientDisconnected:
            return
        except (AccessRefused, StoreError) as error:
            _log.info("the stream of %s was ended: %s", request.caller.name, error)
        except Exception as error:  # noqa: BLE001 - the answer has begun, so no other can be sent
            _log.error("a stream ended with an error", exc_info=error)
        with suppress(TimeoutError):  # do not wait for a client that does not read
            async with asyncio.timeout(_FAREWELL):
                await send({"type": "http.response.body", "body": b""})

    # --- calls that are answered here

    async def _store(self, request: Request) -> Reply | StreamingReply:
        """A store call of one of bide's own clients: see `remote`."""
        [operation] = request.segments
        if operation == "listen":
            return StreamingReply(self._store_calls.listen(request.body, request.caller), STREAM_TYPE)
        note = partial(self._note, request, operation)
        return await self._store_calls.answer(operation, request.body, request.caller, note)

    async def _document(self, request: Request) -> Reply:
        return Reply(200, document())

    async def _live(self, request: Request) -> Reply:
        """Any answer shows that the process is alive."""
        return Reply(200, b'{"status":"ok"}')

    async def _ready(self, request: Request) -> Reply:
        found = await self._health.ready()
        return Reply(found.status, encode(found.document()), headers={"cache-control": "no-store"})

    async def _exposition(self, request: Request) -> Reply:
        request.caller.check(Verb.METRICS, None)
        return Reply(200, *await self._metrics.exposition())


_HEADERS = [(b"server", b"bide"), (b"x-content-type-options", b"nosniff")]


async def _send(reply: Reply, send: Send, *, head: bool) -> None:
    headers = [*_HEADERS, (b"content-length", b"%d" % len(reply.body))]
    if reply.body:
        headers.append((b"content-type", reply.content_type.encode()))
    headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in reply.headers.items()]
    if reply.status == 304:
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else reply.body})
