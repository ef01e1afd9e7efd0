"""Webhooks at a worker: a receiver that hangs delays nobody else, retries keep the id, a drain gives tasks back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.sinks.receiver import Received, Receiver, closes, hangs, receiving, says
from tests.waiting import until

from bide import Bide, Fixed, State
from bide.core.retry import RetryPolicy
from bide.engine.delivery.worker import Worker
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

    def __call__(self, result: WebhookResult) -> None:
        self.results.append(result)

    def of(self, host: str, outcome: str) -> list[WebhookResult]:
        return [result for result in self.results if result.host == host and result.outcome == outcome]

    def keys(self, host: str, outcome: str) -> set[str]:
        return {result.key for result in self.of(host, outcome)}

    async def until(self, count: int, host: str, outcome: str) -> None:
        """So many tasks have had this outcome."""
        await until(lambda: len(self.keys(host, outcome)) >= count, f"{count} tasks that are {outcome}")


@asynccontextmanager
async def at_work(app: Bide) -> AsyncIterator[Worker]:
    async with app, app.worker() as worker:
        yield worker


async def test_a_receiver_that_hangs_delays_nobody_else() -> None:
    """Three times as many tasks as the topic has slots go to a host that never answers; 200 go to another."""
    told = Told()
    async with (
        receiving(hangs) as stuck,
        receiving() as well,
        WebhookPost(allow=[stuck.place, well.place], observe=told) as post,
    ):
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True, total="1h"))
        assert app.routes[TOPIC].concurrency == 100
        stuck_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": stuck.url}) for n in range(300)]
        async with at_work(app):
            for done in range(10, 201, 10):
                well_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": well.url}) for n in range(10)]
                await app.schedule_many([*stuck_tasks, *well_tasks])  # those that get stuck come first
                stuck_tasks = []
                await told.until(done, well.place, "done")
            await told.until(280, stuck.place, "defer")
            await until(lambda: len(stuck.received) == 20, "all requests that hang")
            assert post.hosts.busy(stuck.place) == 20
            assert len(told.keys(stuck.place, "defer")) == 280
            assert not told.of(stuck.place, "retry"), "all this was while it hung"
            assert not told.of(well.place, "retry")


async def test_all_are_delivered_once_a_receiver_is_well_again() -> None:
    """What was deferred meanwhile has counted no attempt."""
    told, broken = Told(), asyncio.Event()

    async def hangs_until_it_breaks(request: Received, writer: asyncio.StreamWriter) -> None:
        await broken.wait()
        await closes(request, writer)

    async with (
        receiving(hangs_until_it_breaks) as one,
        WebhookPost(allow=[one.place], observe=told, per_host=4) as post,
    ):
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True, total="1h"), Fixed("100ms", tries=3))
        async with at_work(app):
            await app.schedule_many([app.new(TOPIC, n, delay="0s", headers={"webhook": one.url}) for n in range(60)])
            await told.until(56, one.place, "defer")
            await until(lambda: len(one.received) == 4, "all requests that hang")
            one.answer = says(200)
            broken.set()
            await told.until(60, one.place, "done")
    done, failed = told.of(one.place, "done"), told.keys(one.place, "retry")
    assert len(done) == 60
    assert len(told.of(one.place, "retry")) == len(failed) == 4
    assert {result.key for result in done if result.attempt == 1} == told.keys(one.place, "defer") - failed


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
        app = Bide("memory:", lease="1h", grace="0s")
        route(app, post.sink(receiver.url))
        async with at_work(app) as worker:
            await app.schedule(TOPIC, None, key="42", delay="0s")
            await receiver.came.wait()
            answer = await app.cancel(TOPIC, "42")
            assert answer.result == "cancelled_while_leased"
            await worker._lease_extender.extend()
            await receiver.gone.wait()
            await until(lambda: post.hosts.busy(receiver.place) == 0, "its place to be free")
