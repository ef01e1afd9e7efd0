"""OpenTelemetry spans: one for each schedule and one for each delivery, linked by the context that the task carries.

A delivery is a separate trace with a *link* to the schedule, not a child of it, since days may lie in between.
Collectors truncate a trace that stays open for days and sample it before its end is known, and it shows as one long
bar. All attempts of a task link to the same schedule, as the semantic conventions for messaging require.

The context travels in the task's headers as W3C Trace Context (`traceparent`, `tracestate`) and W3C Baggage, whatever
propagator the program uses elsewhere, so that consumers in other languages can read it. Baggage reaches the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from msgspec import DecodeError
from msgspec.structs import replace
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import INVALID_SPAN, Link, ProxyTracerProvider, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bide.core.answers import Answer
from bide.core.names import error_text
from bide.core.outcomes import Dead, Defer, Outcome, Retry
from bide.core.records import Topic
from bide.core.tasks import Task
from bide.ports import Instrument, Route, Sink

_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_LONGEST_BAGGAGE = 1_024
"""The most bytes of baggage that a task carries; all its headers may have four times as much."""
_scheduling: ContextVar[bool] = ContextVar("bide_scheduling", default=False)


def sdk_is_set_up() -> bool:
    """True if the program has set up an OpenTelemetry SDK; else spans are dropped."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


class Tracing(Instrument):
    """Traces one app: its carrier and its instrument (see `Bide.trace`). `provider`: the program's unless given."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("bide", tracer_provider=provider)

    # --- schedule

    @contextmanager
    def scheduling(self, topic: Topic) -> Iterator[Callable[[Answer], Answer]]:
        """A span around one `schedule`: its time, its answer, its error."""
        with self._producer(topic) as span:
            mark = _scheduling.set(True)

            def on_answer(answer: Answer) -> Answer:
                span.set_attribute("bide.answer", answer.result.value)
                if answer.record is not None and span.is_recording():
                    span.set_attribute("messaging.message.id", answer.record.id)
                    span.set_attribute("bide.key", answer.record.key)
                return answer

            try:
                yield on_answer
            finally:
                _scheduling.reset(mark)

    def headers(self, topic: Topic) -> Mapping[str, str] | None:
        """The context of the span around the `schedule`; for a batch, the context of a span made here."""
        if _scheduling.get():
            return current_headers()
        with self._producer(topic):
            return current_headers()

    def _producer(self, topic: Topic) -> Any:
        return self._tracer.start_as_current_span(
            f"schedule {topic}", kind=SpanKind.PRODUCER, attributes=_attributes(topic, "schedule", "create")
        )

    @contextmanager
    def received(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Continue the trace of a request with these headers (names in lower case) within this block.

        If the web framework is traced already, its span stays current.
        """
        if trace.get_current_span().get_span_context().is_valid:
            yield
            return
        mark = contexts.attach(_W3C.extract(headers))
        try:
            yield
        finally:
            contexts.detach(mark)

    # --- deliver

    def route(self, route: Route) -> Route:
        """`route` with a span around each delivery."""
        return replace(route, sink=TracedSink(route.sink, self._tracer))


class TracedSink:
    """A span around each delivery to `sink`, current while it runs."""

    def __init__(self, sink: Sink, tracer: trace.Tracer) -> None:
        self.sink = sink
        self._deliver = sink.deliver
        self._tracer = tracer

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        carried, links = _carried(task)
        mark = contexts.attach(carried)
        try:
            with self._consumer(task, links) as span:
                try:
                    outcome = await self._deliver(task)
                except BaseException as error:
                    _end(span, error)
                    raise
                _end(span, outcome)
                return outcome
        finally:
            contexts.detach(mark)

    def _consumer(self, task: Task[Any], links: list[Link]) -> Any:
        record = task.record
        return self._tracer.start_as_current_span(
            f"deliver {record.topic}", kind=SpanKind.CONSUMER, links=links,
            attributes=_attributes(record.topic, "deliver", "process") | {
                "messaging.message.id": record.id, "bide.key": record.key, "bide.token": record.token,
                "bide.attempt": record.attempt, "bide.planned_at": record.planned_at,
            },
            record_exception=False, set_status_on_exception=False,
        )  # fmt: skip


def _attributes(topic: Topic, name: str, kind: str) -> dict[str, str | int]:
    """The attributes of every span, by the semantic conventions for messaging."""
    return {
        "messaging.system": "bide", "messaging.destination.name": topic, "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }  # fmt: skip


def _end(span: trace.Span, ended: BaseException | None) -> None:
    """Record the outcome. Retry, Dead and every exception of a handler is an error; Defer is not."""
    if isinstance(ended, Dead):
        _fail(span, "dead", ended.why)
    elif isinstance(ended, Retry):
        _fail(span, "retry", ended.why or "retry asked for")
    elif isinstance(ended, Defer):
        span.set_attribute("bide.outcome", "defer")
    elif ended is None or isinstance(ended, Outcome):
        span.set_attribute("bide.outcome", "done")
    elif isinstance(ended, asyncio.CancelledError):
        _fail(span, "cancelled", "a time limit, a lost lease, or the end of the worker")
    else:
        with suppress(Exception):  # an error whose text cannot be formatted
            span.record_exception(ended)
        span.set_attribute("error.type", type(ended).__qualname__)
        _fail(span, "retry", error_text(ended))


def _fail(span: trace.Span, outcome: str, why: str) -> None:
    span.set_attribute("bide.outcome", outcome)
    span.set_status(Status(StatusCode.ERROR, why))


def _carried(task: Task[Any]) -> tuple[Context, list[Link]]:
    """The context of a delivery, with the task's baggage and no parent; and the link to its schedule."""
    try:
        headers = task.headers if task.record.options else None
    except DecodeError:
        headers = None
    if not headers:
        return trace.set_span_in_context(INVALID_SPAN), []
    carried = _W3C.extract(headers)
    origin = trace.get_current_span(carried).get_span_context()
    return trace.set_span_in_context(INVALID_SPAN, carried), [Link(origin)] if origin.is_valid else []


def current_headers() -> dict[str, str]:
    """The W3C headers of the current span; without a traceparent if there is no span."""
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    if len(headers.get("baggage", "")) > _LONGEST_BAGGAGE:
        del headers["baggage"]
    return headers
