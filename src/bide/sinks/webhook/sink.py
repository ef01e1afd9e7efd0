"""The sink that posts a task to a URL and turns the answer into an outcome, and the resources that such sinks share."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from msgspec import DecodeError
from yarl import URL

from bide._version import __version__
from bide.core.errors import BadInput, SetupError
from bide.core.instants import Length, duration
from bide.core.options import decode_options
from bide.core.outcomes import Dead, Defer, Outcome, Retry
from bide.core.records import Record
from bide.core.tasks import Task
from bide.sinks.webhook import sending
from bide.sinks.webhook.guard import Guard, Target
from bide.sinks.webhook.hosts import HostLimits
from bide.sinks.webhook.signing import Signer

_log = logging.getLogger("bide.webhooks")
URL_HEADER = "webhook"
"""The header of a task that names its URL, if the route is per task."""
_SLOTS_PER_HOST = 5
_COMMON_HEADERS = {"user-agent": f"bide/{__version__}", "accept": "*/*", "accept-encoding": "identity"}
_NO_HEADERS: Mapping[str, str] = {}
_LARGE = 2**20
"""Bytes. aiohttp takes larger bodies as a file, to send them in parts."""
_KEEP_ALIVE = 4.0
"""Seconds for which an idle connection is kept. Common servers keep it for five. A shorter time here makes it rare that
a server closes a connection just as a request is sent, which fails the delivery."""
_NAMES_KNOWN = 10
"""Seconds for which the addresses of a name are cached."""


class WebhookPost:
    """Makes the sinks of webhook routes, and holds their connections and limits. A worker of a route opens it.

    `allow`: networks, and hosts with a port, that may be called although they are not public. `plain_http`: also allow
    http:// to public hosts. `per_host`: concurrent deliveries to one host. `connections`: concurrent connections to all
    hosts. `tls`: replaces the default context, for your own certificate authority. `observe` is called once for each
    outcome. `resolver`: resolves names instead of the system. `now`: returns seconds since 1970.
    """

    def __init__(
        self,
        *,
        allow: Iterable[str] = (),
        plain_http: bool = False,
        per_host: int = 20,
        connections: int = 1_000,
        tls: ssl.SSLContext | None = None,
        observe: sending.Observe | None = None,
        resolver: AbstractResolver | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        for field, count in (("per_host", per_host), ("connections", connections)):
            if type(count) is not int or not 1 <= count <= 1_000_000:
                raise BadInput(field, count, "a whole number from 1 to 1,000,000")
        self.guard = Guard(allow, plain_http=plain_http)
        self.target = lru_cache(4_096)(self.guard.target)
        """The guard's `target`, cached, since the same few URLs recur."""
        self.per_host = per_host
        self.observe = observe
        self.now = now
        self._connections = connections
        self._tls = tls
        self._resolver = resolver
        self._hosts: HostLimits | None = None
        self._opened = 0
        self._loop: asyncio.AbstractEventLoop
        self.sessions: dict[bool, aiohttp.ClientSession] = {}
        """By `Target.trusted`: the session whose connections are guarded, and the one for hosts allowed by name."""

    def sink(
        self,
        url: str | None = None,
        *,
        per_task: bool = False,
        secrets: Sequence[str] = (),
        connect: Length = "5s",
        total: Length = "30s",
        headers: Mapping[str, str] | None = None,
    ) -> WebhookSink:
        """The sink of a route to `url` or, with `per_task`, to the URL in each task's header `webhook`.

        `secrets` sign the requests (the new one first), `connect` and `total` limit the time of a delivery, and
        `headers`, such as `authorization`, are sent with it. Raises BadInput for invalid arguments, including a URL
        that must not be called.
        """
        return WebhookSink(
            self, url, per_task=per_task, secrets=secrets, connect=connect, total=total, headers=headers or {}
        )

    # --- for the sinks

    @property
    def hosts(self) -> HostLimits:
        if self._hosts is None:
            raise SetupError("the webhook post is not open: use it as `async with post:`")
        return self._hosts

    def report(self, result: sending.WebhookResult) -> None:
        """Call the observer; its errors are logged and change no outcome."""
        assert self.observe is not None
        try:
            self.observe(result)
        except Exception:  # noqa: BLE001 - an observer must not stop deliveries
            _log.exception("the observer of webhooks failed for %s/%s", result.topic, result.key)

    # --- open and close

    async def open(self) -> None:
        """Open in the running loop, if it is not open there already. Connections are made on demand.

        Raises SetupError if it is open in another loop.
        """
        loop = asyncio.get_running_loop()
        if self._opened and loop is not self._loop:
            raise SetupError("the webhook post is open in another event loop: make one for each")
        self._opened += 1
        if self._opened > 1:
            return
        self._loop, self._hosts = loop, HostLimits(self.per_host)
        resolver = self._resolver or sending.ThreadedResolver()
        for trusted in (False, True) if self.guard.trusts_hosts else (False,):
            self.sessions[trusted] = sending.new_session(
                limit=self._connections,
                ttl_dns_cache=_NAMES_KNOWN,
                keepalive_timeout=_KEEP_ALIVE,
                resolver=resolver,
                ssl=True if self._tls is None else self._tls,
                socket_factory=None if trusted else self.guard.socket,
            )

    async def close(self) -> None:
        """Close all connections, if nobody else has opened it; running deliveries fail. Closing twice is allowed."""
        self._opened = max(self._opened - 1, 0)
        if self._opened:
            return
        self._hosts = None
        sessions, self.sessions = self.sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class _Ended(NamedTuple):
    """The end of one delivery."""

    target: Target | None
    outcome: Outcome | None
    status: int | None = None
    begin: bytes = b""
    """The first bytes of the answer."""


