"""The service as an ASGI application: finds the call or the page, finds out who calls, answers, and counts.

Paths are matched as they were sent, still percent-encoded, so that keys such as `a/b`, `%` and `?` work. Everything
that goes wrong is answered as `application/problem+json`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress

from bide.core.errors import BideError, OutcomeUnknown, StoreError
from bide.core.names import check_topic
from bide.core.options import TRACE_HEADERS
from bide.engine.acting import acting_as
from bide.engine.client import Client
from bide.ports.wire import STREAM_TYPE
from bide.service.access import Access
from bide.service.audit import audit, refused, unknown
from bide.service.authz import AccessRefused, Verb
from bide.service.console.router import Site
from bide.service.consuming import Consuming
from bide.service.contract import CALLS, PAUSE_PATH, TASK_PATH, document
from bide.service.health import OPEN, Health, pages_of
from bide.service.metrics import Metrics
from bide.service.replies import CONTENT_TYPE, Problem, Reply, of_error
from bide.service.requests import (
    BODY_LIMIT,
    BODY_PATIENCE,
    OPEN_LIMIT,
    Gone,
    Networks,
    Receive,
    Request,
    Scope,
    Send,
    segment,
)
from bide.service.store_calls import StoreCalls
from bide.service.streaming import AdmitsEvent, Following
from bide.service.verbs import Verbs

_log = logging.getLogger("bide.service")
_FAREWELL = 1.0
"""Seconds that the end of a stream may take to be sent."""
_GONE = 499
"""Counts a caller who went before the answer, as nginx does."""
_TASK = (b"v1", b"topics", b"tasks")
_PAUSE = (b"v1", b"topics", b"pause")
_STORE = b"/v1/store/"
_EVENT_STREAM = "text/event-stream; charset=utf-8"


class Streamed:
    """A reply that goes on."""

    def __init__(self, parts: AsyncGenerator[bytes, None], content_type: str) -> None:
        self.parts = parts
        self.content_type = content_type


Page = Callable[[Request], Awaitable[Reply | Streamed]]


class Service:
    """The application: the calls of the contract, those of bide's own clients, the pages about itself, the console."""

    def __init__(
        self, client: Client, access: Access, consuming: Consuming, following: Following, stores: StoreCalls,
        *, health: Health, metrics: Metrics, site: Site, proxies: Networks = (),
    ) -> None:  # fmt: skip
        self._client = client
        self._access = access
        self._following = following
        self._stores = stores
        self._metrics = metrics
        self._site = site
        self._body_limit, self._body_patience = BODY_LIMIT, BODY_PATIENCE
        self._proxies = proxies
        self._loop = asyncio.get_running_loop()
        verbs = Verbs(client)
        answers: dict[str, Page] = {
            name: getattr(consuming if name in ("lease", "settle", "extend") else verbs, name)
            for name in (call.name for call in CALLS)
            if name != "events"
        }
        answers["events"] = self._events
        self._calls: dict[bytes, dict[str, tuple[str, Page]]] = {}
        for call in CALLS:
            self._calls.setdefault(call.path.encode(), {})[call.method] = (call.name, answers[call.name])
        for (method, path), page in pages_of(health, metrics.exposition).items():
            self._calls.setdefault(path.encode(), {})[method] = (path, page)
        self._calls[b"/openapi.json"] = {"GET": ("openapi", self._document)}
        self._open = {*OPEN, "/openapi.json"}
        self._of_task = self._calls.pop(TASK_PATH.encode())
        self._of_topic = self._calls.pop(PAUSE_PATH.encode())
        self._of_store: dict[str, tuple[str, Page]] = {"POST": ("store", self._store)}
        self._written: bytes | None = None
        self._complains_again = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = self._loop.time()
        request = Request(scope, receive)
        request.limits, request.proxies = (self._body_limit, self._body_patience), self._proxies
        name = "unknown"
        reply: Reply | Streamed | None
        try:
            request.check_host()
            name, page, known = self._route(request)
            if not known:
                await self._authenticate(request)
                await request.read()
            elif name != "console":  # whose pages read for themselves, once they know who asks
                await request.read(OPEN_LIMIT)
            with acting_as(request.caller.name, audit), self._traced(request):
                reply = await page(request)
            status = 200 if isinstance(reply, Streamed) else reply.status
        except Gone:
            reply, status = None, _GONE
        except Exception as error:  # noqa: BLE001 - every error is answered
            reply = self._problem(request, name, error)
            status = reply.status
        if isinstance(reply, Reply):
            await _send(reply, send, head=request.method == "HEAD")
        request.body = b""  # the request itself is there until the garbage collector comes by
        self._metrics.request(name, status, self._loop.time() - started)
        if isinstance(reply, Streamed):
            await self._stream(reply, request, send)

    # --- the way of a request

    def _traced(self, request: Request) -> AbstractContextManager[None]:
        """The trace of the caller goes on, where the app is traced."""
        carrier = self._client.carrier
        if carrier is None:
            return nullcontext()
        given = {name: request.header(name.encode()) for name in TRACE_HEADERS}
        return carrier.received({name: value for name, value in given.items() if value is not None})

    def _route(self, request: Request) -> tuple[str, Page, bool]:
        """The call that is meant, and whether it is for everybody, or finds out by itself who asks. Raises Problem."""
        path, method = request.path, request.method
        calls = self._calls.get(path)
        if calls is None and path.startswith(_STORE):
            request.segments = (segment(path.removeprefix(_STORE), "operation"),)
            calls = self._of_store
        elif calls is None:
            parts = path.split(b"/")
            if len(parts) == 5 and (parts[1], parts[2], parts[4]) == _PAUSE and parts[3]:
                request.segments = (segment(parts[3], "topic"),)
                calls = self._of_topic
            elif len(parts) != 6 or (parts[1], parts[2], parts[4]) != _TASK or not parts[3] or not parts[5]:
                if parts[1:2] != [b"v1"]:
                    page = self._site.find(request)
                    if page is not None:
                        return "console", page, True
                    if "text/html" in (request.header(b"accept") or ""):
                        return "unknown", self._site.missing, True
                raise Problem(404, "no-such-call", "There is no such call", "see /openapi.json for those there are")
            else:
                request.segments = (segment(parts[3], "topic"), segment(parts[5], "key"))
                calls = self._of_task
        found = calls.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(sorted({*calls, "HEAD"} if "GET" in calls else calls))
            raise Problem(
                405, "not-allowed", "Not with this method", f"{method}: give {allowed}",
                headers={"allow": allowed}, field="method", accepted=allowed,
            )  # fmt: skip
        return *found, path.decode("latin-1") in self._open

    async def _authenticate(self, request: Request) -> None:
        async def still() -> float:
            request.caller = await self._access.caller_behind(request.headers)
            return self._access.lasts

        request.still = still
        await still()

    def _problem(self, request: Request, name: str, error: Exception) -> Reply:
        if isinstance(error, AccessRefused):
            refused(error, request.peer)
            problem = Problem(
                error.status, error.title.lower(), error.title, error.detail,
                headers={"www-authenticate": error.challenge},
            )  # fmt: skip
        elif isinstance(error, Problem):
            problem = error
        else:
            if isinstance(error, StoreError):
                self._complain(name, error)
            elif not isinstance(error, BideError):
                _log.exception("a defect in %s", name, exc_info=error)
            if isinstance(error, OutcomeUnknown):
                topic, key = request.segments if len(request.segments) == 2 else (None, None)
                unknown(request.caller.name, name, topic, key)
            problem = of_error(error)
        return Reply(problem.status, problem.body, CONTENT_TYPE, problem.headers)

    def _complain(self, name: str, error: StoreError) -> None:
        """Once a second at most: while the store is away every request fails."""
        now = self._loop.time()
        if now >= self._complains_again:
            self._complains_again = now + 1.0
            _log.warning("%s: %s", name, error)

    async def _stream(self, streamed: Streamed, request: Request, send: Send) -> None:
        """Until it ends, the client goes, or its caller may listen no longer."""
        headers = [*_HEADERS, (b"content-type", streamed.content_type.encode()), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def pump() -> None:
            async with aclosing(streamed.parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})

        try:
            await request.attended(pump())
        except Gone:
            return
        except (AccessRefused, StoreError) as error:
            _log.info("%s listens no longer: %s", request.caller.name, error)
        except Exception as error:  # noqa: BLE001 - the answer has begun: nothing else can be answered
            _log.error("a stream ended with an error", exc_info=error)
        with suppress(TimeoutError):  # a client that does not read is not waited for
            async with asyncio.timeout(_FAREWELL):
                await send({"type": "http.response.body", "body": b""})

    # --- calls of its own

    async def _store(self, request: Request) -> Reply | Streamed:
        """What bide's own clients ask: see `store_calls`."""
        [operation] = request.segments
        if operation == "listen":
            self._stores.check_listen(request.body, request.caller)
            return Streamed(self._stores.listen(request.body, request.caller), STREAM_TYPE)
        answered = await self._stores.answer(operation, request.body, request.caller)
        headers = {name: value for name, value in answered.headers.items() if name != "content-type"}
        return Reply(answered.status, answered.body, answered.headers["content-type"], headers)

    async def _events(self, request: Request) -> Reply | Streamed:
        topic = request.query(("topic",)).get("topic")
        request.caller.check(Verb.EVENTS, topic)
        if topic is not None:
            check_topic(topic)
        last = request.header(b"last-event-id")
        if request.method == "HEAD":
            return Reply(200, b"", _EVENT_STREAM)
        return Streamed(await self._following.stream(last, AdmitsEvent(request.caller, topic)), _EVENT_STREAM)

    async def _document(self, request: Request) -> Reply:
        if self._written is None:
            self._written = document()
        return Reply(200, self._written)


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
