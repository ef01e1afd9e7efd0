"""Counters, gauges and histograms that are cheap to count in, and the measurements of a store.

The client library's own metrics take a lock and scan the buckets at every observation, some 2 µs; here store calls are
counted by the hundred thousand, all on one event loop. So counting is a list and a bisection (0.2 µs), and the library
only writes the exposition. Not for use from other threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bide.core import errors
from bide.core.errors import StoreError
from bide.core.instants import Millis, as_datetime
from bide.core.records import State, Tally, Topic
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.overview import oldest_due
from bide.ports import Store, StoreFacade, SystemClock
from bide.service.health import reach, skew_of

OTHER = "other"
_ABSENT = 3_600.0
"""Seconds of absence after which a label loses its place."""
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
        """Drop the series of this topic, where it has any."""
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
    """One histogram: how many values fell into each interval."""

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
    """How long something takes, in seconds; `bounds` rise."""

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
        bounds = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]  # as Prometheus writes it: 1.0, 0.001
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


R = TypeVar("R")
_log = logging.getLogger("bide.metrics")

OPERATIONS = ("add", "change", "get", "find", "tally", "lease", "extend", "settle", "purge")
ERRORS = ("StoreUnavailable", "StoreFull", "StoreCorrupt", "StoreMismatch", "OutcomeUnknown", "PartlyFailed")
DEFECT = "defect"
"""Whatever else is raised: no store should."""


class TimedStore(StoreFacade):
    """A store each of whose operations is observed: its name, how many seconds it took, and its error.

    A call that is cancelled is not counted.
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


_LONG: Millis = 60_000
_SHARE = 0.1
"""Share of the time that counting may take: after a count of half a second, the next begins five seconds later."""
_MOST_OLDEST = 50
"""Topics whose oldest due task is looked up: those with tasks overdue by a minute first, then the fullest."""


class StoreSample(Struct, frozen=True):
    """The counts of one sample of the store. States in which a topic has no tasks are left out."""

    tasks: Mapping[tuple[Topic, State], int]
    due: Mapping[Topic, int]
    oldest: Mapping[Topic, float]
    """Seconds for which the oldest due task of each topic has been due; no entry if none is due."""
    at_limit: int
    """How many counts stopped at the store's limit, and so are lower bounds."""
    skew: float | None
    """Seconds by which this machine's clock is ahead of the store's; None: the store has none of its own."""
    paused: Collection[Topic]


class StoreSampler:
    """Counts the store at most once in `every` seconds, however many callers ask; each waits at most `patience`.

    Cost: a get of a task that does not exist, a tally with two intervals (O(topics) on most stores, never O(tasks)), a
    page of one task for each topic with due tasks, and the store's time. A slow tally serves the next call.
    """

    def __init__(self, client: Client, *, every: float, patience: float) -> None:
        self._client = client
        self._every = every
        self._patience = patience
        self.latest: StoreSample | None = None
        """The last sample that was complete."""

    @cached_property
    def _reaching(self) -> CachedQuery[object]:
        """Made on first use, in the loop of the caller, as `_counting` is."""
        return CachedQuery(
            lambda: reach(self._client.store, self._patience), every=self._every, share=1.0, lasting=False
        )

    @cached_property
    def _counting(self) -> CachedQuery[StoreSample]:
        return CachedQuery(self._ask, every=self._every, share=_SHARE)

    @property
    def age(self) -> float:
        """Seconds since the latest sample was begun."""
        return self._counting.age

    async def sample(self) -> tuple[bool, bool]:
        """Tell whether the store answered, and whether it was counted in time; if not, `latest` is older."""
        if not await self._answered("reached", self._reaching):
            return False, False
        return True, await self._answered("counted", self._counting)

    async def _answered(self, what: str, look: CachedQuery[Any]) -> bool:
        """Run the query, and tell whether it answered in time."""
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
        client = self._client
        now = client.clock.now()
        edges = (0, max(now - _LONG, 0), now + 1)
        tally = await client.tally([as_datetime(edge) for edge in edges])
        overdue = {topic: [count.number for count in counts] for topic, counts in tally.forecast.items()}
        due = {topic: sum(numbers) for topic, numbers in overdue.items() if sum(numbers)}
        worst = sorted(due, key=lambda topic: (-min(overdue[topic][0], 1), -due[topic]))[:_MOST_OLDEST]
        oldest = await oldest_due(client, worst, now)
        self.latest = StoreSample(
            {of: count.number for of, count in tally.counts.items()},
            due,
            {topic: (now - since) / 1000 for topic, since in oldest.items()},
            _at_limit(tally),
            await self._skew(),
            (await client.paused()).keys(),
        )
        return self.latest

    async def _skew(self) -> float | None:
        clock = self._client.store.features.clock
        return None if clock is None else await skew_of(clock, SystemClock())


def by_label(
    values: Mapping[Values, float], label: Callable[[str], str], merge: Callable[[float, float], float] = add
) -> dict[Values, float]:
    """`values`, whose first label is a topic, under the labels of their topics; equal labels are merged."""
    found: dict[Values, float] = {}
    for (topic, *rest), value in values.items():
        under = (label(topic), *rest)
        found[under] = merge(found[under], value) if under in found else value
    return found


def _at_limit(tally: Tally) -> int:
    counts = [*tally.counts.values(), *(count for counts in tally.forecast.values() for count in counts)]
    return sum(not count.exact for count in counts)
