"""Who works on what, with real workers: they come and go, are busy, or stand still, and everything is done once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE, pause, until

from bide import Bide, Task
from bide.core.records import OutcomeKind, Record, Settlement
from bide.engine.delivery.worker import Worker
from bide.stores.redis import RedisStore


class Crew:
    """Workers, each with an app and connections of its own, and what they did."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.done: Counter[str] = Counter()
        self.by: Counter[int] = Counter()
        self._running: list[AsyncExitStack] = []
        self._numbers = count()

    async def hire(
        self, topics: Sequence[str], *, concurrency: int = 10, until_set: asyncio.Event | None = None
    ) -> Worker:
        app = Bide(RedisStore(self.url), concurrency=concurrency, keep_done="0s")
        number = next(self._numbers)

        async def work(task: Task[Any]) -> None:
            self.done[f"{task.topic}/{task.key}"] += 1
            self.by[number] += 1
            if until_set is not None:
                await until_set.wait()

        for topic in topics:
            app.handler(topic)(work)
        stack = AsyncExitStack()
        await stack.enter_async_context(app)
        worker = await stack.enter_async_context(app.worker(name=f"worker-{number}"))
        self._running.append(stack)
        return worker

    async def change_to(self, size: int, kinds: Sequence[Sequence[str]]) -> None:
        """The newest stay. Of those who come the first works on everything, so that no topic is without a worker."""
        there = len(self._running)
        await asyncio.gather(*(self.hire(kinds[one % len(kinds)]) for one in range(max(1, size - there))))
        await self.dismiss(len(self._running) - size)

    async def dismiss(self, number: int) -> None:
        leaving, self._running = self._running[:number], self._running[number:]
        await asyncio.gather(*(one.aclose() for one in leaving))

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.dismiss(len(self._running))


@pytest.fixture
def url(shared_url: str, redis_namespace: str) -> str:
    return f"{shared_url}?namespace={redis_namespace}"


async def test_workers_come_and_go_and_every_task_is_done_once(url: str) -> None:
    """1, 5, 2, 10 and 1 workers, of different topics, under a steady load: nobody starves while they change."""
    kinds = [["a", "b", "c"], ["a"], ["b", "c"]]
    expected: list[str] = []
    stopping = False

    async def schedule() -> None:
        while not stopping:
            number = len(expected)
            topic = "abc"[number % 3]
            expected.append(f"{topic}/{number}")
            await client.schedule(topic, None, key=f"{number}", delay="30ms")
            await pause(0.005, why="the pace of the load")

    async with Bide(url) as client, Crew(url) as crew:
        await crew.hire(kinds[0])
        scheduling = asyncio.create_task(schedule())
        for size in (5, 2, 10, 1):
            enough = len(crew.done) + 50
            await until(lambda enough=enough: len(crew.done) >= enough, "some of the load")  # type: ignore[misc]
            await crew.change_to(size, kinds)
        await crew.hire(kinds[0])
        stopping = True
        await scheduling
        await until(lambda: len(crew.done) == len(expected), "all of them")
        assert len(crew.by) > 2, "the work is shared"
        await crew.dismiss(2)
        assert (await client.tally()).number() == 0
    assert sorted(crew.done) == sorted(expected)
    assert set(crew.done.values()) == {1}


async def test_others_take_what_a_busy_worker_cannot(url: str) -> None:
    """Its slots are taken, so its shards are served by whoever has room, once the head is 50 ms overdue."""
    async with Bide(url) as client, Crew(url) as crew:
        over = asyncio.Event()
        busy = await crew.hire(["t"], concurrency=1, until_set=over)
        await client.schedule("t", None, key="long", delay="0s")
        try:
            await until(lambda: crew.done["t/long"] == 1, "the long one to begin")
            await crew.hire(["t"])
            for number in range(60):
                await client.schedule("t", None, key=f"{number}", delay="5ms")
            await until(lambda: len(crew.done) == 61, "all of them")
            assert busy.stats.leased == 1
        finally:
            over.set()


async def test_a_worker_that_stands_still_for_longer_than_its_lease(url: str, root: Path) -> None:
    """What it held is done by another; when it goes on, what is done is not delivered, and nothing is lost.

    One that stood still while its lease was on its way gives back what it gets, without a delivery: that is no end.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.stores.redis.stopped_worker", url, "500ms",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=root,
    )  # fmt: skip
    tokens: dict[str, dict[str, list[int]]] = {what: defaultdict(list) for what in ("ready", "delivered", "done")}
    theirs: set[str] = set()
    numbers = count()

    async def read() -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            what, key, token = line.decode().split()
            tokens[what][key].append(int(token))
            theirs.add(key)

    reading = asyncio.create_task(read())
    app = Bide(RedisStore(url), lease="500ms", keep_done="0s")

    @app.handler("work", losses=1_000)
    async def work(task: Task[None]) -> None:
        tokens["delivered"][task.key].append(task.record.token)
        await pause(0.02, why="there is something to interrupt")

    def observe(record: Record, settlement: Settlement) -> None:
        if settlement.outcome is OutcomeKind.DONE:
            tokens["done"][record.key].append(record.token)

    async def schedule() -> None:
        await app.schedule("work", None, key=f"{next(numbers)}", delay="10ms")
        await pause(0.002, why="the pace of the load")

    async def nothing_is_left() -> bool:
        return (await app.tally()).number() == 0

    try:
        async with app, app.worker(observe=observe):
            await until(lambda: bool(tokens["ready"]), "the other process")
            for _ in range(3):
                before = len(theirs)
                async with asyncio.timeout(PATIENCE):
                    while len(theirs) == before:
                        await schedule()
                child.send_signal(signal.SIGSTOP)
                for _ in range(50):
                    await schedule()
                await until(nothing_is_left, "what it held to be done by the other")
                child.send_signal(signal.SIGCONT)
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.wait_for(child.wait(), PATIENCE)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await reading
    assert set(tokens["done"]) == {f"{number}" for number in range(next(numbers))}
    assert {key for key, ended in tokens["done"].items() if len(ended) > 1} == set(), "done twice"
    late = [key for key, [ended] in tokens["done"].items() if max(tokens["delivered"][key]) > ended]
    assert late == [], "delivered after it was done"
