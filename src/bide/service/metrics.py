"""The metrics of a service or a program, from one table of names; a test compares it with docs/metrics.md.

Counting is cheap. The client library's own metrics take a lock and scan the buckets at every observation, some 2 µs,
but bide counts store calls by the hundred thousand, all on one event loop. So an observation here is a list and a
bisection (0.2 µs), and the library only writes the exposition. Not for use from other threads.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import add
from time import perf_counter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bide._version import __version__
from bide.core import errors
from bide.core.errors import SetupError, StoreError
from bide.core.instants import Millis, as_datetime
from bide.core.outcomes import Outcome
from bide.core.records import OutcomeKind, Record, Settlement, State, Topic
from bide.core.tasks import Task
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.overview import oldest_due
from bide.ports import Instrument, Route, Sink, Store, StoreFacade, SystemClock, TableStats, Wakes
from bide.service.health import reach, skew_of

OTHER = "other"
_ABSENT = 3_600.0
"""Seconds of absence after which a label value is dropped."""
Values: TypeAlias = tuple[str, ...]
One = TypeVar("One")


class Family(Collector, Generic[One]):
    """One metric, and a series for each combination of its labels' values."""

    def __init__(self, kind: str, name: str, about: str, *labels: str) -> None:
        self.kind = kind
        self.name = name
        self.about = about
        self.labels = labels
        self.values: dict[Values, One] = {}

    def forget(self, topic: str) -> None:
        if self.labels[:1] == ("topic",):
            self.values = {values: one for values, one in self.values.items() if values[0] != topic}


class Numbers(Family[float]):
    """A counter, which only rises and begins at 0 in each process; or a gauge, which has the current value."""

    def add(self, *values: str, by: float = 1) -> None:
        self.values[values] = self.values.get(values, 0) + by

    def collect(self) -> Iterator[Metric]:
        family: CounterMetricFamily | GaugeMetricFamily
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name.removesuffix("_total"), self.about, labels=self.labels)
        for values, number in self.values.items():
            family.add_metric(values, number)
        yield family


class Series:
    """One histogram: the number of values in each interval."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """O(log intervals)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram(Family[Series]):
    """A histogram of durations in seconds; `bounds` are increasing."""

    def __init__(self, bounds: Sequence[float], name: str, about: str, *labels: str) -> None:
        super().__init__("histogram", name, about, *labels)
        self.bounds = bounds

    def series(self, *values: str) -> Series:
        found = self.values.get(values)
        if found is None:
            found = self.values[values] = Series(self.bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        bounds = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]  # in the form of Prometheus: 1.0, 0.001
        for values, series in self.values.items():
            family.add_metric(values, list(zip(bounds, accumulate(series.counts), strict=True)), series.total)
        yield family


class BoundedLabels:
    """Limits the values of one label: the first `most` keep their name, all others become "other".

    Reserved values always keep theirs; another value does until it has been absent for an hour.
    """

    __slots__ = ("_clock", "_most", "_reserved", "known")

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._reserved: set[str] = set()
        self.known: dict[str, float] = {}
        """Each known value with the time at which it was last present."""

    def reserve(self, value: str) -> None:
        self._reserved.add(value)
        self.known.setdefault(value, self._clock())

    def label(self, value: str) -> str:
        """The label of a value that is present now."""
        if value in self.known or len(self.known) < self._most:
            self.known[value] = self._clock()
            return value
        return OTHER

    def given(self, value: str) -> str:
        """The label of a value that need not be present."""
        return value if value in self.known else OTHER

    def free(self) -> list[str]:
        """Forget the values that have been absent for long enough, and return them."""
        before = self._clock() - _ABSENT
        gone = [one for one, at in self.known.items() if at <= before and one not in self._reserved]
        for one in gone:
            del self.known[one]
        return gone


# --- the counts of the store

_log = logging.getLogger("bide.metrics")
_LONG: Millis = 60_000
_SHARE = 0.1
"""The share of the time that counting may take: after a count of half a second, the next begins five seconds later."""
_MOST_OLDEST = 50
"""The most topics whose oldest due task is queried: those with tasks overdue by a minute first, then the fullest."""