class WebhookSink:
    """Posts the payload to a URL. Made by `WebhookPost.sink`.

    2xx is Done and 410 is Dead; any other answer, or none, is Retry, after the wait requested by a 429 or 503. A URL
    that must not be called is Dead. A task for a host without a free slot is deferred.
    """

    __slots__ = ("_connect", "_per_task", "_post", "_signer", "_static", "_target", "_timeout", "_total")

    def __init__(
        self, post: WebhookPost, url: str | None, *, per_task: bool, secrets: Sequence[str], connect: Length,
        total: Length, headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        if per_task is (url is not None):
            raise BadInput("url, per_task", (url, per_task), "either a URL for all tasks or per_task=True")
        self._post = post
        self._per_task = per_task
        self._target = None if url is None else post.guard.target(url)
        self._signer = Signer(secrets)
        self._connect, self._total = _seconds(connect, "connect"), _seconds(total, "total")
        self._timeout = aiohttp.ClientTimeout(total=self._total, connect=self._connect)
        self._static = _COMMON_HEADERS | sending.own_headers(headers)

    @property
    def concurrency(self) -> int:
        """The slots that suit a route of this sink: those of one host, or, with a URL per task, of five hosts."""
        return self._post.per_host * (_SLOTS_PER_HOST if self._per_task else 1)

    def described(self) -> tuple[str, str]:
        """The kind of sink and its host, for consoles. The rest of the URL may be a secret."""
        return "webhook", "" if self._target is None else self._target.host

    async def __aenter__(self) -> Self:
        await self._post.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._post.close()

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        began, post = time.perf_counter(), self._post
        ended = await self._deliver(task)
        if post.observe is not None:
            record, outcome = task.record, ended.outcome
            post.report(
                sending.WebhookResult(
                    topic=record.topic, key=record.key, id=record.id, attempt=record.attempt,
                    host=None if ended.target is None else ended.target.host, status=ended.status,
                    seconds=time.perf_counter() - began, outcome=_WORDS[type(outcome)],
                    excerpt=sending.inert(ended.begin), why=outcome.why if isinstance(outcome, Retry | Dead) else None,
                )
            )  # fmt: skip
        return ended.outcome

    async def _deliver(self, task: Task[Any]) -> _Ended:
        hosts = self._post.hosts
        try:
            target = self._target or self._own_target(task.record)
        except BadInput as error:
            return _Ended(None, Dead(sending.inert(str(error).encode())))
        slot = hosts.enter(target.host) or await hosts.wait(target.host)
        if slot is None:
            return _Ended(target, Defer(timedelta(seconds=hosts.pause(target.host))))
        answered: bool | None = None
        status, headers, begin, exchange = 0, _NO_HEADERS, b"", sending.Exchange()
        try:
            response = await self._send(task, target, exchange)
            answered = True
            status, headers = response.status, response.headers
            begin = await sending.beginning_of(response)
        except aiohttp.ClientResponseError as error:  # the status decides, even if the rest cannot be parsed
            answered = exchange.status is not None
            if exchange.status is None:
                return _Ended(target, Retry(sending.what_failed(error, target.host, 0, 0)))
            status = exchange.status
        except (aiohttp.ClientError, OSError) as error:
            answered = False
            return _Ended(target, Retry(sending.what_failed(error, target.host, self._connect, self._total)))
        finally:
            slot.leave(answered)
        if 200 <= status < 300:
            return _Ended(target, None, status, begin)
        asked, where, date = headers.get("Retry-After"), headers.get("Location"), headers.get("Date")
        outcome = sending.outcome_of(status, asked, where, sending.inert(begin), self._post.now(), date)
        return _Ended(target, outcome, status, begin)

    def _own_target(self, record: Record) -> Target:
        try:
            url = decode_options(record.options).headers.get(URL_HEADER)
        except DecodeError as error:
            raise BadInput("headers", f"({error})", "headers that are not damaged") from None
        field = f"headers[{URL_HEADER}]"
        if url is None:
            raise BadInput(field, None, "the URL of this task's receiver")
        return self._post.target(url, field)

    async def _send(self, task: Task[Any], target: Target, exchange: sending.Exchange) -> aiohttp.ClientResponse:
        """Send the request. If a reused connection breaks without an answer, the receiver had closed it: send once more
        on a new connection. A receiver that gets the request twice sees the same `webhook-id`."""
        began = time.perf_counter()
        headers = self._headers(task)
        try:
            return await self._post_once(task, target, headers, exchange, self._timeout)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            left = self._total - (time.perf_counter() - began)
            if not (exchange.reused and exchange.silent) or left <= 0:
                raise
        timeout = aiohttp.ClientTimeout(total=left, connect=self._connect)
        again = sending.Exchange(fresh=True)
        try:
            return await self._post_once(task, target, headers, again, timeout)
        finally:
            exchange.follow(again)

    async def _post_once(
        self, task: Task[Any], target: Target, headers: dict[str, str], exchange: sending.Exchange,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:  # fmt: skip
        payload = task.record.payload
        token = sending.CURRENT_EXCHANGE.set(exchange)
        try:
            return await self._post.sessions[target.trusted].post(
                URL(target.url, encoded=True),  # not requoted: a receiver may have signed it
                data=payload if len(payload) <= _LARGE else BytesIO(payload),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            )
        finally:
            sending.CURRENT_EXCHANGE.reset(token)

    def _headers(self, task: Task[Any]) -> dict[str, str]:
        post, record = self._post, task.record
        payload = record.payload
        timestamp = str(int(post.now()))
        headers = self._static | {
            "content-type": sending.content_type(payload),
            "webhook-id": record.id,
            "webhook-timestamp": timestamp,
            "bide-topic": sending.topic_text(record.topic),
            "bide-key": sending.header_text(record.key),
            "bide-token": str(record.token),
            "bide-attempt": str(record.attempt),
        }
        if self._signer:
            headers["webhook-signature"] = self._signer.signature(record.id, timestamp, payload)
            headers["bide-signature"] = self._signer.signature_of(headers)
        return headers | sending.well_formed(sending.trace_headers(task))

    def __repr__(self) -> str:
        return f"<WebhookSink to {'where each task says' if self._target is None else self._target.host}>"


_WORDS: dict[type[Any], str] = {type(None): "done", Retry: "retry", Dead: "dead", Defer: "defer"}


def _seconds(length: Length, field: str) -> float:
    millis = duration(length, field=field)
    if not 1 <= millis <= 3_600_000:
        raise BadInput(field, length, "a duration from 1ms to 1h")
    return millis / 1000
