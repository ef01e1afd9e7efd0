"""What the tests of the MySQL store share: stores that are opened and closed, also behind a proxy that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from bide.stores.mysql import MySqlStore, schema
from bide.testing.proxy import FaultProxy


class OpensStore(Protocol):
    """Opens a store at a URL, with options of `MySqlStore`; it is closed with the test."""

    async def __call__(self, url: str, **options: Any) -> MySqlStore: ...


@pytest.fixture
def url(mysql_url: str, mysql_schema: str) -> str:
    """A place of the test's own on the shared server; without tables yet."""
    return f"{mysql_url}?schema={mysql_schema}"


@pytest_asyncio.fixture
async def open_store() -> AsyncIterator[OpensStore]:
    async with AsyncExitStack() as opened:

        async def open_it(url: str, *, migrate: bool = True, **options: Any) -> MySqlStore:
            if migrate:
                await schema.migrate(url)
            store = MySqlStore(url, **{"clock": "caller", **options})
            await store.open()
            opened.push_async_callback(store.close)
            return store

        yield open_it


@pytest_asyncio.fixture
async def proxy(mysql_url: str) -> AsyncIterator[FaultProxy]:
    """In front of the shared server."""
    async with FaultProxy("127.0.0.1", urlsplit(mysql_url).port or 3306) as opened:
        yield opened


@pytest.fixture
def through(proxy: FaultProxy, url: str, open_store: OpensStore) -> Callable[..., Any]:
    """Opens a store behind the proxy."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    behind = parts._replace(netloc=f"{user}@127.0.0.1:{proxy.port}").geturl()

    async def open_it(**options: Any) -> MySqlStore:
        await schema.migrate(url)
        return await open_store(behind, migrate=False, **{"silence": 2.0, "patience": 5.0, **options})

    return open_it
