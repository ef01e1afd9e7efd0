"""The server's clock is the one that counts: wherever it stands, when it is set, and whatever this machine's says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.servers.child import ServerMissing
from tests.servers.fixtures import not_installed
from tests.servers.server_clock import ServerClock
from tests.servers.stalls import Stalls
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers

from bide import Bide, Task
from bide.core.records import In
from bide.stores.redis import RedisStore
from bide.testing.store_suite.acts import keys, new, until

HOUR = 3_600


class Watched:
    """An app with a worker that notes when each key was delivered, by the steady clock."""

    def __init__(self, url: str) -> None:
        self.app = Bide(RedisStore(url))
        self.at: dict[str, float] = {}
        self.early: list[str] = []

        @self.app.handler("work")
        async def work(task: Task[None]) -> None:
            self.at[task.key] = time.monotonic()

    async def after(self, key: str, delay: float) -> float:
        """Schedule `key` and wait for it; by how many seconds it came too late."""
        began = time.monotonic()
        await self.app.schedule("work", None, key=key, delay=f"{int(delay * 1000)}ms")
        await until(lambda: key in self.at, key)
        return self.at[key] - began - delay


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
                    clock = ServerClock(folder)
                    servers = Servers(deployment, folder / "servers", environment=clock.environment)
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


@pytest.mark.parametrize("ahead", [-5 * HOUR, 5 * HOUR], ids=["behind", "ahead"])
async def test_a_server_that_is_hours_off_keeps_every_delay(
    shifted: tuple[Servers, ServerClock], redis_namespace: str, stalls: Stalls, ahead: int
) -> None:
    servers, clock = shifted
    clock.shift(ahead)
    watched = Watched(f"{servers.url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        assert abs(watched.app.clock.now() / 1_000 - time.time() - ahead) < 1, "the clock that counts"
        late = [await watched.after(f"{number}", 0.1) for number in range(5)]
    assert min(late) > -0.002
    assert max(late) < 0.15 + stalls.seconds


async def test_a_server_whose_clock_is_set_while_it_runs(
    shifted: tuple[Servers, ServerClock], redis_namespace: str, stalls: Stalls
) -> None:
    """Ahead: what lay within the hour is due. Back: what waits has longer to wait. New delays are right at once."""
    servers, clock = shifted
    watched = Watched(f"{servers.url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        assert await watched.after("before", 0.05) < 0.2 + stalls.seconds
        await watched.app.schedule("work", None, key="half an hour", delay="30m")
        clock.shift(HOUR)
        await until(lambda: "half an hour" in watched.at, "what is due by the clock that was set")
        assert -0.002 < await watched.after("ahead", 0.1) < 0.2 + stalls.seconds
        await watched.app.schedule("work", None, key="later", delay="200ms")
        clock.shift(0)
        assert -0.002 < await watched.after("back", 0.1) < 1.3 + stalls.seconds, "at most the longest sleep"
        assert -0.002 < await watched.after("and again", 0.1) < 0.2 + stalls.seconds
        assert "later" not in watched.at, "an hour and a bit from now, by the server's clock"
        clock.shift(HOUR)
        await until(lambda: "later" in watched.at, "the last")


@pytest.mark.parametrize("off", [-9 * HOUR, 9 * HOUR], ids=["behind", "ahead"])
async def test_a_client_whose_clock_is_hours_wrong_is_neither_early_nor_late(
    shared_url: str,
    redis_namespace: str,
    open_store: OpensStore,
    monkeypatch: pytest.MonkeyPatch,
    server_stalls: Stalls,
    off: int,
) -> None:
    right = await open_store(shared_url)
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + off)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + off * 10**9)
    watched = Watched(f"{shared_url}?namespace={redis_namespace}")
    async with watched.app, watched.app.worker():
        assert -0.002 < await watched.after("own", 0.1) < 0.2 + server_stalls.seconds
        began = time.monotonic()
        await right.add([new("other", topic="work", due=In(100), payload=b"null")], now=0)
        await until(lambda: "other" in watched.at, "what another client scheduled")
        assert 0.098 < watched.at["other"] - began < 0.3 + server_stalls.seconds
        assert abs(watched.app.clock.now() / 1000 - real()) < 1


async def test_a_lease_is_not_given_before_its_time_whoever_asks(
    shared_url: str, open_store: OpensStore, server_stalls: Stalls
) -> None:
    """By a caller that believes it to be tomorrow, too."""
    store = await open_store(shared_url)
    began = time.monotonic()
    await store.add([new("soon", due=In(300)), new("now", due=In(0))], now=0)
    tomorrow = int(time.time() + 24 * HOUR) * 1000
    got: list[str] = []
    while len(got) < 2:
        leased = await store.lease({"t": 10}, now=tomorrow, until=tomorrow + 60_000, holder="w")
        if "soon" in keys(leased.tasks):
            assert time.monotonic() - began > 0.295
        got += keys(leased.tasks)
        await asyncio.sleep(0.01)
    assert got == ["now", "soon"]
    assert time.monotonic() - began < 1.5 + server_stalls.seconds
