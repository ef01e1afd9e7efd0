"""An instance of the service: its settings, its parts, and its run under uvicorn.

The settings file of `bide serve` is TOML; docs/http.md has an example with every field. It defines the destination and
the delivery of the tasks of each topic. A topic without a webhook and a sink is for consumers over HTTP: its settings
apply to the tasks that they lease.
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
from typing import Annotated, Any, Protocol, Self

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
from bide.engine.registry import WakeChannel, settings_of_consumers
from bide.engine.settings_store import SettingsStore
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.ports import Policy
from bide.service.access import Access, EventQuota, Tokens, check_start, is_loopback, networks_of
from bide.service.console.actions import ActionsPage
from bide.service.console.overview import OverviewPage
from bide.service.console.pages import ConsoleContext, Router
from bide.service.console.recurring import RecurringPage
from bide.service.console.tasks import DeadPage, TasksPage
from bide.service.console.timeline import TimelinePage
from bide.service.console.topics import TopicsPage
from bide.service.health import Health
from bide.service.metrics import Metrics
from bide.service.remote import StoreCalls
from bide.service.requests import BoundedHeads
from bide.service.schemas import Terms, retries
from bide.service.server import Service
from bide.service.streaming import EventFeed
from bide.service.verbs import Verbs
from bide.wiring import is_traced, sink_at, webhook_post

PER_TASK = "per-task"
MOST_CONNECTIONS = 4_096
CONSOLE_PAGES = (OverviewPage, TimelinePage, TasksPage, RecurringPage, ActionsPage, DeadPage, TopicsPage)


_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class TopicConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    webhook: str | None = None
    """A URL; or "per-task": each task names its own in its header `webhook`."""
    sink: str | None = None
    """The URL of a sink from another distribution, see `bide.extensions`."""
    secrets_file: str | None = None
    """One whsec_... a line, the newest first."""
    headers: dict[str, str] = field(default_factory=dict)
    connect_timeout: str = "5s"
    timeout: str = "30s"
    retry: str | list[str] | Terms | None = None
    concurrency: _Count | None = None
    losses: _Count | None = None
    keep_done: str | None = None
    keep_cancelled: str | None = None
    keep_dead: str | None = None

    def policy(self) -> RetryPolicy:
        """The retry policy. Raises BadInput."""
        return policy(retries(self.retry))

    def secrets(self) -> list[str]:
        """Read the secrets that sign the webhooks. Raises BadInput."""
        if self.secrets_file is None:
            return []
        try:
            lines = Path(self.secrets_file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise BadInput("secrets_file", self.secrets_file, f"a readable file ({error})") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise BadInput("secrets_file", self.secrets_file, "a file with a whsec_... a line")
        return found


_DEFAULTS = TopicConfig()
_IDLE = {
    **dict.fromkeys(("secrets_file", "headers", "connect_timeout"), "a webhook"),
    **dict.fromkeys(("timeout", "concurrency"), "a webhook or a sink"),
}
"""The settings that have no effect without something else: a forgotten webhook would leave the tasks to consumers."""
_IN_THE_FILE = {"url": "webhook", "connect": "connect_timeout", "total": "timeout"}
"""The settings that a sink names otherwise in its errors."""


class WebhooksConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    allow: list[str] = field(default_factory=list)
    """Networks, and hosts with a port, in addition to public addresses."""
    per_host: _Count = 20
    plain_http: bool = False
    """Allow webhooks to public addresses without TLS."""


class ServeConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings file as a whole."""

    keep_most: Annotated[int, Meta(ge=0, le=10_000_000)] = MOST
    """The most done tasks, and the most cancelled tasks, of one topic that an instance keeps."""
    connections: Annotated[int, Meta(ge=1, le=1_000_000)] = MOST_CONNECTIONS
    proxies: list[str] = field(default_factory=list)
    """Addresses and networks of the proxies in front of this instance."""
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    topics: dict[str, TopicConfig] = field(default_factory=dict)


def read_config(path: str) -> ServeConfig:
    """Read the settings file. Raises BadInput that names the field."""
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise BadInput("--config", path, f"the path of a readable TOML file ({error})") from None
    try:
        config = msgspec.convert(data, ServeConfig)
    except msgspec.ValidationError as error:
        why = str(error)
        if "$.topics[...]" in why:
            why = why.replace("$.topics[...]", f"$.topics.{_first_misfit(data['topics'])}")
        raise BadInput("--config", path, f"the fields of docs/http.md ({why})") from None
    for topic, one in config.topics.items():
        check_topic(topic, f"{path}: topics")
        if one.sink is not None and one.webhook is not None:
            raise BadInput(f"{path}: topics.{topic}", "a webhook and a sink", "one of the two")
        for name, needed in _IDLE.items():
            unmet = one.webhook is None and (one.sink is None or needed == "a webhook")
            if unmet and getattr(one, name) != getattr(_DEFAULTS, name):
                raise BadInput(f"{path}: topics.{topic}", name, f"{needed} with it; without one it has no effect")
    return config


