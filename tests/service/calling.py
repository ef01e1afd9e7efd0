"""A client of the HTTP API for tests: what is sent goes out exactly as it is given."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.servers.keyspace import delete_keys
from tests.service.instance import Instance, served
from tests.waiting import PATIENCE, not_before, until

from bide.core.instants import instant
from bide.service.serving import ServeConfig
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide_proofs.servers.postgres import ask

JSON = {"content-type": "application/json"}


class Reply:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:500]!r}"

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def answer(self) -> tuple[int, str]:
        """The status and the word."""
        return self.status, self.json["answer"]

    @property
    def task(self) -> Any:
        return self.json["task"]


class Api:
    """Calls one instance, over one connection that is kept."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2 * PATIENCE)

    def close(self) -> None:
        self._connection.close()

    def __call__(
        self, method: str, path: str, ask: Any = None, *, body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:  # fmt: skip
        """`ask` is sent as JSON, `body` as it is."""
        sent = {**self._headers, **(headers or {})}
        if ask is not None:
            body = json.dumps(ask).encode()
        if body is not None:
            sent = {**JSON, **sent}
        try:
            self._connection.request(method, path, body, sent)
            got = self._connection.getresponse()
            reply = Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        except BaseException:
            self._connection.close()
            raise
        kind = reply.headers.get("content-type", "")
        if reply.status >= 400 and kind == "application/problem+json" and method != "HEAD":
            assert reply.json["status"] == reply.status
            assert reply.json["type"].startswith("urn:bide:")
            assert reply.json["title"]
            assert reply.json["detail"]
        return reply

    def done(self, method: str, path: str, ask: Any = None, **more: Any) -> Any:
        """The JSON of a call that must succeed."""
        reply = self(method, path, ask, **more)
        assert reply.status in (200, 201), reply
        return reply.json

    def put(self, topic: str, key: str, **ask: Any) -> Any:
        """Schedule; the task."""
        return self.done("PUT", at(topic, key), ask if "at" in ask else {"delay": "1h", **ask})["task"]

    def lease(self, topic: str, room: int = 1, **ask: Any) -> Any:
        """The tasks that are due, for longer than any test takes."""
        return self.done("POST", "/v1/lease", {"topics": {topic: room}, "lease_for": "1h", **ask})["tasks"]

    def settle(self, task: Any, outcome: str, **ask: Any) -> bool:
        [settled] = self.done("POST", "/v1/settle", [{**held(task), "outcome": outcome, **ask}])["settled"]
        assert isinstance(settled, bool)
        return settled

    def get(self, topic: str, key: str) -> Any:
        """The task as it is; None where there is none."""
        reply = self("GET", at(topic, key))
        return reply.json if reply.status == 200 else None

    def dead(self, topic: str, key: str) -> Any:
        """Make a task and let it die; the task."""
        self.put(topic, key, delay="0s")
        [task] = self.lease(topic)
        assert self.settle(task, "dead", error="broken")
        return self.get(topic, key)


def at(topic: str, key: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/tasks/{quote(key, safe='')}"


def held(task: Any) -> dict[str, Any]:
    return {name: task[name] for name in ("topic", "key", "token")}


class Asked:
    """The moment before something is asked for, to tell that an answer reckons from then on."""

    def __init__(self) -> None:
        self._at = time.time() * 1000

    def check(self, text: str, length: float) -> None:
        """The instant is so many milliseconds after a moment between then and now; stores' clocks may be 1 s off."""
        not_before(instant(text), self._at + length - 1_000, text)
        not_before(time.time() * 1000 + length + 1_000, instant(text), "what is reckoned from now")


class Gated(FaultyStore):
    """A store in memory that holds back the calls which are `held`, until they are not any more."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.held: set[str] = set()

    async def around(self, name: str, verb: Callable[[], Any]) -> Any:
        async def later() -> Any:
            await until(lambda: name not in self.held, f"{name} to be let go")
            return await verb()

        return await super().around(name, later)


@contextmanager
def fresh_store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store with nothing in it, of the kind that is the fixture's parameter."""
    name, own = request.param, "t" + secrets.token_hex(5)
    if name == "redis":
        server = request.getfixturevalue("redis_url")
        yield f"{server}?namespace={own}&shards=4"
        delete_keys(server, own)
    elif name == "postgres":
        from bide.stores.postgres.schema import SCHEMA

        server = request.getfixturevalue("postgres_url")
        asyncio.run(SCHEMA.migrate(f"{server}?schema={own}"))
        yield f"{server}?schema={own}"
        ask(server, f"DROP SCHEMA {own} CASCADE")
    else:
        folder = request.getfixturevalue("tmp_path_factory").mktemp("store")
        yield "memory:" if name == "memory" else f"sqlite:///{folder}/tasks.db"


Running = Instance


@contextmanager
def running(store: Any, config: ServeConfig | None = None, **settings: Any) -> Iterator[Running]:
    """An instance in a loop and a thread of its own, for as long as the block lasts."""
    up, over = threading.Event(), threading.Event()
    found: list[Running] = []
    failed: list[BaseException] = []

    async def run() -> None:
        async with served(store, config, **settings) as instance:
            found.append(instance)
            up.set()
            await asyncio.to_thread(over.wait)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - it is raised again where somebody sees it
            failed.append(error)
            up.set()

    thread = threading.Thread(target=work, name="instance")
    thread.start()
    try:
        assert up.wait(PATIENCE)
        if not failed:
            yield found[0]
    finally:
        over.set()
        thread.join(PATIENCE)
    if failed:
        raise failed[0]


def connected(one: Running) -> socket.socket:
    return socket.create_connection((urlsplit(one.url).hostname, urlsplit(one.url).port), PATIENCE)


def answered(one: Running, *sent: bytes) -> bytes:
    """What comes back until the connection ends, or as much of it as came before it was cut."""
    with connected(one) as client:
        found = b""
        try:
            for part in sent:
                client.sendall(part)
            while part := client.recv(65_536):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found