class StoreSample(Struct, frozen=True):
    """The counts of one sample of the store. States in which a topic has no tasks are left out."""

    tasks: Mapping[tuple[Topic, State], int]
    due: Mapping[Topic, int]
    oldest: Mapping[Topic, float]
    """Seconds for which the oldest due task of each topic has been due, without topics that have none."""
    at_limit: int
    """The number of counts that stopped at the store's limit, and so are lower bounds."""
    skew: float | None
    """Seconds by which this machine's clock is ahead of the store's; None: the store has no clock of its own."""
    paused: Collection[Topic]


# --- the calls of the store

R = TypeVar("R")

OPERATIONS = ("add", "change", "get", "find", "tally", "lease", "extend", "settle", "purge")
ERRORS = ("StoreUnavailable", "StoreFull", "StoreCorrupt", "StoreMismatch", "OutcomeUnknown", "PartlyFailed")
DEFECT = "defect"
"""The label of any other error; no store should raise one."""


class TimedStore(StoreFacade):
    """A store that observes each of its operations: the name, the duration in seconds, and the error.

    A cancelled call is not counted.
    """

    def __init__(self, inner: Store, observe: Callable[[str, float, Exception | None], None]) -> None:
        super().__init__(inner)
        self._observe = observe

    async def around(self, operation: str, call: Callable[[], Awaitable[R]]) -> R:
        if operation not in OPERATIONS:
            return await call()
        began = perf_counter()
        try:
            answer = await call()
        except Exception as error:
            self._observe(operation, perf_counter() - began, error)
            raise
        self._observe(operation, perf_counter() - began, None)
        return answer


def kind_of(error: BaseException) -> str | None:
    """The label of an error; None for a mistake of the caller."""
    if isinstance(error, errors.BadInput):
        return None
    name = type(error).__name__
    return name if isinstance(error, errors.StoreError) and name in ERRORS else DEFECT


# --- the metrics

_LATENESS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600,
)  # fmt: skip
_STORE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_OUTCOMES = frozenset(OutcomeKind)
_MOST_CALLS = 100


def _families() -> list[Family[Any]]:
    """All metrics, in the order of the exposition. Histograms and the counters that methods of `Metrics` increment are
    updated at each event; all others are read at each exposition."""
    gauge, counter = partial(Numbers, "gauge"), partial(Numbers, "counter")
    return [
        gauge("bide_build_info", "Always 1; the versions of bide and Python.", "version", "python"),
        gauge("bide_store_up", "1 if the store answered at the last try, else 0."),
        gauge("bide_store_counted", "1 if the counts below are current, 0 if they are older."),
        gauge("bide_counts_age_seconds", "Age of the counts below; absent before the first."),
        gauge("bide_tasks", "Tasks in the store; waiting are those that are pending, due or not.", "topic", "state"),
        gauge("bide_tasks_due", "Waiting tasks that are due.", "topic"),
        gauge("bide_oldest_due_seconds", "How long the oldest due task has been due; 0 if there is none.", "topic"),
        gauge("bide_topic_paused", "1 for each topic that is paused.", "topic"),
        gauge("bide_counts_at_limit", "Counts above that stopped at the store's limit, and so are lower bounds."),
        gauge("bide_topics_in_other", "Topics in the store that share the label other."),
        gauge(
            "bide_clock_skew_seconds",
            "How far this machine's clock is ahead of the store's; absent for a store without a clock.",
        ),
        Histogram(
            _LATENESS, "bide_lateness_seconds", "Start of a delivery minus its planned time.", "topic"
        ),
        counter("bide_outcomes_total", "Outcomes of deliveries, as accepted by the store.", "topic", "verdict"),
        counter(
            "bide_dropped_occurrences_total", "Occurrences of recurring tasks that did not run.", "topic", "reason"
        ),
        Histogram(_STORE, "bide_store_call_seconds", "Calls of the store, each for a batch of tasks.", "operation"),
        counter("bide_store_errors_total", "Calls of the store that failed.", "operation", "error"),
        counter(
            "bide_table_rows_total", "Rows of watched tables: fired, failed (each try), or given up.",
            "table", "result",
        ),
        counter("bide_notifications_total", "Wake-up notifications received from the store."),
        gauge("bide_notification_age_seconds", "Time since the last wake-up notification; absent before the first."),
        counter(
            "bide_wakeups_total", "Sleeps that ended: at the time of a wake-up, of the last lease, or at the cap.",
            "reason",
        ),
        counter(
            "bide_wakeups_missed_total", "Sleeps to the cap after which something was found that had been due before."
        ),
        counter(
            "bide_webhook_results_total", "Webhooks, by the class of the answer's status and the outcome.",
            "topic", "status", "outcome",
        ),
        Histogram(_REQUEST, "bide_webhook_seconds", "Webhooks that were sent, from the start to the outcome.", "topic"),
        counter(
            "bide_http_requests_total", "Requests, by the status of the answer; 499: the caller had disconnected.",
            "call", "status",
        ),
        Histogram(_REQUEST, "bide_http_request_seconds", "Requests, from the first byte to the answer.", "call"),
        gauge("bide_lease_polls_open", "Lease calls that wait for a due task."),
        gauge("bide_event_streams_open", "Open event streams."),
        counter("bide_events_dropped_total", "Lines of the event log that could not be written."),
    ]  # fmt: skip


