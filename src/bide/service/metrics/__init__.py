"""What is counted, under which name; docs/metrics.md has the same table, and a test compares the two."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, Self

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from bide._version import __version__
from bide.core.errors import SetupError
from bide.core.instants import Millis
from bide.core.outcomes import Outcome
from bide.core.records import Record, Settlement, State, Topic, Verdict
from bide.core.tasks import Task
from bide.engine.client import Client
from bide.ports import Clock, Instrument, Route, Sink, Store, SystemClock, TableStats, Wakes
from bide.service.metrics.measures import (
    DEFECT,
    ERRORS,
    OPERATIONS,
    OTHER,
    Failed,
    Families,
    Family,
    Few,
    Gauge,
    Looked,
    Looking,
    Series,
    Took,
    by_label,
    kind_of,
    time_calls,
)

_LATENESS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600,
)  # fmt: skip
_STORE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_OUTCOMES = ("done", "retry", "defer", "dead")
_MOST_CALLS = 100


class WebhookResult(Protocol):
    """What is looked at of a webhook's result."""

    @property
    def topic(self) -> str: ...
    @property
    def status(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def outcome(self) -> str: ...


class Metrics(Instrument):
    """The metrics of one app. Make it before the app is opened: it attaches itself (`app.instruments`).

    By that, store calls, the lateness and outcome of the app's own deliveries and the wake-ups of its workers are
    counted. What else there is, whoever does it tells: `started`, `settled`, `webhook`, `request`, and `with` one of
    `polls` and `streams` around it. `topics`: so many topics have series of their own, those with a route or `reserve`d
    first, then the fullest, until they have been absent for an hour; all others are "other". The store is counted at
    most once in `tally_every` seconds. Belongs to one event loop; no method raises.
    """

    def __init__(
        self,
        client: Client,
        *,
        topics: int = 200,
        tally_every: float = 5.0,
        patience: float = 2.0,
        wall: Clock | None = None,
    ) -> None:
        if client.open_in is not None:
            raise SetupError("make the metrics before the app is opened: they time the store's calls from its opening")
        self._client = client
        self._looking = Looking(client, every=tally_every, patience=patience, wall=wall or SystemClock())
        self._topics = Few(topics)
        self._calls = Few(_MOST_CALLS)
        self._wakes: list[Wakes] = []
        self._tables: list[tuple[str, TableStats]] = []
        self._stores: list[Store] = []
        self._late: dict[Topic, Series] = {}
        self._dropped = self._dropped_before = 0
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._families = Families()
        self._registry.register(self._families)
        self._declare()
        client.instruments.append(self)

    def _declare(self) -> None:
        made = self._families
        made.gauge("bide_build_info", "Always 1; what runs.", ["version", "python"]).set(
            __version__, platform.python_version(), to=1
        )
        self._up = made.gauge("bide_store_up", "1 if the store answered at the last look, else 0.")
        self._counted = made.gauge(
            "bide_store_counted", "1 if the counts below are of the last look, 0 if they are older."
        )
        self._age = made.gauge("bide_counts_age_seconds", "How old the counts below are; not there without any.")
        self._tasks = made.gauge(
            "bide_tasks", "Tasks in the store; waiting are those that are pending, due or not.", ["topic", "state"]
        )
        self._due = made.gauge("bide_tasks_due", "Waiting tasks whose time has come.", ["topic"])
        self._oldest = made.gauge(
            "bide_oldest_due_seconds", "How long the oldest due task has been due; 0 if there is none.", ["topic"]
        )
        self._paused = made.gauge("bide_topic_paused", "1 for each topic that is paused.", ["topic"])
        self._at_limit = made.gauge(
            "bide_counts_at_limit", "Counts above that stopped at the store's limit: there are at least so many."
        )
        self._in_other = made.gauge("bide_topics_in_other", "Topics in the store that share the label other.")
        self._skew = made.gauge(
            "bide_clock_skew_seconds",
            "How far this machine's clock is ahead of the store's; not there for a store without a clock.",
        )
        self._lateness = made.histogram(
            "bide_lateness_seconds", "Start of a delivery minus the time that it was planned for.", ["topic"], _LATENESS
        )
        self._outcomes = made.counter(
            "bide_outcomes_total", "Outcomes of deliveries that the store has accepted.", ["topic", "verdict"]
        )
        self._store_seconds = made.histogram(
            "bide_store_call_seconds", "Calls of the store, each for a batch of tasks.", ["operation"], _STORE
        )
        self._store_errors = made.counter(
            "bide_store_errors_total", "Calls of the store that failed.", ["operation", "error"]
        )
        for operation in OPERATIONS:
            for error in (*ERRORS, DEFECT):
                self._store_errors.add(operation, error, by=0)
        self._rows = made.counter(
            "bide_table_rows_total", "Rows of tables that are watched: fired, failed (each try), or given up.",
            ["table", "result"],
        )  # fmt: skip
        self._tidings = made.counter("bide_tidings_total", "Wake-ups heard from the store.")
        self._tiding_age = made.gauge(
            "bide_tiding_age_seconds", "How long ago the last wake-up was heard; not there before the first."
        )
        self._wakeups = made.counter(
            "bide_wakeups_total", "Sleeps that ended: at the time of a wake-up, of the last lease, or at the cap.",
            ["reason"],
        )  # fmt: skip
        self._missed = made.counter(
            "bide_wakeups_missed_total", "Sleeps to the cap after which something was found that had been due before."
        )
        self._webhooks = made.counter(
            "bide_webhook_results_total", "Webhooks, by the class of the answer's status and the outcome.",
            ["topic", "status", "outcome"],
        )  # fmt: skip
        self._webhook_seconds = made.histogram(
            "bide_webhook_seconds", "Webhooks, from the first byte of work to the outcome.", ["topic"], _REQUEST
        )
        self._requests = made.counter(
            "bide_http_requests_total",
            "Requests, by the status of the answer; 499: the caller went before it.",
            ["call", "status"],
        )
        self._request_seconds = made.histogram(
            "bide_http_request_seconds", "Requests, from the first byte to the answer.", ["call"], _REQUEST
        )
        self.polls = Open(made.gauge("bide_lease_polls_open", "Consumers that wait for something to come due."))
        self.streams = Open(made.gauge("bide_event_streams_open", "Streams of events that somebody follows."))
        self._events_dropped = made.counter(
            "bide_events_dropped_total", "Lines of the event log that could not be written."
        )

    @property
    def families(self) -> list[Family[Any]]:
        """What is counted, in the order of the exposition."""
        return self._families.all

    # --- told by the app

    def opening(self, store: Store) -> None:
        """See `Instrument.opening`. A store that is opened again is timed once."""
        if not any(one is store for one in self._stores):
            self._stores.append(store)
            time_calls(store, self._watch)

    def _watch(self, operation: str) -> tuple[Took, Failed]:
        def failed(error: BaseException) -> None:
            kind = kind_of(error)
            if kind is not None:
                self._store_errors.add(operation, kind)

        return self._store_seconds.series(operation).observe, failed

    def route(self, route: Route) -> Route:
        """`route`, whose deliveries' lateness is measured."""
        self._topics.reserve(route.topic)
        return replace(route, sink=_Measured(route.sink, self))

    def reserve(self, topic: Topic) -> None:
        """This topic has series of its own, however many there are."""
        self._topics.reserve(topic)

    def working(self, wakes: Wakes) -> None:
        """Count the wake-ups of one more loop."""
        self._wakes.append(wakes)

    def watching(self, table: str, stats: TableStats) -> None:
        """Count the rows of one more table, or of one more worker on it."""
        self._tables.append((table, stats))

    def observe(self, record: Record, told: Settlement) -> None:
        self.settled(record.topic, told.verdict)

    # --- told by whoever does it

    def started(self, record: Record, now: Millis) -> None:
        """A delivery of `record` starts, or it is handed out, at `now` by the store's clock."""
        series = self._late.get(record.topic)
        if series is None:
            label = self._topics.label(record.topic)
            series = self._lateness.series(label)
            if label == record.topic:
                self._late[label] = series
        series.observe(max(0, now - record.planned_at) / 1000)

    def settled(self, topic: Topic, verdict: Verdict) -> None:
        """The store has accepted an outcome."""
        self._outcomes.add(self._topics.label(topic), verdict.value)

    def webhook(self, result: WebhookResult) -> None:
        """A webhook has ended."""
        topic, status = self._topics.label(result.topic), result.status
        family = "none" if status is None else f"{status // 100}xx" if 100 <= status <= 599 else OTHER
        self._webhooks.add(topic, family, result.outcome if result.outcome in _OUTCOMES else OTHER)
        self._webhook_seconds.series(topic).observe(result.seconds)

    def request(self, call: str, status: int, seconds: float) -> None:
        """A request was answered; `call` is the route's name, not the path."""
        call = self._calls.label(call)
        self._requests.add(call, str(status) if 100 <= status <= 599 else OTHER)
        self._request_seconds.series(call).observe(seconds)

    # --- told to Prometheus

    async def exposition(self) -> tuple[bytes, str]:
        """All metrics now, and their content type. A store that is away costs its counts, not the others."""
        await self._look()
        self._add_up()
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    async def _look(self) -> None:
        looked = Looked(up=False) if self._client.open_in is None else await self._looking.look()
        seen = looked.seen
        self._up.set(to=int(looked.up))
        self._counted.set(to=int(looked.counted))
        of_store = (self._tasks, self._due, self._oldest, self._paused, self._at_limit, self._skew)
        if seen is None:
            for gauge in (*of_store, self._age, self._in_other):
                gauge.replace({})
            return
        self._age.set(to=looked.age)
        present: Counter[Topic] = Counter()
        for (topic, _), number in seen.tasks.items():
            present[topic] += number
        for topic in sorted(present, key=lambda topic: (-present[topic], topic)):  # the fullest first
            self._topics.label(topic)
        for gone in self._topics.free():
            self._late.pop(gone, None)
            for family in self.families:
                family.forget(gone)
        label = self._topics.given
        self._in_other.set(to=sum(label(topic) != topic for topic in present))
        topics = sorted(present.keys() | self._topics.known.keys())
        counts: dict[tuple[str, ...], float] = {}
        for state in State:
            numbers = {topic: float(seen.tasks.get((topic, state), 0)) for topic in topics}
            counts |= {(name, state.value): number for name, number in by_label(numbers, label).items()}
        self._tasks.replace(counts)
        due = {topic: float(seen.due.get(topic, 0)) for topic in topics}
        self._due.replace({(name,): number for name, number in by_label(due, label).items()})
        oldest = {topic: seen.oldest.get(topic, 0.0) for topic in topics}
        self._oldest.replace({(name,): age for name, age in by_label(oldest, label, most=True).items()})
        self._paused.replace({(label(topic),): 1.0 for topic in seen.paused})
        self._at_limit.set(to=seen.at_limit)
        self._skew.replace({} if seen.skew is None else {(): seen.skew})

    def _add_up(self) -> None:
        """What others count, as it is now."""
        self.polls.add_up()
        self.streams.add_up()
        for table in {name for name, _ in self._tables}:
            stats = [one for name, one in self._tables if name == table]
            self._rows.values[(table, "fired")] = sum(one.fired for one in stats)
            self._rows.values[(table, "failed")] = sum(one.failed for one in stats)
            self._rows.values[(table, "dead")] = sum(one.dead for one in stats)
        wakes = self._wakes
        self._tidings.values[()] = sum(one.tidings for one in wakes)
        for reason, number in (
            ("tiding", sum(one.by_tiding for one in wakes)),
            ("alarm", sum(one.by_alarm for one in wakes)),
            ("cap", sum(one.by_cap for one in wakes)),
        ):
            self._wakeups.values[(reason,)] = number
        self._missed.values[()] = sum(one.missed for one in wakes)
        heard = [one.heard_at for one in wakes if one.heard_at is not None]
        self._tiding_age.replace({(): time.monotonic() - max(heard)} if heard else {})
        if self._client.open_in is not None:
            dropped = self._client.recorder.dropped
            if dropped < self._dropped:  # the app was opened again, with a new recorder
                self._dropped_before += self._dropped
            self._dropped = dropped
        self._events_dropped.values[()] = self._dropped_before + self._dropped


class Open:
    """How many are open: `with` it, once for each; or whoever counts them anyway is asked (`follow`)."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._number = 0
        self._counts: list[Callable[[], int]] = []

    def __enter__(self) -> Self:
        self._number += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._number -= 1

    def follow(self, count: Callable[[], int]) -> None:
        """Ask `count` as well, at each exposition."""
        self._counts.append(count)

    def add_up(self) -> None:
        self._gauge.set(to=self._number + sum(count() for count in self._counts))


class _Measured:
    """A sink whose deliveries are measured as they start."""

    def __init__(self, sink: Sink, metrics: Metrics) -> None:
        self.sink = sink
        self._deliver = sink.deliver
        self._metrics = metrics
        self._client = metrics._client

    def deliver(self, task: Task[Any]) -> Coroutine[Any, Any, Outcome | None]:
        """Hands out the sink's own coroutine: no frame of ours lies around a delivery."""
        self._metrics.started(task.record, self._client.clock.now())
        return self._deliver(task)
