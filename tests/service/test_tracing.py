"""Spans of a real OpenTelemetry SDK: where a task is scheduled, around each delivery, and the link between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from bide import BadInput, Bide, Dead, Defer, Every, Fixed, Retry, StoreFull, Task
from bide.core.options import LONGEST_HEADERS
from bide.core.records import NewTask
from bide.sinks.traced import Tracing
from bide.sinks.webhook.sending import trace_headers
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore


class Traced:
    """An app whose spans can be read."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self.store = FaultyStore(MemoryStore())
        self.app = Bide(self.store)
        self.tracing = Tracing(self.provider)
        self.app.carrier = self.tracing
        self.app.instruments.append(self.tracing)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        [span] = self.spans(name)
        return span

    async def work(self, rounds: int = 1) -> None:
        """Deliver what is due, and what that schedules, and so on."""
        for _ in range(rounds):
            async with self.app.worker() as worker:
                await worker.until_empty()


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    made = Traced()
    async with made.app:
        yield made


def id_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def nothing(task: Task[Any]) -> None:
    """A handler that has nothing to do."""


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


async def test_a_delivery_links_to_its_schedule_and_is_a_trace_of_its_own(traced: Traced) -> None:
    @traced.app.handler("order.close")
    async def close(task: Task[Any]) -> None:
        assert trace.get_current_span().get_span_context().is_valid

    with traced.tracer.start_as_current_span("POST /orders") as request:
        answer = await close.schedule({"number": 42}, key="42", delay="0s")
    await traced.work()

    scheduled, delivered = traced.span("schedule order.close"), traced.span("deliver order.close")
    assert scheduled.parent is not None
    assert scheduled.parent.span_id == request.get_span_context().span_id
    assert scheduled.kind is SpanKind.PRODUCER
    assert delivered.kind is SpanKind.CONSUMER
    assert delivered.parent is None
    assert links_of(delivered) == [id_of(scheduled)]
    assert id_of(delivered)[0] != id_of(scheduled)[0]
    assert answer.record is not None
    assert attributes_of(scheduled) == {
        "messaging.system": "bide", "messaging.destination.name": "order.close",
        "messaging.operation.name": "schedule", "messaging.operation.type": "create",
        "messaging.message.id": answer.record.id, "bide.key": "42", "bide.answer": "created",
    }  # fmt: skip
    seen = attributes_of(delivered)
    assert isinstance(seen.pop("bide.token"), int)
    assert seen == {
        "messaging.system": "bide", "messaging.destination.name": "order.close",
        "messaging.operation.name": "deliver", "messaging.operation.type": "process",
        "messaging.message.id": answer.record.id, "bide.key": "42", "bide.attempt": 1,
        "bide.planned_at": answer.record.wake_at, "bide.outcome": "done",
    }  # fmt: skip
    assert delivered.status.status_code is StatusCode.UNSET


async def test_every_attempt_links_to_the_same_schedule_and_a_failed_one_is_an_error(traced: Traced) -> None:
    ends: list[Any] = [ValueError("no\nluck"), Retry("busy", delay="0s"), Defer("0s"), Dead("never")]

    @traced.app.handler("post", retry=Fixed("1ms", tries=5))
    async def post(task: Task[Any]) -> Any:
        end = ends.pop(0)
        if isinstance(end, ValueError):
            raise end
        return end

    await post.schedule(None, key="a", delay="0s", retry=None)
    await traced.work()

    deliveries = traced.spans("deliver post")
    told = [(attributes_of(span)["bide.outcome"], attributes_of(span)["bide.attempt"]) for span in deliveries]
    assert told == [("retry", 1), ("retry", 2), ("defer", 3), ("dead", 3)]
    error, unset = StatusCode.ERROR, StatusCode.UNSET
    assert [span.status.status_code for span in deliveries] == [error, error, unset, error]
    assert [span.status.description for span in deliveries] == ["ValueError: no\nluck", "busy", None, "never"]
    origin = id_of(traced.span("schedule post"))
    assert all(links_of(span) == [origin] for span in deliveries)
    assert len({id_of(span)[0] for span in deliveries}) == 4
    [event] = deliveries[0].events
    assert event.name == "exception"
    assert attributes_of(deliveries[0])["error.type"] == "ValueError"


async def test_what_a_handler_schedules_is_part_of_its_delivery(traced: Traced) -> None:
    second = traced.app.handler("second")(nothing)

    @traced.app.handler("first")
    async def first(task: Task[Any]) -> None:
        await second.schedule(None, key="b", delay="0s")

    await first.schedule(None, key="a", delay="0s")
    await traced.work()

    delivered, nested = traced.span("deliver first"), traced.span("schedule second")
    assert nested.parent is not None
    assert (nested.parent.trace_id, nested.parent.span_id) == id_of(delivered)
    assert links_of(traced.span("deliver second")) == [id_of(nested)]


async def test_a_plain_handler_in_its_thread_is_in_the_delivery_too(traced: Traced) -> None:
    seen: list[int] = []

    @traced.app.handler("plain")
    def plain(task: Task[Any]) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    await plain.schedule(None, key="a", delay="0s")
    await traced.work()
    assert seen == [id_of(traced.span("deliver plain"))[1]]


async def test_each_task_of_a_batch_has_a_span_of_its_own(traced: Traced) -> None:
    post = traced.app.handler("post")(nothing)
    await traced.app.schedule_many([post.new(None, key=key, delay="0s") for key in ("a", "b")])
    traced.app.recurring.new("post", Every("1h"))  # which schedules nothing
    await traced.work()
    scheduled = {id_of(span) for span in traced.spans("schedule post")}
    assert len(scheduled) == 2
    assert {link for span in traced.spans("deliver post") for link in links_of(span)} == scheduled


