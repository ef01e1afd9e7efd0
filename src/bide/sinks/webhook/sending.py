"""The HTTP side of a webhook: name lookups, connections, request headers, and the outcome of an answer."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.names import printable
from bide.core.options import carried_trace
from bide.core.outcomes import Dead, Outcome, Retry
from bide.core.tasks import Task
from bide.sinks.webhook.guard import AddressRefused

EXCERPT = 500
"""Bytes of an answer that are kept for people to read."""
LONGEST_WAIT = timedelta(days=1)
"""The longest wait that a receiver can ask for."""
_ABSURD = 366 * 86_400
"""Seconds. A larger number means something else, such as a time since 1970."""
_SECONDS = re.compile(r"[0-9]{1,10}", re.ASCII)
_BUSY = (429, 503)
_GONE = 410


class WebhookResult(Struct, frozen=True, kw_only=True, gc=False):
    """The end of one delivery, for metrics and the console. A cancelled delivery has no outcome, and so no result."""

    topic: str
    key: str
    id: str
    attempt: int
    host: str | None
    """With its port; None if there was no URL that may be called."""
    status: int | None
    """The status of the answer; None if there was none."""
    seconds: float
    """From the start of the delivery to its outcome."""
    outcome: str
    """`done`, `retry`, `dead`, or `defer` if the host had no free slot: then nothing was sent."""
    excerpt: str
    """The first 500 bytes of the answer, without control characters."""
    why: str | None
    """The reason for the outcome; None if it is done."""


Observe: TypeAlias = Callable[[WebhookResult], None]


def outcome_of(
    status: int, retry_after: str | None, location: str | None, excerpt: str, now: float, date: str | None = None
) -> Outcome | None:
    """The outcome of an answer; None: done. The status alone decides; the excerpt only explains it."""
    if 200 <= status < 300:
        return None
    why = _named(status)
    if 300 <= status < 400:
        why += f": redirects are not followed (to {inert(location[:200])})" if location else ": a redirect"
    if excerpt:
        why = f"{why}: {excerpt}"
    if status == _GONE:
        return Dead(why)
    wait = pause_asked_for(retry_after, now, date) if status in _BUSY else None
    return Retry(why) if wait is None else Retry(f"{why} (asked to wait {wait.total_seconds():.0f} s)", delay=wait)


def pause_asked_for(retry_after: str | None, now: float, date: str | None = None) -> timedelta | None:
    """The wait requested by a Retry-After header, in whole seconds or as a date; None if it is invalid.

    A date is compared with the receiver's clock if there is a `date` header, else with `now`, in seconds since 1970. At
    most a day. Zero, or a date in the past, leaves the decision to the retry policy.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    else:
        moment = _moment(text)
        if moment is None:
            return None
        there = _moment(date) or datetime.fromtimestamp(now, UTC)
        seconds = (moment - there).total_seconds()
    if not 0 < seconds <= _ABSURD:
        return None
    return min(timedelta(seconds=seconds), LONGEST_WAIT)


def _moment(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def inert(answered: bytes | str) -> str:
    """The first bytes of an answer as harmless text, without line breaks, control characters and bidi marks.

    It is not escaped for HTML; templates do that.
    """
    if isinstance(answered, str):  # a header: bytes that are not UTF-8 are lone surrogates
        answered = answered.encode(errors="surrogateescape")
    return printable(answered[:EXCERPT].decode("utf-8", "replace"))


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


MOST_READ = 65_536
"""The most bytes read of an answer. If it ends within them, its connection can serve the next request."""
BODY_PATIENCE = 1.0
"""Seconds to wait for the body of an answer: its status has decided, the rest is for people to read."""
_PLAIN = re.compile(r"[!-$&-~]+", re.ASCII)
"""Visible ASCII without the percent sign, which a header carries as it is."""
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,100})?", re.ASCII)
_TRACESTATE = re.compile(r"[ -~]{1,512}", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}", re.ASCII)
_VALUE = re.compile(r"[!-~](?:[ -~]{0,4000}[!-~])?", re.ASCII)
_OURS = re.compile(
    r"(?:webhook|bide)-.*|content-.*|host|connection|transfer-encoding|te|trailer|upgrade|expect|keep-alive|proxy-.*"
    r"|accept-encoding|cookie|traceparent|tracestate",
    re.IGNORECASE,
)
_LONGEST_FIELD = 65_536
_MOST_FIELDS = 1_000
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2})[ \r\n]")
_LOOKUPS = 128
"""The most name lookups at once."""
_is_json = msgspec.json.Decoder(msgspec.Raw).decode


