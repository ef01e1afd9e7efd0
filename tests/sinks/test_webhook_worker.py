"""Webhooks at a worker: a receiver that hangs delays nobody else, retries keep the id, a drain gives tasks back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.sinks.receiver import Receiver, hangs, receiving, says

from bide import Bide, Fixed, State
from bide.core.retry import RetryPolicy
from bide.ports import Route
from bide.sinks.webhook import WebhookPost, WebhookResult, WebhookSink

TOPIC = "hook"
ONCE = Fixed("0s", tries=1)


def route(app: Bide, sink: WebhookSink, retry: RetryPolicy = ONCE) -> None:
    app.routes[TOPIC] = Route(topic=TOPIC, sink=sink, retry=retry, concurrency=sink.concurrency)


class Told:
    """The results so far, and a wait for as many of them as a test needs."""

    def __init__(self) -> None:
        self.results: list[WebhookResult] = []
        self._changed = asyncio.Event()

    def __call__(self, result: WebhookResult) -> None:
        self.results.append(result)
        self._changed.set()

    def of(self, host: str, outcome: str) -> list[WebhookResult]:
        return [result for result in self.results if result.host == host and result.outcome == outcome]

    async def until(self, count: int, host: str, outcome: str) -> None:
        while len(self.of(host, outcome)) < count:
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def at_work(app: Bide) -> AsyncIterator[None]:
    async with app, asyncio.timeout(25), app.worker():
        yield


@pytest.mark.real_time
async def test_a_receiver_that_hangs_delays_nobody_else() -> None:
    """Three times as many tasks as the topic has slots go to a host that never answers; 200 go to another."""
    told = Told()
    async with (
        receiving(hangs) as stuck,
        receiving() as well,
        WebhookPost(allow=[stuck.place, well.place], observe=told) as post,
    ):
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True))
        assert app.routes[TOPIC].concurrency == 100
        stuck_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": stuck.url}) for n in range(300)]
        async with at_work(app):
            late: list[float] = []
            for done in range(10, 201, 10):
                began = time.perf_counter()
                well_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": well.url}) for n in range(10)]
                await app.schedule_many([*stuck_tasks, *well_tasks])  # those that get stuck come first
                stuck_tasks = []
                await told.until(done, well.place, "done")
                late.append(time.perf_counter() - began)
                await asyncio.sleep(0.02)
            assert post.hosts.busy(stuck.place) == len(stuck.received) == 20
            assert len({result.key for result in told.of(stuck.place, "defer")}) == 280
            assert not told.of(stuck.place, "retry"), "all this was while it hung"
            assert not told.of(well.place, "retry")
            assert sorted(late)[len(late) // 2] < 1.0, "the host that hangs would have held them for 30 seconds"


@pytest.mark.real_time
async def test_all_are_delivered_once_a_receiver_is_well_again() -> None:
    """What was deferred meanwhile has counted no attempt."""
    told = Told()
    async with receiving(hangs) as one, WebhookPost(allow=[one.place], observe=told, per_host=4) as post:
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True, total="300ms"), Fixed("100ms", tries=3))
        async with at_work(app):
            await app.schedule_many([app.new(TOPIC, n, delay="0s", headers={"webhook": one.url}) for n in range(60)])
            await told.until(4, one.place, "retry")
            one.answer = says(200)
            await told.until(60, one.place, "done")
    done = told.of(one.place, "done")
    assert len({result.key for result in done}) == len(done) == 60
    assert len(told.of(one.place, "retry")) <= 8
    deferred = {result.key for result in told.of(one.place, "defer")}
    failed = {result.key for result in told.of(one.place, "retry")}
    assert all(result.attempt == 1 for result in done if result.key in deferred - failed)


async def test_a_retry_has_the_same_id_and_a_new_token(receiver: Receiver) -> None:
    told = Told()
    answers = iter([says(500), says(503), says(200)])

    async def next_answer(*arguments: object) -> None:
        await next(answers)(*arguments)  # type: ignore[arg-type]

    receiver.answer = next_answer
    async with WebhookPost(allow=[receiver.place], observe=told) as post:
        app = Bide("memory:")
        route(app, post.sink(receiver.url), Fixed("1ms", tries=5))
        async with at_work(app):
            await app.schedule(TOPIC, {"number": 42}, key="42", delay="0s")
            await told.until(1, receiver.place, "done")
    headers = [request.headers for request in receiver.received]
    assert [one["bide-attempt"] for one in headers] == ["1", "2", "3"]
    assert len({one["webhook-id"] for one in headers}) == 1
    tokens = [int(one["bide-token"]) for one in headers]
    assert tokens == sorted(set(tokens))


async def test_the_reason_is_kept_with_the_task(receiver: Receiver) -> None:
    told = Told()
    receiver.answer = says(410, b"this shop has closed")
    async with WebhookPost(allow=[receiver.place], observe=told) as post:
        app = Bide("memory:")
        route(app, post.sink(receiver.url))
        async with app:
            await app.schedule(TOPIC, None, key="42", delay="0s")
            async with app.worker() as worker:
                await worker.until_empty()
            task = await app.get(TOPIC, "42")
    assert task is not None
    assert (task.state, task.error) == (State.DEAD, "410 Gone: this shop has closed")


async def test_a_drain_in_the_middle_of_a_request_gives_the_task_back(receiver: Receiver) -> None:
    receiver.answer = hangs
    told = Told()
    async with WebhookPost(allow=[receiver.place], observe=told) as post:
        app = Bide("memory:", grace="0s")
        route(app, post.sink(receiver.url))
        async with app:
            await app.schedule(TOPIC, {"number": 42}, key="42", delay="0s")
            async with app.worker():
                await receiver.came.wait()
            await receiver.gone.wait()
            task = await app.get(TOPIC, "42")
            assert task is not None
            assert (task.state, task.attempt, task.failures) == (State.WAITING, 0, 0)
            assert not told.results, "it has no outcome"
            receiver.answer = says(200)
            async with app.worker() as worker:
                await worker.until_empty()
        assert [request.headers["bide-attempt"] for request in receiver.received] == ["1", "1"]
        assert len({request.headers["webhook-id"] for request in receiver.received}) == 1


async def test_a_cancel_in_the_middle_of_a_request_ends_it(receiver: Receiver) -> None:
    """The worker learns of it as it extends the lease."""
    receiver.answer = hangs
    async with WebhookPost(allow=[receiver.place]) as post:
        app = Bide("memory:", lease="1s", grace="0s")
        route(app, post.sink(receiver.url))
        async with at_work(app):
            await app.schedule(TOPIC, None, key="42", delay="0s")
            await receiver.came.wait()
            answer = await app.cancel(TOPIC, "42")
            assert answer.result == "cancelled_while_leased"
            await receiver.gone.wait()
            assert post.hosts.busy(receiver.place) == 0