async def test_a_schedule_that_the_store_refuses_is_an_error(traced: Traced) -> None:
    traced.store.fault = lambda point: StoreFull("no room") if point == "add:before" else None
    with pytest.raises(StoreFull):
        await traced.app.schedule("post", key="a", delay="1h")
    span = traced.span("schedule post")
    assert span.status.status_code is StatusCode.ERROR
    assert span.events[0].name == "exception"


async def test_a_handler_that_is_cancelled_says_so(traced: Traced) -> None:
    @traced.app.handler("slow", timeout="1ms", retry="never")
    async def slow(task: Task[Any]) -> None:
        await asyncio.Event().wait()

    await slow.schedule(None, key="a", delay="0s")
    await traced.work()
    span = traced.span("deliver slow")
    assert attributes_of(span)["bide.outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.ERROR


async def test_baggage_reaches_the_handler_unless_there_is_much_of_it(traced: Traced) -> None:
    seen: list[object] = []

    @traced.app.handler("post")
    async def post(task: Task[Any]) -> None:
        seen.append(baggage.get_baggage("shop"))

    for value in ("berlin", "b" * 2_000):
        mark = context.attach(baggage.set_baggage("shop", value))
        await post.schedule(None, key=value[:10], delay="0s")
        context.detach(mark)
        await traced.work()
    assert seen == ["berlin", None]
    assert all(len(links_of(span)) == 1 for span in traced.spans("deliver post"))


async def test_a_trace_never_has_a_task_refused(traced: Traced) -> None:
    most = {"note": "n" * (LONGEST_HEADERS - 40)}
    answer = await traced.app.schedule("post", key="a", delay="1h", headers=most)
    assert answer.task is not None
    assert answer.task.headers == most
    with pytest.raises(BadInput, match=r"headers: .* at most 4096 bytes"):
        await traced.app.schedule("post", key="a", delay="1h", headers={"note": "n" * LONGEST_HEADERS})
    given = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    answer = await traced.app.schedule("post", key="b", delay="1h", headers=given)
    assert answer.task is not None
    assert answer.task.headers["traceparent"] == given["traceparent"]


@pytest.mark.parametrize(
    "options", [b"", b"\xff\xff", b"\x81\xa7headers\x81\xabtraceparent\xa4junk"], ids=["none", "damaged", "no context"]
)
async def test_without_a_usable_context_there_is_no_link(traced: Traced, options: bytes) -> None:
    post = traced.app.handler("post")(nothing)
    made = post.new(None, key="a", delay="0s")
    await traced.app.schedule_new(NewTask(made.topic, made.key, made.id, made.due, made.payload, None, options))
    await traced.work()
    assert links_of(traced.span("deliver post")) == []


async def test_the_trace_of_a_request_goes_on(traced: Traced) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with traced.tracing.received({"traceparent": parent, "host": "bide"}):
        await traced.app.schedule("post", key="a", delay="1h")
    span = traced.span("schedule post")
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == parent[3:52]
    assert not trace.get_current_span().get_span_context().is_valid

    with traced.tracer.start_as_current_span("own") as own, traced.tracing.received({"traceparent": parent}):
        assert trace.get_current_span() is own


async def test_a_sink_sends_on_the_delivery_or_what_the_task_carries(traced: Traced) -> None:
    sent: list[Any] = []

    @traced.app.handler("post")
    async def post(task: Task[Any]) -> None:
        sent.append(trace_headers(task)["traceparent"])

    await post.schedule(None, key="a", delay="0s")
    await traced.work()
    trace_id, span_id = id_of(traced.span("deliver post"))
    assert [one[:53] for one in sent] == [f"00-{trace_id:032x}-{span_id:016x}-"]

    carried = {"traceparent": "00-" + "c" * 32 + "-" + "d" * 16 + "-01", "other": "not sent"}
    untraced = Bide("memory:")
    async with untraced:
        answer = await untraced.schedule("post", key="a", delay="1h", headers=carried)
        assert answer.task is not None
        assert trace_headers(answer.task) == {"traceparent": carried["traceparent"]}
        answer = await untraced.schedule("post", key="b", delay="1h")
        assert answer.task is not None
        assert trace_headers(answer.task) == {}


async def test_without_an_sdk_the_trace_that_there_is_goes_on() -> None:
    """An app that is told to trace in a program that does not: handlers pass on what their task carries."""
    app = Bide("memory:")
    app.trace()
    app.trace()
    assert len(app.instruments) == 1
    carried = {"traceparent": "00-" + "c" * 32 + "-" + "d" * 16 + "-01"}

    @app.handler("first")
    async def first(task: Task[Any]) -> None:
        await app.schedule("second", key="b", delay="1h")

    async with app:
        await app.schedule("first", key="a", delay="0s", headers=carried)
        async with app.worker() as worker:
            await worker.until_empty()
        task = await app.get("second", "b")
        assert task is not None
        assert task.headers == carried


async def test_app_sync_and_the_joined_verbs_are_traced(traced: Traced, tmp_path: Any) -> None:
    app = Bide(f"sqlite:///{tmp_path}/traced.db")
    app.carrier = traced.tracing
    answer = await asyncio.to_thread(app.sync.schedule, "post", key="a", delay="1h")
    await asyncio.to_thread(app.sync.close)
    trace_id, span_id = id_of(traced.span("schedule post"))
    assert answer.task is not None
    assert answer.task.headers["traceparent"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")