class _Handler(ResponseHandler):
    """A connection that remembers the first bytes of the last answer."""

    head = b""
    used = False

    def data_received(self, data: bytes) -> None:
        if len(self.head) < 16:
            self.head += data[:16]
        super().data_received(data)


class Exchange:
    """One request on its connection, with the first bytes of the answer, even if that cannot be parsed."""

    __slots__ = ("_handler", "fresh", "reused")

    def __init__(self, *, fresh: bool = False) -> None:
        self.fresh = fresh
        """True if it must use a new connection."""
        self.reused = False
        self._handler: _Handler | None = None

    def use(self, handler: _Handler) -> None:
        self._handler, self.reused, handler.used, handler.head = handler, handler.used, True, b""

    def follow(self, other: Exchange) -> None:
        """Take over the connection of the second try."""
        self._handler, self.reused = other._handler, other.reused

    @property
    def silent(self) -> bool:
        """True if no byte of an answer has arrived."""
        return self._handler is not None and not self._handler.head

    @property
    def status(self) -> int | None:
        """The status in the first line, whatever the rest of the answer is."""
        found = None if self._handler is None else _STATUS.match(self._handler.head)
        return None if found is None else int(found[1])


CURRENT_EXCHANGE: ContextVar[Exchange] = ContextVar("bide_webhook_exchange")
"""The exchange of the request that is being sent."""


class Connector(aiohttp.TCPConnector):
    """Connects each request's `Exchange` with its connection."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._factory: Any = partial(_Handler, loop=self._loop)

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Connection:
        connection = await super().connect(req, traces, timeout)
        assert isinstance(connection.protocol, _Handler)
        CURRENT_EXCHANGE.get().use(connection.protocol)
        return connection

    async def _get(self, key: Any, traces: Any) -> Connection | None:
        return None if CURRENT_EXCHANGE.get().fresh else await super()._get(key, traces)


class ThreadedResolver(AbstractResolver):
    """Resolves names by the system's `getaddrinfo`, each in a thread of its own. The guard checks the addresses later.

    asyncio resolves names in the loop's default threads, a handful that the whole program shares. A few names whose
    servers do not answer would block all of them for many seconds, and with them the lookups of every other receiver.
    The threads are daemons, since those of an executor would hold up the end of the process for as long.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_LOOKUPS)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[Any] = Future()
        found.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        try:
            threading.Thread(target=look_up, name="bide webhook lookup", daemon=True).start()
        except RuntimeError:  # there can be no more threads
            self._free.release()
            raise
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=found_family, proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found_family, _, protocol, _, address in await asyncio.wrap_future(found)
        ]  # fmt: skip

    async def close(self) -> None:
        """A lookup that goes on holds up nothing."""


def new_session(**how: Any) -> aiohttp.ClientSession:
    """A session over a `Connector` that is made with these arguments."""
    return aiohttp.ClientSession(
        connector=Connector(**how),
        cookie_jar=aiohttp.DummyCookieJar(),  # cookies of one receiver are not sent to the next
        trust_env=False,  # a proxy would connect past the guard
        auto_decompress=False,  # a few bytes may unpack to gigabytes
        max_line_size=_LONGEST_FIELD,
        max_field_size=_LONGEST_FIELD,
        max_headers=_MOST_FIELDS,
    )


def header_text(name: str) -> str:
    """A topic or key as a header value: percent-encoded if it is not visible ASCII, so that `unquote` reads it."""
    return name if _PLAIN.fullmatch(name) else quote(name, safe=_VISIBLE)