class WebhookResult(Protocol):
    """The fields of a webhook's result that are counted."""

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

    It counts store calls, the lateness and outcomes of the app's own deliveries, and the wake-ups of its workers.
    Owners report the rest by `started`, `settled`, `webhook` and `request`; `polls` and `streams` return the number of
    open ones. `topics`: the number of topics with their own series. Topics with a route, or `reserve`d ones, come
    first, then the fullest, until they have been absent for an hour; all others share the label "other". Belongs to one
    event loop; no method raises.

    The store is counted at most once in `tally_every` seconds, however many callers ask; each waits at most `patience`.
    Cost: a get of a task that does not exist, a tally with two intervals (O(topics) on most stores, never O(tasks)), a
    page of one task for each topic with due tasks, and the store's time. A slow tally serves the next call.
    """

    def __init__(self, client: Client, *, topics: int = 200, tally_every: float = 5.0, patience: float = 2.0) -> None:
        if client.open_in is not None:
            raise SetupError("make the metrics before the app is opened: they time the store's calls from its opening")
        self._client = client
        self._patience = patience
        self._reaching = CachedQuery(lambda: reach(client.store, patience), every=tally_every, share=1.0, lasting=False)
        self._counting = CachedQuery(self._ask, every=tally_every, share=_SHARE)
        self._sample: StoreSample | None = None
        """The last complete sample."""
        self._topics = BoundedLabels(topics)
        self._calls = BoundedLabels(_MOST_CALLS)
        self._wakes: list[Wakes] = []
        self._tables: list[tuple[str, TableStats]] = []
        self._late: dict[Topic, Series] = {}
        self._dropped = self._dropped_before = 0
        self.families = _families()
        """All metrics, in the order of the exposition."""
        named: Mapping[str, Any] = {family.name: family for family in self.families}
        self._lateness: Histogram = named["bide_lateness_seconds"]
        self._outcomes: Numbers = named["bide_outcomes_total"]
        self._dropped_occurrences: Numbers = named["bide_dropped_occurrences_total"]
        self._store_seconds: Histogram = named["bide_store_call_seconds"]
        self._store_errors: Numbers = named["bide_store_errors_total"]
        self._webhooks: Numbers = named["bide_webhook_results_total"]
        self._webhook_seconds: Histogram = named["bide_webhook_seconds"]
        self._requests: Numbers = named["bide_http_requests_total"]
        self._request_seconds: Histogram = named["bide_http_request_seconds"]
        for operation in OPERATIONS:
            self._store_seconds.series(operation)
            for error in (*ERRORS, DEFECT):
                self._store_errors.add(operation, error, by=0)
        self.polls: Callable[[], int] = lambda: 0
        """Returns how many lease calls wait for a due task."""
        self.streams: Callable[[], int] = lambda: 0
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        for family in self.families:
            self._registry.register(family)
        client.instruments.append(self)

    # --- called by the app

    def store(self, store: Store) -> Store:
        return TimedStore(store, self._called)

    def _called(self, operation: str, seconds: float, error: Exception | None) -> None:
        self._store_seconds.series(operation).observe(seconds)
        kind = None if error is None else kind_of(error)
        if kind is not None:
            self._store_errors.add(operation, kind)

    def route(self, route: Route) -> Route:
        """The route, with the lateness of its deliveries measured."""
        self._topics.reserve(route.topic)
        return replace(route, sink=_MeasuredSink(route.sink, self))

    def reserve(self, topic: Topic) -> None:
        """Give this topic its own series, however many topics there are."""
        self._topics.reserve(topic)

    def working(self, wakes: Wakes) -> None:
        self._wakes.append(wakes)

    def watching(self, table: str, stats: TableStats) -> None:
        """Count the rows of one more table, or of one more worker on it."""
        self._tables.append((table, stats))

    def dropped(self, topic: Topic, why: str, count: int) -> None:
        self._dropped_occurrences.add(self._topics.label(topic), why, by=count)

    def observe(self, record: Record, settlement: Settlement) -> None:
        self.settled(record.topic, settlement.kind)

    # --- reported by its owner

    def started(self, record: Record, now: Millis) -> None:
        """A delivery of `record` starts, or a consumer leases it, at `now` by the store's clock."""
        series = self._late.get(record.topic)
        if series is None:
            label = self._topics.label(record.topic)
            series = self._lateness.series(label)
            if label == record.topic:
                self._late[label] = series
        series.observe(max(0, now - record.planned_at) / 1000)

    def settled(self, topic: Topic, verdict: OutcomeKind) -> None:
        """The store has accepted an outcome."""
        self._outcomes.add(self._topics.label(topic), verdict.value)

    def webhook(self, result: WebhookResult) -> None:
        """A webhook delivery has ended."""
        topic, status = self._topics.label(result.topic), result.status
        family = "none" if status is None else f"{status // 100}xx" if 100 <= status <= 599 else OTHER
        self._webhooks.add(topic, family, result.outcome if result.outcome in _OUTCOMES else OTHER)
        if result.outcome != "defer":  # thousands that sent nothing would hide how slow a host is
            self._webhook_seconds.series(topic).observe(result.seconds)

    def request(self, call: str, status: int, seconds: float) -> None:
        """A request was answered; `call` is the route's name, not the path."""
        call = self._calls.label(call)
        self._requests.add(call, str(status) if 100 <= status <= 599 else OTHER)
        self._request_seconds.series(call).observe(seconds)

    # --- exposition

    async def exposition(self) -> tuple[bytes, str]:
        """The current metrics and their content type. If the store is unavailable, only its counts are missing."""
        found = {**await self._count(), **self._add_up()}
        for family in self.families:
            if family.name in found or family.kind == "gauge":
                family.values = dict(found.get(family.name, {}))
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    async def _count(self) -> dict[str, Mapping[Values, float]]:
        """The counts of tasks in the store, by metric; unknown ones are left out."""
        up = self._client.open_in is not None and await self._answered("reached", self._reaching)
        counted = up and await self._answered("counted", self._counting)
        found: dict[str, Mapping[Values, float]]
        found = {"bide_store_up": {(): up}, "bide_store_counted": {(): counted}}
        sample = self._sample
        if not up or sample is None:
            return found
        present: Counter[Topic] = Counter()
        for (topic, _), number in sample.tasks.items():
            present[topic] += number
        for topic in sorted(present, key=lambda topic: (-present[topic], topic)):  # the fullest first
            self._topics.label(topic)
        for gone in self._topics.free():
            self._late.pop(gone, None)
            for family in self.families:
                family.forget(gone)
        label = self._topics.given
        topics = sorted(present.keys() | self._topics.known.keys())
        tasks: dict[Values, float]
        tasks = {(topic, state.value): sample.tasks.get((topic, state), 0) for state in State for topic in topics}

        # else one paused topic would stand for all that share its label
        unseen = {topic for topic in sample.paused if label(topic) != topic}

        def of_topics(numbers: Mapping[Topic, float]) -> dict[Values, float]:
            return {(topic,): numbers.get(topic, 0) for topic in topics if topic not in unseen}

        found |= {
            "bide_counts_age_seconds": {(): self._counting.age},
            "bide_tasks": by_label(tasks, label),
            "bide_tasks_due": by_label(of_topics(sample.due), label),
            "bide_oldest_due_seconds": by_label(of_topics(sample.oldest), label, max),
            "bide_topic_paused": {(topic,): 1 for topic in sample.paused if topic not in unseen},
            "bide_counts_at_limit": {(): sample.at_limit},
            "bide_topics_in_other": {(): sum(label(topic) != topic for topic in present)},
            "bide_clock_skew_seconds": {} if sample.skew is None else {(): sample.skew},
        }
        return found

    async def _answered(self, what: str, look: CachedQuery[Any]) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                await look.get()
            return True
        except (StoreError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error
            _log.warning("the store could not be %s for the metrics: %s", what, why)
        except Exception:  # noqa: BLE001 - a defect is logged, and must not hide the other metrics
            _log.exception("a defect kept the store from being %s for the metrics", what)
        return False

    async def _ask(self) -> StoreSample:
        client, clock = self._client, self._client.store.features.clock
        now = client.clock.now()
        edges = (0, max(now - _LONG, 0), now + 1)
        tally = await client.tally([as_datetime(edge) for edge in edges])
        overdue = {topic: [count.number for count in counts] for topic, counts in tally.forecast.items()}
        due = {topic: sum(numbers) for topic, numbers in overdue.items() if sum(numbers)}
        worst = sorted(due, key=lambda topic: (-min(overdue[topic][0], 1), -due[topic]))[:_MOST_OLDEST]
        oldest = await oldest_due(client, worst, now)
        self._sample = StoreSample(
            {of: count.number for of, count in tally.counts.items()},
            due,
            {topic: (now - since) / 1000 for topic, since in oldest.items()},
            sum(not count.exact for count in chain(tally.counts.values(), *tally.forecast.values())),
            None if clock is None else await skew_of(clock, SystemClock()),
            (await client.paused()).keys(),
        )
        return self._sample

    def _add_up(self) -> dict[str, Mapping[Values, float]]:
        """The sums of the numbers that workers and recorders count, by metric."""
        wakes = self._wakes
        heard_at = [one.heard_at for one in wakes if one.heard_at is not None]
        rows: Counter[Values] = Counter()
        for table, stats in self._tables:
            rows.update({(table, "fired"): stats.fired, (table, "failed"): stats.failed, (table, "dead"): stats.dead})
        if self._client.open_in is not None:
            dropped = self._client.recorder.dropped
            if dropped < self._dropped:  # the app was opened again, with a new recorder
                self._dropped_before += self._dropped
            self._dropped = dropped
        return {
            "bide_build_info": {(__version__, platform.python_version()): 1},
            "bide_table_rows_total": rows,
            "bide_notifications_total": {(): sum(one.notifications for one in wakes)},
            "bide_notification_age_seconds": {(): time.monotonic() - max(heard_at)} if heard_at else {},
            "bide_wakeups_total": {
                ("notification",): sum(one.by_notification for one in wakes),
                ("alarm",): sum(one.by_alarm for one in wakes),
                ("cap",): sum(one.by_cap for one in wakes),
            },
            "bide_wakeups_missed_total": {(): sum(one.missed for one in wakes)},
            "bide_lease_polls_open": {(): self.polls()},
            "bide_event_streams_open": {(): self.streams()},
            "bide_events_dropped_total": {(): self._dropped_before + self._dropped},
        }


class _MeasuredSink:
    def __init__(self, sink: Sink, metrics: Metrics) -> None:
        self.sink = sink
        self._deliver = sink.deliver
        self._metrics = metrics
        self._client = metrics._client

    def deliver(self, task: Task[Any]) -> Coroutine[Any, Any, Outcome | None]:
        """Return the sink's own coroutine: measuring adds no frame to a delivery."""
        self._metrics.started(task.record, self._client.clock.now())
        return self._deliver(task)


def by_label(
    values: Mapping[Values, float], label: Callable[[str], str], merge: Callable[[float, float], float] = add
) -> dict[Values, float]:
    """`values`, whose first label is a topic, under the labels of their topics; equal labels are merged."""
    found: dict[Values, float] = {}
    for (topic, *rest), value in values.items():
        under = (label(topic), *rest)
        found[under] = merge(found[under], value) if under in found else value
    return found
