"""Counters, gauges and histograms that cost little to count in, and how Prometheus is told of them.

The client library's own metrics take a lock and scan the buckets at every observation, some 2 µs; store calls are
counted here by the hundred thousand, all on one event loop. So counting is a list and a bisection (0.2 µs), and the
library does what it is good at, the exposition. Not for use from other threads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OTHER = "other"
Values: TypeAlias = tuple[str, ...]


class Family:
    """What has one name, and a series for each combination of its labels' values."""

    kind: ClassVar[str]

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.about = about
        self.labels = tuple(labels)

    def exposed(self) -> Metric:
        raise NotImplementedError

    def forget(self, topic: str) -> None:
        """Drop the series of this topic, where it has any."""
        if self.labels[:1] == ("topic",):
            for values in [values for values in self._all() if values[0] == topic]:
                del self._all()[values]

    def _all(self) -> dict[Values, Any]:
        raise NotImplementedError


class Numbers(Family):
    """One number for each series."""

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, about, labels)
        self.values: dict[Values, float] = {}

    def _all(self) -> dict[Values, Any]:
        return self.values


class Counter(Numbers):
    """Only rises, and begins at 0 in each process. The series are there from the first moment where they are known."""

    kind = "counter"

    def add(self, *values: str, by: float = 1) -> None:
        self.values[values] = self.values.get(values, 0) + by

    def exposed(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self.about, labels=self.labels)
        for values, number in self.values.items():
            family.add_metric(values, number)
        return family


class Gauge(Numbers):
    """As it is now; a series that is not known is not there."""

    kind = "gauge"

    def set(self, *values: str, to: float) -> None:
        self.values[values] = to

    def replace(self, values: Mapping[Values, float]) -> None:
        """These are all there are."""
        self.values = dict(values)

    def exposed(self) -> Metric:
        family = GaugeMetricFamily(self.name, self.about, labels=self.labels)
        for values, number in self.values.items():
            family.add_metric(values, number)
        return family


class Series:
    """One histogram: how often a value fell into each interval."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """O(log intervals)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram(Family):
    """How long something takes, in seconds; `bounds` rise."""

    kind = "histogram"

    def __init__(self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, about, labels)
        self.bounds = tuple(bounds)
        self._series: dict[Values, Series] = {}

    def _all(self) -> dict[Values, Any]:
        return self._series

    def series(self, *values: str) -> Series:
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self.bounds)
        return found

    def exposed(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        bounds = [*map(_number, self.bounds), "+Inf"]
        for values, series in self._series.items():
            family.add_metric(values, list(zip(bounds, accumulate(series.counts), strict=True)), series.total)
        return family


class Families(Collector):
    """All families of one exposition."""

    def __init__(self) -> None:
        self.all: list[Family] = []

    def counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        family = Counter(name, about, labels)
        self.all.append(family)
        return family

    def gauge(self, name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
        family = Gauge(name, about, labels)
        self.all.append(family)
        return family

    def histogram(self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float]) -> Histogram:
        family = Histogram(name, about, labels, bounds)
        self.all.append(family)
        return family

    def collect(self) -> Iterator[Metric]:
        for family in self.all:
            yield family.exposed()


class Few:
    """Keeps the values of one label few: so many are themselves, all others are "other".

    Those that are `reserved` always are; the first of the others, until they have been absent for `absent` seconds.
    """

    __slots__ = ("_absent", "_clock", "_most", "_reserved", "known")

    def __init__(self, most: int, *, absent: float = 3_600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._absent = absent
        self._clock = clock
        self._reserved: set[str] = set()
        self.known: dict[str, float] = {}
        """Each with the time at which it was there."""

    def reserve(self, value: str) -> None:
        self._reserved.add(value)
        self.known.setdefault(value, self._clock())

    def label(self, value: str) -> str:
        """Of a value that is there now."""
        if value in self.known or len(self.known) < self._most:
            self.known[value] = self._clock()
            return value
        return OTHER

    def given(self, value: str) -> str:
        """Of a value that need not be there."""
        return value if value in self.known else OTHER

    def free(self) -> list[str]:
        """Those that have been absent for long enough, which are known no more."""
        before = self._clock() - self._absent
        gone = [one for one, at in self.known.items() if at <= before and one not in self._reserved]
        for one in gone:
            del self.known[one]
        return gone


def _number(bound: float) -> str:
    """As Prometheus writes it: 1.0, 0.001."""
    return repr(float(bound))
