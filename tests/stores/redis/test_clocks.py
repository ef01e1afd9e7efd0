"""The server's clock is the one that counts: wherever it stands, when it is set, and whatever this machine's says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.servers.fixtures import not_installed
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.waiting import not_before, until

from bide import Bide, Task
from bide.core.instants import In
from bide.stores.redis import RedisStore
from bide.testing.store_suite.base import MINUTE, keys, new
from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.server import ServerClock

HOUR = 3_600
MILLISECOND = 0.001
"""Which is what servers count in. Both in seconds."""


class Watched:
    """An app with a worker that notes which keys were delivered."""

    def __init__(self, url: str) -> None:
        self.app = Bide(RedisStore(url))
        self.at: dict[str, float] = {}

        @self.app.handler("work")
        async def work(task: Task[None]) -> None:
            self.at[task.key] = time.monotonic()

    async def keeps(self, key: str, delay: float) -> None:
        """Schedule `key` and wait for it: it comes, and not before its time by the steady clock."""
        began = time.monotonic()
        await self.app.schedule("work", None, key=key, delay=f"{int(delay * 1000)}ms")
        await until(lambda: key in self.at, key)
        not_before(self.at[key], began + delay - MILLISECOND, key)

    async def goes_by(self, store: RedisStore) -> None:
        """The app's clock is that of the server, which is hours off."""
        assert abs(self.app.clock.now() - await store.time()) < MINUTE


@pytest.fixture(scope="module")
def start_shifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Servers, ServerClock]]]:
    """Servers of a deployment that go by a clock which can be set, the Sentinels by the machine's; for all tests here.

    All of a Cluster's go by the same one: each shard goes by its own node's (docs/redis.md, Clocks).
    """
    with ExitStack() as stack:
        started: dict[str, tuple[Servers, ServerClock]] = {}

        def start(deployment: str) -> tuple[Servers, ServerClock]:
            if deployment not in started:
                folder = tmp_path_factory.mktemp(f"shifted-{deployment}")
                try:
                    clock = ServerClock()
                    servers = Servers(deployment, folder / "servers", clock=clock)
                    stack.enter_context(servers.running)
                except ServerMissing as error:
                    not_installed(error)
                stack.enter_context(servers.patient())  # nodes whose clock was set take the others for dead
                started[deployment] = servers, clock
            return started[deployment]

        yield start


@pytest.fixture
def shifted(
    deployment: str, start_shifted: Callable[[str], tuple[Servers, ServerClock]]
) -> Iterator[tuple[Servers, ServerClock]]:
    servers, clock = start_shifted(deployment)
    yield servers, clock
    clock.shift(0)


@pytest.mark.parametrize("off", [-5 * HOUR, 5 * HOUR], ids=["behind", "ahead"])
async def test_a_server_that_is_hours_off_and_whose_clock_is_set_while_it_runs(
    shifted: tuple[Servers, ServerClock], redis_namespace: str, open_store: OpensStore, off: int
) -> None:
    """Ahead: what lay within the hour is due. Back: what waits has longer to wait. New delays are right at once."""
    servers, clock = shifted
    clock.shift(off)
    watched = Watched(f"{servers.url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        await watched.goes_by(await open_store(servers.url))
        await watched.keeps("before", 0.05)
        await watched.app.schedule("work", None, key="half an hour", delay="30m")
        clock.shift(off + HOUR)
        await until(lambda: "half an hour" in watched.at, "what is due by the clock that was set")
        await watched.keeps("ahead", 0.1)
        await watched.app.schedule("work", None, key="later", delay="10m")
        clock.shift(off)
        await watched.keeps("back", 0.1)
        await watched.keeps("and again", 0.1)
        assert "later" not in watched.at, "an hour and a bit from now, by the server's clock"
        clock.shift(off + HOUR + 1_200)
        await until(lambda: "later" in watched.at, "the last")


@pytest.mark.parametrize("off", [-9 * HOUR, 9 * HOUR], ids=["behind", "ahead"])
async def test_a_client_whose_clock_is_hours_wrong_is_neither_early_nor_late(
    shared_url: str, redis_namespace: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    right = await open_store(shared_url)
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + off)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + off * 10**9)
    watched = Watched(f"{shared_url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        await watched.keeps("own", 0.1)
        began = time.monotonic()
        await right.add([new("other", topic="work", due=In(100), payload=b"null")], now=0)
        await until(lambda: "other" in watched.at, "what another client scheduled")
        not_before(watched.at["other"], began + 0.1 - MILLISECOND, "what another client scheduled")
        await watched.goes_by(right)


async def test_a_lease_is_not_given_before_its_time_whoever_asks(shared_url: str, open_store: OpensStore) -> None:
    """By a caller that believes it to be tomorrow, too."""
    store = await open_store(shared_url)
    began = time.monotonic()
    await store.add([new("soon", due=In(300)), new("now", due=In(0))], now=0)
    tomorrow = int(time.time() + 24 * HOUR) * 1000
    got: list[str] = []

    async def both() -> bool:
        leased = await store.lease({"t": 10}, now=tomorrow, until=tomorrow + 600_000, holder="w")
        if "soon" in keys(leased.tasks):
            not_before(time.monotonic(), began + 0.3 - MILLISECOND, "the one that waits")
        got.extend(keys(leased.tasks))
        return len(got) == 2

    await until(both, "both")
    assert got == ["now", "soon"]
