"""An instance of the service: an app whose webhooks are at work, the desk for other consumers, the service before them;
and how it runs under uvicorn, from the settings to the last answer.

The file of `bide serve`: where the tasks of each topic go, and how they are worked on. TOML.

    keep_most = 10000                                # ended tasks of a topic that are remembered, at most
    connections = 4096                               # at once; further ones are answered 503
    proxies = ["10.0.0.5", "10.1.0.0/16"]            # whose X-Forwarded-For says who called; of nobody unless given

    [webhooks]
    allow = ["10.1.0.0/16", "hooks.internal:8080"]   # besides public addresses
    per_host = 20

    [topics."order.close"]
    webhook = "https://shop.example/hooks/close"     # or "per-task": each task names its own in its header `webhook`
    secrets_file = "/run/secrets/close"              # one whsec_... a line, the newest first
    retry = "merchant-notify"                        # a preset, a list of lengths, or a table of terms
    concurrency = 20
    timeout = "30s"
    keep_done = "1h"

    [topics."report.send"]
    sink = "slack://reports"                         # a sink that another distribution adds, by the scheme of its URL

A topic without either is for consumers: what it says then holds for what they lease.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Annotated, Protocol, Self

import msgspec
import uvicorn
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from bide.app import Bide
from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.core.names import check_topic, new_id
from bide.core.records import Topic
from bide.core.retry import RetryPolicy, policy
from bide.engine.config import MOST
from bide.engine.delivery.long_poll import LongPoll
from bide.engine.delivery.worker import Worker
from bide.engine.registry import RouteSettings, WakeChannel, settings_of_consumers
from bide.engine.settings_store import SettingsStore
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.ports import Policy
from bide.service.access import Access, check_start, is_loopback, networks_of
from bide.service.audit import Rates
from bide.service.authz import Tokens
from bide.service.console.page_request import Shared
from bide.service.console.router import Site
from bide.service.health import Health
from bide.service.metrics import Metrics
from bide.service.remote.calls import StoreCalls
from bide.service.requests import BoundedHeads
from bide.service.schemas import Terms, retries
from bide.service.server import Service
from bide.service.streaming import Following
from bide.service.verbs import Consuming
from bide.wiring import is_traced, sink_at, webhook_post

PER_TASK = "per-task"
MOST_CONNECTIONS = 4_096


class TopicConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """One topic."""

    webhook: str | None = None
    sink: str | None = None
    """The URL of a sink that another distribution adds: see `bide.extensions`."""
    secrets_file: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    connect_timeout: str = "5s"
    timeout: str = "30s"
    retry: str | list[str] | Terms | None = None
    concurrency: int | None = None
    losses: int | None = None
    keep_done: str | None = None
    keep_cancelled: str | None = None
    keep_dead: str | None = None

    def policy(self, where: str) -> RetryPolicy:
        """When to try again. Raises BadInput."""
        try:
            return policy(retries(self.retry))
        except BadInput as error:
            raise BadInput(f"{where}.retry", error.value, error.accepted) from None

    def secrets(self, where: str) -> list[str]:
        """Read the secrets that webhooks are signed with. Raises BadInput."""
        if self.secrets_file is None:
            return []
        try:
            lines = Path(self.secrets_file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise BadInput(f"{where}.secrets_file", self.secrets_file, f"a readable file ({error})") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise BadInput(f"{where}.secrets_file", self.secrets_file, "a file with a whsec_... a line")
        return found


class WebhooksConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of all webhooks."""

    allow: list[str] = field(default_factory=list)
    per_host: int = 20
    plain_http: bool = False
    """Allow webhooks to public addresses without TLS."""


class ServeConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    keep_most: Annotated[int, Meta(ge=0, le=10_000_000)] = MOST
    """Done, and as many cancelled, tasks of one topic that an instance remembers at most."""
    connections: Annotated[int, Meta(ge=1, le=1_000_000)] = MOST_CONNECTIONS
    """Of clients, at once."""
    proxies: list[str] = field(default_factory=list)
    """Addresses and networks of the proxies before this instance."""
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    topics: dict[str, TopicConfig] = field(default_factory=dict)


def read_config(path: str) -> ServeConfig:
    """The file at `path`. Raises BadInput that names the field."""
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise BadInput("--config", path, f"the path of a readable TOML file ({error})") from None
    try:
        config = msgspec.convert(data, ServeConfig)
    except msgspec.ValidationError as error:
        raise BadInput("--config", path, f"the fields of docs/http.md ({error})") from None
    for topic, one in config.topics.items():
        check_topic(topic, f"{path}: topics")
        if one.sink is not None and one.webhook is not None:
            raise BadInput(f"{path}: topics.{topic}", "a webhook and a sink", "one of them")
    return config


