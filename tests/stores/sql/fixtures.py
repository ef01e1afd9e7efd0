"""Fixtures of the tests of SQL servers: a place on the shared server, stores that are closed, a proxy that fails.

Each folder's conftest says what `database` is, and takes these over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from tests.servers.fixtures import Borrowed, running
from tests.stores.sql.database import WAITS, Database

from bide import Bide
from bide.testing.proxy import FaultProxy


class OpensStore(Protocol):
    """Opens a store at a URL, with options of it; it is closed with the test."""

    async def __call__(self, url: str, *, migrate: bool | None = None, **options: Any) -> Any:
        """`migrate`: by default that is done unless the tables of `url` are there already."""


class Shop:
    """A place with tasks and a table of the caller's; `app` is the caller's, `others` is somebody else's."""

    def __init__(self, database: Database, url: str) -> None:
        self.database = database
        self.url = url
        self.app = Bide(url, actor="ann", keep_done="0s", keep_cancelled="0s")
        self.others = Bide(url, keep_done="0s", keep_cancelled="0s")
        self.orders = database.beside(url, "orders")

    async def rows(self) -> int:
        [(count,)] = self.database.ask(self.url, f"SELECT COUNT(*) FROM {self.orders}")
        return int(count)

    async def keys(self) -> list[str]:
        return sorted([task.key async for task in self.others.find(topic="order.close")])


@pytest.fixture
def url(database: Database, request: pytest.FixtureRequest) -> str:
    """Empty tables on the shared server, which are emptied after the test."""
    schemas: Borrowed = request.getfixturevalue(f"{database.name}_schemas")
    return schemas.url()


@pytest.fixture
def fresh_url(database: Database, request: pytest.FixtureRequest) -> str:
    """A place of the test's own on the shared server; without tables yet."""
    return f"{database.url}?schema={request.getfixturevalue(f'{database.name}_schema')}"


@pytest_asyncio.fixture
async def open_store(database: Database, url: str) -> AsyncIterator[OpensStore]:
    async with AsyncExitStack() as opened:
        shared = url

        async def open_it(url: str, *, migrate: bool | None = None, **options: Any) -> Any:
            if url != shared if migrate is None else migrate:
                await database.schema.migrate(url)
            store = database.Store(url, **{**WAITS, **options})
            await store.open()
            opened.push_async_callback(store.close)
            return store

        yield open_it


@pytest_asyncio.fixture
async def store(url: str, open_store: OpensStore) -> Any:
    """Open at `url`; it goes by the caller's clock."""
    return await open_store(url)


@pytest_asyncio.fixture
async def shop(database: Database, url: str) -> AsyncIterator[Shop]:
    """Without orders yet."""
    shop = Shop(database, url)
    database.ask(url, f"CREATE TABLE IF NOT EXISTS {shop.orders} (number integer)")
    async with shop.others:
        yield shop
    await asyncio.to_thread(shop.app.sync.close)


@pytest_asyncio.fixture
async def proxy(database: Database) -> AsyncIterator[FaultProxy]:
    """In front of the shared server."""
    async with FaultProxy("127.0.0.1", urlsplit(database.url).port or 0) as opened:
        yield opened


def behind(proxy: FaultProxy, url: str) -> str:
    """The same place, by way of the proxy."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{user}@127.0.0.1:{proxy.port}").geturl()


@pytest.fixture
def through(proxy: FaultProxy, url: str, open_store: OpensStore) -> Callable[..., Any]:
    """Opens a store behind the proxy."""

    async def open_it(**options: Any) -> Any:
        return await open_store(behind(proxy, url), migrate=False, **options)

    return open_it


@pytest.fixture(scope="session")
def own_servers(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A private server that one test after another uses."""
    with running(database.Server(tmp_path_factory.mktemp("own") / "server")) as server:
        yield server


@pytest.fixture
def own_server(own_servers: Any) -> Iterator[Any]:
    """A private server, which the test may pause, kill, start and set, and leaves with the settings that it had."""
    yield own_servers
    if not own_servers.running:
        own_servers.start()


@pytest.fixture
def own_url(database: Database, own_server: Any) -> Iterator[str]:
    """A place of the test's own on the private server; without tables yet."""
    url = f"{own_server.url}?schema=t{secrets.token_hex(5)}"
    yield url
    if not own_server.running:
        own_server.start()
    database.drop(url)


@pytest.fixture
def starts(database: Database, request: pytest.FixtureRequest) -> Any:
    """Starts private servers; they end with the test."""
    return request.getfixturevalue({"postgres": "postgres_server", "mysql": "mariadb_server"}[database.name])
