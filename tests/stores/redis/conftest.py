"""What the fault tests of the Redis store share: the deployments, and stores that are opened there and closed again.

Who uses any of these fixtures runs on every deployment: one server, Sentinel, Cluster. Where a fault does not exist on
one of them, the test says so: `parametrize("deployment", ["single"])`, with the reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from redis import RedisError
from tests.servers.fixtures import running
from tests.servers.keyspace import delete_keys
from tests.stores.redis.deployments import DEPLOYMENTS, Servers
from tests.stores.redis.proxies import Proxies
from tests.waiting import wait_until

from bide.stores.redis import RedisStore, topology
from bide.stores.server import LONGEST_PATIENCE
from bide_proofs.servers.redis_replicas import RedisCluster

_SHARED = {"single": "redis_url", "sentinel": "redis_sentinel_url", "cluster": "redis_cluster_url"}


class OpensStore(Protocol):
    """Opens a store at a URL, with options of `RedisStore`; it is closed with the test."""

    async def __call__(self, url: str, **options: Any) -> RedisStore: ...


@pytest.fixture(autouse=True)
def _patience_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is as patient as any call: a server may be slow at any time."""
    monkeypatch.setattr("bide.stores.redis.store._AT_FIRST", LONGEST_PATIENCE)


@pytest.fixture(autouse=True)
def made_connections() -> Iterator[list[Any]]:
    """Every connection that a store makes during the test. All have to be closed when it ends."""
    made: list[Any] = []
    make = topology.make_connection

    def make_it(*where: Any, **options: Any) -> Any:
        made.append(make(*where, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "make_connection", make_it)
        yield made
    assert [one for one in made if one.is_connected] == [], "these are still open"


@pytest_asyncio.fixture
async def open_store(redis_namespace: str) -> AsyncIterator[OpensStore]:
    """With as much patience as there can be, unless the test says otherwise."""
    async with AsyncExitStack() as opened:

        async def open_it(url: str, *, namespace: str = redis_namespace, query: str = "", **options: Any) -> RedisStore:
            patient = {"patience": LONGEST_PATIENCE, "silence": LONGEST_PATIENCE}
            store = RedisStore(f"{url}?namespace={namespace}{query}", **(patient | options))
            await store.open()
            opened.push_async_callback(store.close)
            return store

        yield open_it


@pytest.fixture(params=DEPLOYMENTS)
def deployment(request: pytest.FixtureRequest) -> str:
    """single, sentinel and cluster, one after the other."""
    kind: str = request.param
    return kind


@pytest.fixture
def shared_url(deployment: str, request: pytest.FixtureRequest) -> str:
    """Of servers that others use too, for tests that do nothing to them."""
    url: str = request.getfixturevalue(_SHARED[deployment])
    return url


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Servers]]:
    """Private servers of a deployment, for all tests of a module that leave them whole, started at the first use.

    No module leaves them on: to start all takes 0.3 s of CPU, to let them idle, with quick failovers, 3 s in 100 s.
    """
    with ExitStack() as stack:
        started: dict[str, Servers] = {}

        def start(deployment: str) -> Servers:
            if deployment not in started:
                folder = tmp_path_factory.mktemp(f"lasting-{deployment}")
                started[deployment] = servers = Servers(deployment, folder, options={"appendfsync": "always"})
                stack.enter_context(running(servers.running))
            return started[deployment]

        yield start


@pytest.fixture
def own_servers(deployment: str, tmp_path: Path) -> Iterator[Servers]:
    """Servers of the test's own, to be left in whatever state."""
    servers = Servers(deployment, tmp_path / deployment)
    with running(servers.running):
        yield servers


@pytest.fixture
def servers(deployment: str, lasting: Callable[[str], Servers], redis_namespace: str) -> Iterator[Servers]:
    """To be paused, killed and started again, set up otherwise: whatever leaves them whole when it ends."""
    there = lasting(deployment)
    yield there
    # a failover may still be under way
    wait_until(lambda: delete_keys(there.url, redis_namespace) >= 0, "a master", passes=(OSError, RedisError))


@pytest.fixture
def lasting_cluster(servers: Servers) -> RedisCluster:
    """`servers`, where the deployment is a Cluster."""
    assert isinstance(servers.running, RedisCluster)
    return servers.running


@pytest_asyncio.fixture
async def proxies(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxies]:
    """In front of the shared servers."""
    async with Proxies(shared_url, monkeypatch) as opened:
        yield opened


@pytest_asyncio.fixture
async def through(proxies: Proxies, open_store: OpensStore) -> Callable[..., Any]:
    """Opens a store behind the proxies, which goes by the caller's clock."""

    async def open_it(**options: Any) -> RedisStore:
        return await open_store(proxies.url, **{"clock": "caller", **options})

    return open_it
