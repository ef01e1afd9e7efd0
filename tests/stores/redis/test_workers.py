"""Who works on what, with real workers: they come and go, are busy, or stand still, and everything is done once."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from tests.servers.stalls import Stalls

from bide import Bide, Task
from bide.engine.worker import Worker
from bide.stores.redis import RedisStore
from bide.testing.store_suite.acts import until


class Crew:
    """Workers, each with an app and connections of its own, and what they did."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.done: Counter[str] = Counter()
        self.late: list[float] = []
        self.by: Counter[str] = Counter()
        self._running: list[AsyncExitStack] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def hire(
        self, topics: Sequence[str], *, concurrency: int = 10, until_set: asyncio.Event | None = None
    ) -> Worker:
        app = Bide(RedisStore(self.url), concurrency=concurrency)
        name = f"worker-{len(self._running)}-{time.monotonic_ns()}"

        async def work(task: Task[Any]) -> None:
            self.late.append((app.clock.now() - task.record.planned_at) / 1000)
            self.done[f"{task.topic}/{task.key}"] += 1
            self.by[name] += 1
            await (asyncio.sleep(0.001) if until_set is None else until_set.wait())

        for topic in topics:
            app.handler(topic)(work)
        stack = AsyncExitStack()
        await stack.enter_async_context(app)
        worker = await stack.enter_async_context(app.worker(name=name))
        self._running.append(stack)
        return worker

    async def dismiss(self, count: int = 1) -> None:
        await asyncio.gather(*(self._running.pop(0).aclose() for _ in range(count)))

    async def close(self) -> None:
        await self.dismiss(len(self._running))


@pytest.fixture
def url(shared_url: str, redis_namespace: str) -> str:
    return f"{shared_url}?namespace={redis_namespace}"


async def test_workers_come_and_go_and_every_task_is_done_once_and_in_time(
    deployment: str, url: str, server_stalls: Stalls
) -> None:
    """1, 5, 2, 20 and 1 workers, of different topics, under a steady load: nobody starves while they change."""
    kinds: list[list[str]] = [["a", "b", "c"], ["a"], ["b", "c"]]
    expected: list[str] = []

    async def schedule() -> None:
        number = 0
        while not stopping:
            topic = "abc"[number % 3]
            await client.schedule(topic, None, key=f"{number}", delay="30ms")
            expected.append(f"{topic}/{number}")
            number += 1
            await asyncio.sleep(0.005)

    stopping = False
    async with Bide(url) as client, Crew(url) as crew:
        await crew.hire(kinds[0])
        scheduling = asyncio.create_task(schedule())
        for count in (5, 2, 20, 1):
            await asyncio.sleep(0.25)
            there = len(crew._running)
            # whoever is new works on everything, so that no topic is without a worker
            await asyncio.gather(*(crew.hire(kinds[one % 3]) for one in range(max(1, count - there))))
            await crew.dismiss(len(crew._running) - count)
        await asyncio.sleep(0.3)
        await crew.hire(kinds[0])
        stopping = True
        await scheduling
        await until(lambda: len(crew.done) == len(expected), "all of them")
        await crew.close()
        assert (await client.tally()).number() == 0
    assert sorted(crew.done) == sorted(expected)
    assert set(crew.done.values()) == {1}
    assert sorted(crew.late)[len(crew.late) // 2] < 0.1
    # promised are 5 s; twenty workers that come at the same time make twenty connections each in a Cluster
    assert max(crew.late) < (3.0 if deployment == "cluster" else 1.5) + server_stalls.seconds


async def test_others_take_what_a_busy_worker_cannot(url: str, server_stalls: Stalls) -> None:
    """Its slots are taken, so its shards are served by whoever has room, once the head is 50 ms overdue."""
    async with Bide(url) as client, Crew(url) as crew:
        over = asyncio.Event()
        busy = await crew.hire(["t"], concurrency=1, until_set=over)
        await client.schedule("t", None, key="long", delay="0s")
        try:
            await until(lambda: crew.done["t/long"] == 1, "the long one to begin")
            await crew.hire(["t"])
            await asyncio.sleep(0.2)
            crew.late.clear()
            for number in range(60):
                await client.schedule("t", None, key=f"{number}", delay="5ms")
                await asyncio.sleep(0.005)
            await until(lambda: len(crew.done) == 61, "all of them")
            assert busy.stats.leased == 1
            assert max(crew.late) < 0.4 + server_stalls.seconds
            assert sorted(crew.late)[30] < 0.15
        finally:
            over.set()


async def test_the_work_is_shared(url: str) -> None:
    async with Bide(url) as client, Crew(url) as crew:
        for _ in range(2):
            await crew.hire(["t"])
        await asyncio.sleep(0.2)
        for number in range(100):
            await client.schedule("t", None, key=f"{number}", delay="5ms")
        await until(lambda: len(crew.done) == 100, "all of them")
    assert len(crew.by) == 2
    assert set(crew.done.values()) == {1}


@pytest.mark.faults
async def test_a_worker_that_stands_still_for_longer_than_its_lease(url: str) -> None:
    """What it held is done by another; when it goes on, what is settled is not delivered, and nothing is lost."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("stopped_worker.py")), url, "500ms",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    events: list[tuple[float, str, str]] = []

    async def read() -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            what, key, at = line.decode().split()
            events.append((float(at), what, key))

    reading = asyncio.create_task(read())
    app = Bide(RedisStore(url), lease="500ms")

    @app.handler("work", losses=100)
    async def work(task: Task[None]) -> None:
        events.append((time.monotonic(), "delivered", task.key))
        await asyncio.sleep(0.02)

    def observe(record: Any, settlement: Any) -> None:
        events.append((time.monotonic(), "settled", record.key))

    def settled() -> set[str]:
        return {key for _, what, key in events if what == "settled"}

    try:
        async with app, app.worker(observe=observe):
            await until(lambda: bool(events), "the other process")
            for number in range(300):
                await app.schedule("work", None, key=f"{number}", delay="10ms")
                if number in (100, 200):
                    child.send_signal(signal.SIGSTOP)
                if number == 150:
                    await asyncio.sleep(0.7)
                    child.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.002)
            began = time.monotonic()
            await until(lambda: (time.monotonic() - began) > 0.7, "the second stop to outlast the lease")
            child.send_signal(signal.SIGCONT)
            await until(lambda: len(settled()) == 300, "all of them")
            await asyncio.sleep(0.2)
            assert (await app.tally()).number() == 0
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.wait_for(child.wait(), 10)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await reading
    over: dict[str, float] = {}
    for at, what, key in sorted(events):
        if what == "settled":
            over.setdefault(key, at)
    late = [key for at, what, key in events if what == "delivered" and key in over and at > over[key] + 0.02]
    assert late == [], "delivered after it was settled"