class Serving:
    """One instance. Use it as `async with`: then `service` is the ASGI application."""

    def __init__(self, app: Bide, config: ServeConfig, *, host: str, insecure: bool = False) -> None:
        self.app = app
        self.config = config
        self.instance = f"{socket.gethostname()}:{new_id()[-8:]}"
        self.metrics = Metrics(app)
        self._channel = WakeChannel()
        app.instruments.append(self._channel)
        self.service: Service
        self._proxies = networks_of(config.proxies)
        self.open_to_all = False
        """True if callers without a token may do everything, as long as there is none."""
        self._host = host
        self._insecure = insecure
        self._long_poll: LongPoll
        self._worker: Worker
        self._following: Following
        self._stores: StoreCalls
        self._stack = AsyncExitStack()
        self._policies: dict[Topic, Policy] = {}
        self._default = Policy(policy(None), app.settings.losses)
        self._sinks: list[AbstractAsyncContextManager[object]] = []
        post = None
        if any(one.webhook is not None for one in config.topics.values()):
            post = webhook_post(
                allow=config.webhooks.allow, per_host=config.webhooks.per_host,
                plain_http=config.webhooks.plain_http, observe=self.metrics.webhook,
            )  # fmt: skip
            self._sinks.append(post)
        for topic, one in config.topics.items():
            self.metrics.reserve(topic)
            where = f"topics.{topic}"
            retry = one.policy(where)
            self._policies[topic] = Policy(retry, one.losses or app.settings.losses)
            if one.webhook is not None and post is not None:
                per_task = one.webhook == PER_TASK
                sink = post.sink(
                    None if per_task else one.webhook, per_task=per_task, secrets=one.secrets(where),
                    connect=one.connect_timeout, total=one.timeout, headers=one.headers,
                )  # fmt: skip
                slots = one.concurrency or 5 * sink.concurrency
                app.route(topic, sink, concurrency=slots, retry=retry, losses=one.losses)
            elif one.sink is not None:
                other = sink_at(one.sink, f"{where}.sink")
                if isinstance(other, AbstractAsyncContextManager):
                    self._sinks.append(other)
                app.route(
                    topic, other, concurrency=one.concurrency, retry=retry, losses=one.losses, timeout=one.timeout
                )
            app.retain(topic, done=one.keep_done, cancelled=one.keep_cancelled, dead=one.keep_dead)
        app.config = replace(app.config, retentions=app.config.retentions.at_most(config.keep_most))

    def policy_of(self, topic: Topic) -> Policy:
        """By what the tasks of `topic` are decided."""
        return self._policies.get(topic, self._default)

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        app, stack = self.app, self._stack
        await stack.enter_async_context(app)
        tokens = await Tokens(SettingsStore(app.store, app.clock)).all()
        anonymous = check_start([self._host], tokens=bool(tokens), insecure=self._insecure)
        self.open_to_all = anonymous and not tokens
        if is_traced():
            app.trace()
        for sink in self._sinks:
            await stack.enter_async_context(sink)
        self._long_poll = LongPoll(
            app, policy_of=self.policy_of, started=self.metrics.started, settled=self.metrics.settled,
            may_note=Rates().take,
        )  # fmt: skip
        await self._long_poll.pause_gate.first()
        self._worker = await stack.enter_async_context(app.worker(name=self.instance))
        for instrument in (self.metrics, self._channel):
            instrument.working(self._long_poll.wakes)
        self.metrics.polls = lambda: self._long_poll.waiting
        await self._long_poll.start(self._told_consumers())
        stack.push_async_callback(self._long_poll.close)
        self._following = Following(app)
        self.metrics.streams = lambda: self._following.listeners
        stack.push_async_callback(self._following.close)
        beyond = self._insecure and not is_loopback(self._host)
        access = Access(app, anonymous=anonymous, any_name=beyond)
        stack.push_async_callback(access.close)
        self._stores = stores = StoreCalls(app, pause_gate=self._long_poll.pause_gate)
        stack.push_async_callback(stores.close)
        health = Health(app)
        overviews, day = Overviews(app), LastDay(app)
        stack.push_async_callback(overviews.close)
        stack.push_async_callback(day.close)
        site = Site(Shared(app, health, self.policy_of, self.instance, self._channel, access, overviews, day))
        stack.push_async_callback(site.close)
        consuming = Consuming(self._long_poll, instance=self.instance, lease=app.config.lease)
        self.service = Service(
            app, access, consuming, self._following, stores, health=health, metrics=self.metrics, site=site,
            proxies=self._proxies,
        )  # fmt: skip

    def _told_consumers(self) -> list[RouteSettings]:
        """How the topics are worked on that the file of settings leaves to consumers."""
        return [
            settings_of_consumers(topic, one, self.app.config)
            for topic, one in self._policies.items()
            if topic not in self.app.routes
        ]

    async def let_go(self) -> None:
        """The instance is about to stop: begin no webhook, give those that run the grace, answer all who wait."""
        self._stores.let_go()
        await asyncio.gather(self._long_poll.close(), self._following.close(), self._worker.stop())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)


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
            begin(drain, app.config.grace)
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
    grace = serving.app.config.grace / 1000
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
    """Merge the settings of the file and the options. Raises BadInput."""
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