def _first_misfit(topics: dict[str, object]) -> str:
    """The first topic whose settings have a wrong field: msgspec does not name it."""
    for topic, one in topics.items():
        try:
            msgspec.convert(one, TopicConfig)
        except msgspec.ValidationError:
            return topic
    return "..."


class ServiceInstance:
    """One instance of the service. Use it with `async with`; inside, `service` is the ASGI application."""

    def __init__(self, app: Bide, config: ServeConfig, *, host: str, insecure: bool = False) -> None:
        self.app = app
        self.config = config
        self.instance = f"{socket.gethostname()}:{new_id()[-8:]}"
        self.metrics = Metrics(app)
        self._channel = WakeChannel()
        app.instruments.append(self._channel)
        self._proxies = networks_of(config.proxies)
        self.open_to_all = False
        """True if callers without a token have access to everything while there is no token."""
        self._host = host
        self._insecure = insecure
        self._policies: dict[Topic, Policy] = {}
        self._default = Policy(policy(None), app.settings.losses)
        self._post = None
        if config.webhooks.allow or any(one.webhook is not None for one in config.topics.values()):
            self._post = webhook_post(
                allow=config.webhooks.allow, per_host=config.webhooks.per_host,
                plain_http=config.webhooks.plain_http, observe=self.metrics.webhook,
            )  # fmt: skip
        for topic, one in config.topics.items():
            try:
                self._add(topic, one)
            except BadInput as error:
                named = _IN_THE_FILE.get(error.field, error.field.replace("secrets[", "secrets_file["))
                raise BadInput(f"topics.{topic}.{named}", error.value, error.accepted) from None
        app.config = replace(app.config, retentions=app.config.retentions.at_most(config.keep_most))

    def _add(self, topic: Topic, one: TopicConfig) -> None:
        """Declare a topic with its settings. Raises BadInput that names the setting."""
        app = self.app
        self.metrics.reserve(topic)
        retry, secrets = one.policy(), one.secrets()
        self._policies[topic] = Policy(retry, app.settings.losses if one.losses is None else one.losses)
        if one.webhook is not None and self._post is not None:
            per_task = one.webhook == PER_TASK
            sink = self._post.sink(
                None if per_task else one.webhook, per_task=per_task, secrets=secrets,
                connect=one.connect_timeout, total=one.timeout, headers=one.headers,
            )  # fmt: skip
            app.route(topic, sink, concurrency=one.concurrency, retry=retry, losses=one.losses)
        elif one.sink is not None:
            app.route(
                topic, sink_at(one.sink, "sink"), concurrency=one.concurrency, retry=retry, losses=one.losses,
                timeout=one.timeout,
            )  # fmt: skip
        app.retain(topic, done=one.keep_done, cancelled=one.keep_cancelled, dead=one.keep_dead)

    def policy_of(self, topic: Topic) -> Policy:
        """The policy that decides on retries of the tasks of `topic`."""
        return self._policies.get(topic, self._default)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        app = self.app
        await stack.enter_async_context(app)
        tokens = await Tokens(SettingsStore(app.store, app.clock)).all()
        anonymous = check_start(self._host, tokens=bool(tokens), insecure=self._insecure)
        self.open_to_all = anonymous and not tokens
        if is_traced():
            app.trace()
        self._long_poll = LongPoll(
            app, policy_of=self.policy_of, started=self.metrics.started, settled=self.metrics.settled,
            may_note=EventQuota().take,
        )  # fmt: skip
        await self._long_poll.pause_gate.first()
        self._worker = await stack.enter_async_context(app.worker(name=self.instance))
        for instrument in (self.metrics, self._channel):
            instrument.working(self._long_poll.wakes)
        self.metrics.polls = lambda: self._long_poll.waiting
        routes = [  # of consumers, to be shown in consoles
            settings_of_consumers(topic, one, app.config)
            for topic, one in self._policies.items()
            if topic not in app.routes
        ]
        await self._long_poll.start(routes)
        stack.push_async_callback(self._long_poll.close)
        self._feed = EventFeed(app)
        self.metrics.streams = lambda: self._feed.listeners
        stack.push_async_callback(self._feed.close)
        beyond = self._insecure and not is_loopback(self._host)
        access = Access(app, anonymous=anonymous, any_name=beyond)
        stack.push_async_callback(access.close)
        self._store_calls = store_calls = StoreCalls(app, pause_gate=self._long_poll.pause_gate, metrics=self.metrics)
        stack.push_async_callback(store_calls.close)
        health = Health(app)
        overviews, day = Overviews(app), LastDay(app)
        stack.push_async_callback(overviews.close)
        stack.push_async_callback(day.close)
        context = ConsoleContext(
            app, health, self.policy_of, self.instance, self._channel, access, overviews, day, stack
        )
        console = Router(context, [page(context) for page in CONSOLE_PAGES])
        verbs = Verbs(app, self._long_poll, self._feed, instance=self.instance)
        self.service = Service(
            app, access, verbs, store_calls, health=health, metrics=self.metrics, console=console,
            proxies=self._proxies,
        )  # fmt: skip

    async def drain(self) -> None:
        """Prepare to stop: start no more webhooks, give running ones the grace, and answer all waiting callers."""
        self._store_calls.drain()
        await asyncio.gather(self._long_poll.close(), self._feed.close(), self._worker.stop())

    async def __aexit__(self, *ended: Any) -> None:
        await self._stack.__aexit__(*ended)