topic_text = lru_cache(1024)(header_text)
"""`header_text` with a cache, since there are few topics."""


def content_type(payload: bytes) -> str:
    """`application/json`, if the payload is that. O(size), some 0.7 µs for each KiB, since no values are built."""
    try:
        _is_json(payload)
        if not payload.isascii():
            payload.decode()
    except (ValueError, RecursionError):  # msgspec's errors and UnicodeDecodeError are ValueErrors
        return "application/octet-stream"
    return "application/json"


def trace_headers(task: Task[Any]) -> Mapping[str, str]:
    """The W3C trace headers for a request that delivers `task`; empty without a trace.

    They name the running delivery's span if this program traces; else they are the task's own, unchanged.
    """
    traced = sys.modules.get("bide.sinks.traced")
    if traced is not None:
        headers: Mapping[str, str] = traced.current_headers()
        if "traceparent" in headers:
            return headers
    return carried_trace(task.record.options)


def well_formed(trace: Mapping[str, str]) -> dict[str, str]:
    """The W3C trace context in `trace`, if it is well formed. No baggage, which is for the sender's own services."""
    parent = trace.get("traceparent")
    if parent is None or not _TRACEPARENT.fullmatch(parent):
        return {}
    state = trace.get("tracestate")
    if state is None or not _TRACESTATE.fullmatch(state):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


def own_headers(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Check a route's own headers, such as `authorization`. Raises BadInput, which shows no value."""
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or _OURS.fullmatch(name):
            raise BadInput("headers", name, "names of HTTP headers that bide does not set itself")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise BadInput(f"headers[{name}]", "(not shown)", "visible ASCII, with spaces only within")
    return {name.lower(): value for name, value in headers.items()}


async def beginning_of(response: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer, as many as arrive. Never raises, since the status has decided."""
    content = response.content
    if content.is_eof():
        return content.read_nowait(EXCERPT)
    begin, size = b"", 0
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            while size < MOST_READ and not content.at_eof():
                chunk = await content.readany()
                size += len(chunk)
                if len(begin) < EXCERPT:
                    begin += chunk[: EXCERPT - len(begin)]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return begin or f"({type(error).__name__} within the answer)".encode()
    finally:
        if not content.is_eof():
            response.close()
    return begin


def what_failed(error: Exception, host: str, connect: float, total: float) -> str:
    """The reason why there was no answer. It names the host, but not the path, which may hold a password."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return f"no connection to {host} within {min(connect, total):g} s"
        case aiohttp.ClientConnectorDNSError():
            return f"{host}: the name could not be looked up ({_said(error.os_error)})"
        case aiohttp.ClientConnectorCertificateError():
            return f"TLS: the certificate of {host} is not valid ({_said(error.certificate_error)})"
        case aiohttp.ClientSSLError():
            return f"TLS with {host} failed ({_said(error.os_error)})"
        case aiohttp.ClientConnectorError() if isinstance(error.os_error, AddressRefused):
            return f"{host} {error.os_error}"
        case aiohttp.ClientConnectorError():
            return f"no connection to {host} ({_said(error.os_error)})"
        case TimeoutError():
            return f"no answer from {host} within {total:g} s"
        case aiohttp.ServerDisconnectedError():
            return f"{host} closed the connection without an answer"
        case OSError():
            return f"the connection to {host} broke ({_said(error)})"
        case aiohttp.ClientResponseError():
            return f"{host} did not answer in HTTP ({inert(' '.join(error.message.split()))})"
        case _:
            return f"the request to {host} failed ({type(error).__name__})"


def _said(error: Exception) -> str:
    """The system's own message, without the address that Python puts in front."""
    text: str | None
    if isinstance(error, ssl.SSLCertVerificationError):
        text = error.verify_message
    elif isinstance(error, ssl.SSLError | socket.gaierror):
        text = error.strerror
    else:
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return inert((text or type(error).__name__).encode())
