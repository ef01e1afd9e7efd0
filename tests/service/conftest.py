"""Instances of the service for the tests of its API: one on each store, shared by all tests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.keyspace import delete_keys
from tests.servers.postgres_server import ask
from tests.service.calling import Api, Running, running

KEPT: dict[str, Any] = {"keep_done": "1h", "keep_cancelled": "1h"}
"""As `bide serve` has it."""


def _url(name: str, request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    """A store's URL, with nothing in it yet."""
    own = "t" + secrets.token_hex(5)
    if name == "redis":
        server = request.getfixturevalue("redis_url")
        yield f"{server}?namespace={own}&shards=4"
        delete_keys(server, own)
    elif name == "postgres":
        from bide.stores.postgres import schema

        server = request.getfixturevalue("postgres_url")
        asyncio.run(schema.migrate(f"{server}?schema={own}"))
        yield f"{server}?schema={own}"
        ask(server, f"DROP SCHEMA {own} CASCADE")
    else:
        yield "memory:" if name == "memory" else f"sqlite:///{directory}/tasks.db"


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis", "postgres"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An instance on each store."""
    for url in _url(request.param, request, tmp_path_factory.mktemp("api")):
        with running(url, **KEPT) as found:
            yield found


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """One on a store in memory, for what has nothing to do with the store."""
    with running("memory:", **KEPT) as found:
        yield found


@pytest.fixture
def api(service: Running) -> Iterator[Api]:
    """Calls the instance on each store."""
    found = Api(service.url)
    yield found
    found.close()


@pytest.fixture
def plain(small: Running) -> Iterator[Api]:
    """Calls the one on a store in memory."""
    found = Api(small.url)
    yield found
    found.close()


@pytest.fixture
def topic() -> str:
    """One that no other test has."""
    return f"topic.{secrets.token_hex(6)}"
