"""What all webhook routes of a process share: one set of connections, the guard, and the hosts' places."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver

from bide.core.errors import BadInput, SetupError
from bide.core.instants import Length
from bide.sinks.webhook.guard import Guard
from bide.sinks.webhook.hosts import Hosts
from bide.sinks.webhook.lookup import Lookup
from bide.sinks.webhook.results import Observe, WebhookResult
from bide.sinks.webhook.sending import Connector, new_session
from bide.sinks.webhook.sink import WebhookSink

_log = logging.getLogger("bide.webhooks")
_KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: less than the five that common servers do, so that they rarely close one
just as a request is sent on it, which would be a failed delivery."""
_NAMES_KNOWN = 10
"""Seconds that a looked-up name is remembered."""


class WebhookPost:
    """Makes the sinks of webhook routes, and holds what they share. Open it where its sinks are used.

    `allow`: networks, and hosts with a port, that may be called although they are not public. `plain_http`: also allow
    http:// to public hosts. `per_host`: deliveries to one host at once. `connections`: open at once, over all hosts.
    `tls`: instead of the default context, for an authority of your own. `observe` is called once for each outcome.
    `resolver`: looks names up instead of the system. `now`: seconds since 1970.
    """

    def __init__(
        self,
        *,
        allow: Iterable[str] = (),
        plain_http: bool = False,
        per_host: int = 20,
        connections: int = 1_000,
        tls: ssl.SSLContext | None = None,
        observe: Observe | None = None,
        resolver: AbstractResolver | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        for field, count in (("per_host", per_host), ("connections", connections)):
            if type(count) is not int or not 1 <= count <= 1_000_000:
                raise BadInput(field, count, "a whole number from 1 to 1,000,000")
        self.guard = Guard(allow, plain_http=plain_http)
        self.target = lru_cache(4_096)(self.guard.target)
        """As the guard's; the same few URLs come again and again."""
        self.per_host = per_host
        self.observe = observe
        self.now = now
        self.agent = _agent()
        self._connections = connections
        self._tls = tls
        self._resolver = resolver
        self._own_resolver: Lookup | None = None
        self._hosts: Hosts | None = None
        self._guarded: aiohttp.ClientSession | None = None
        self._unguarded: aiohttp.ClientSession | None = None

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
        """The sink of a route: to `url`, or, with `per_task`, to where each task's own header `webhook` says.

        `secrets` sign (the new one first), `connect` and `total` bound a delivery, `headers` are sent along, such as
        `authorization`. Raises BadInput for what is not acceptable, also for a URL that must not be called.
        """
        return WebhookSink(
            self, url, per_task=per_task, secrets=secrets, connect=connect, total=total, headers=headers or {}
        )

    # --- what sinks need

    @property
    def hosts(self) -> Hosts:
        if self._hosts is None:
            raise SetupError("the webhook post is not open: use it as `async with post:` around the worker")
        return self._hosts

    def session(self, *, trusted: bool) -> aiohttp.ClientSession:
        """Of two: connections of the one are guarded, those of the other lead to hosts that are allowed by name."""
        session = self._unguarded if trusted else self._guarded
        assert session is not None, "hosts was asked before"
        return session

    def tell(self, result: WebhookResult) -> None:
        """Tell the observer; what it raises is logged, and changes no outcome."""
        assert self.observe is not None
        try:
            self.observe(result)
        except Exception:  # noqa: BLE001 - who counts deliveries must not stop them
            _log.exception("the observer of webhooks failed for %s/%s", result.topic, result.key)

    # --- open and close

    async def open(self) -> None:
        """Make ready, in the running loop. No connection is made before it is needed."""
        if self._hosts is not None:
            raise SetupError("the webhook post is open already")
        self._hosts = Hosts(self.per_host)
        resolver = self._resolver
        if resolver is None:
            resolver = self._own_resolver = Lookup()
        self._guarded = self._new_session(resolver, guarded=True)
        if self.guard.trusts_hosts:
            self._unguarded = self._new_session(resolver, guarded=False)

    async def close(self) -> None:
        """Close all connections; deliveries that are under way fail. Closing twice is one close."""
        sessions = [session for session in (self._guarded, self._unguarded) if session is not None]
        self._hosts = self._guarded = self._unguarded = None
        await asyncio.gather(*(session.close() for session in sessions))
        if self._own_resolver is not None:
            await self._own_resolver.close()
            self._own_resolver = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _new_session(self, resolver: AbstractResolver, *, guarded: bool) -> aiohttp.ClientSession:
        connector = Connector(
            limit=self._connections,
            ttl_dns_cache=_NAMES_KNOWN,
            keepalive_timeout=_KEEP_ALIVE,
            resolver=resolver,
            ssl=True if self._tls is None else self._tls,
            socket_factory=self.guard.socket if guarded else None,
        )
        return new_session(connector)


def _agent() -> str:
    try:
        return f"bide/{version('bide')}"
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "bide"