_log = logging.getLogger("bide.serve")
_BACKLOG = 2048
_KEEP_ALIVE = 75
"""Seconds for which an idle connection is kept: longer than proxies do, so that the proxy closes it first."""


class Companion(Protocol):
    """A program that runs in the same process, with handlers on the same app, such as the demo."""

    async def prepare(self) -> None:
        """Called before any task of the store is delivered. May raise BadInput, StoreError."""
        ...

    def running(self, where: str) -> AbstractAsyncContextManager[None]:
        """Entered when the app is open and its handlers run, left after the last call is answered."""
        ...


async def serve(
    app: Bide, config: ServeConfig, *, host: str, port: int, insecure: bool, shown_store: str,
    begin: Callable[[Callable[[str], object], Millis], object], companion: Companion | None = None,
) -> None:  # fmt: skip
    """Serve until stopped. Before any work starts, `begin` is called with the function that drains and the grace.

    Raises BadInput, SetupError, StoreError.
    """
    stopping = asyncio.Event()

    def drain(why: str) -> None:
        _log.info("%s: draining; a second one ends at once", why)
        stopping.set()

    listening = _bind(host, port)
    try:
        if companion is not None:
            await companion.prepare()
        serving = ServiceInstance(app, config, host=host, insecure=insecure)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            begin(drain, app.config.grace)
            await stack.enter_async_context(serving)
            shown, number = listening.getsockname()[:2]
            where = f"http://[{shown}]:{number}" if ":" in shown else f"http://{shown}:{number}"
            listening.listen(_BACKLOG)  # before the address is logged, since its reader may call at once
            _log.info("bide serve: %s from %s, pid %d", where, shown_store, os.getpid())
            if serving.open_to_all:
                _log.warning("without a token, anybody who reaches %s may do anything (bide token add)", where)
            if companion is not None:
                await stack.enter_async_context(companion.running(where))
            await _run_server(serving, listening, stopping)
    finally:
        listening.close()
    _log.info("bide serve: pid %d has stopped", os.getpid())


async def _run_server(serving: ServiceInstance, listening: socket.socket, stopping: asyncio.Event) -> None:
    """Run the server. The grace period for webhooks and connections begins with the first signal."""
    loop = asyncio.get_running_loop()
    grace = serving.app.config.grace / 1000
    server = _Server(under_uvicorn(serving.service, grace, serving.config.connections))

    async def drain() -> None:
        await stopping.wait()
        server.should_exit = True
        cutting = loop.call_later(grace, server.cut)
        try:
            await serving.drain()
            await ended.wait()
        finally:
            cutting.cancel()

    ended = asyncio.Event()
    draining = asyncio.ensure_future(drain())
    try:
        await server.serve(sockets=[listening])
    finally:
        ended.set()
        if not stopping.is_set():
            draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def under_uvicorn(service: Service, grace: float, connections: int = MOST_CONNECTIONS) -> uvicorn.Config:
    """The configuration of uvicorn. A call that runs for longer than `grace` seconds after the signal is cancelled."""
    return uvicorn.Config(
        service, http=BoundedHeads, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=True, timeout_keep_alive=_KEEP_ALIVE, backlog=_BACKLOG, timeout_graceful_shutdown=ceil(grace) + 1,
        proxy_headers=False, limit_concurrency=connections,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Abort the connections that are still open after the grace period; their clients neither read nor send."""
        connections = list(self.server_state.connections)
        if connections:
            _log.warning("%d connections were open after the grace and are aborted", len(connections))
        for connection in connections:
            connection.transport.abort()


def config_of(path: str | None, webhooks: Sequence[str], allow: Sequence[str]) -> ServeConfig:
    """Merge the settings file and the options. Raises BadInput."""
    config = ServeConfig() if path is None else read_config(path)
    for given in webhooks:
        topic, equals, url = given.partition("=")
        if not equals or not topic or not url:
            raise BadInput("--webhook", given, "TOPIC=URL, such as order.close=https://shop.example/hooks")
        if topic in config.topics:
            raise BadInput("--webhook", given, f"a topic that the file does not name; it has {topic}")
        config.topics[topic] = TopicConfig(webhook=url)
    config.webhooks.allow.extend(allow)
    return config


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket, so that a wrong address fails before anything is opened. Raises SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # explicit, for TCP_NODELAY
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        listening.close()
        advice = ""
        if error.errno == errno.EADDRINUSE:
            advice = f"; give another port, such as --port {port % 65_535 + 1}, or --port 0 for any that is free"
        raise SetupError(f"--host {host} --port {port}: cannot listen there: {error}{advice}") from None
    listening.set_inheritable(True)
    return listening
