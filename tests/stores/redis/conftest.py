"""What the fault tests of the Redis store share: stores that are opened and closed, also behind a proxy that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from tests.servers.child import ServerMissing
from tests.servers.fixtures import not_installed
from tests.servers.redis_cluster import RedisCluster

from bide.stores.redis import RedisStore
from bide.testing.proxy import FaultProxy


class OpensStore(Protocol):
    """Opens a store at a URL, with options of `RedisStore`; it is closed with the test."""

    async def __call__(self, url: str, **options: Any) -> RedisStore: ...


@pytest_asyncio.fixture
async def open_store(redis_namespace: str) -> AsyncIterator[OpensStore]:
    async with AsyncExitStack() as opened:

        async def open_it(url: str, *, namespace: str = redis_namespace, query: str = "", **options: Any) -> RedisStore:
            store = RedisStore(f"{url}?namespace={namespace}{query}", **options)
            await store.open()
            opened.push_async_callback(store.close)
            return store

        yield open_it


@pytest.fixture(scope="session")
def lasting_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A private cluster for all tests that leave it whole: its slots may be moved, its nodes paused for a moment."""
    try:
        with RedisCluster(tmp_path_factory.mktemp("lasting-cluster")) as cluster:
            yield cluster
    except ServerMissing as error:
        not_installed(error)


@pytest_asyncio.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    """In front of the shared server."""
    async with FaultProxy("127.0.0.1", urlsplit(redis_url).port or 0) as opened:
        yield opened


@pytest_asyncio.fixture
async def through(proxy: FaultProxy, open_store: OpensStore) -> Callable[..., Any]:
    """Opens a store behind the proxy. It goes by the caller's clock, and gives up a silent connection after 0.2 s."""

    async def open_it(**options: Any) -> RedisStore:
        given = {"clock": "caller", "silence": 0.2, "patience": 5.0, **options}
        return await open_store(f"redis://127.0.0.1:{proxy.port}/0", **given)

    return open_it
