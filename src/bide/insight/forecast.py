"""A forecast of due tasks: the intervals of a range, the waiting tasks in each, and the peaks to the second.

**Ranges.** A range is split into steps of a viewer's calendar. Every edge lies on a multiple of the step in the
viewer's zone: quarters of an hour at :00 and :15, days at midnight, weeks on Monday. At a change of the clocks, steps
of up to an hour keep their length, and longer ones keep their wall clock time: a day of 23 or 25 hours is one interval.

**Counting.** Each topic has an index of its waiting tasks by time. Counting an interval costs O(log n) in a store that
can compute ranks (memory, Redis), and a walk along the index in one that cannot (the SQL stores, some ten million
entries a second). A walk stops at `upto` for each topic and interval. `upto` adapts to the cost of queries, so a query
over any number of tasks takes at most some tenths of a second, and the page shows which counts are "at least". Only the
last answers are kept. If there are more than `MOST_TOPICS` topics, the fullest are counted by interval, and the tasks
of the others are one number.

**Recurring tasks.** A store has one waiting task for all occurrences of a rule. The later ones are computed from the
rule, for the recurring tasks that a bounded search finds, and are counted with the waiting tasks.

**Outlook.** The outlook models the backlog as a tank with a drain: tasks flow in, at most `rate` a second flow out, and
the rest waits. Tasks of a one-second interval are assumed to come at its start, those of a longer interval evenly.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant, instant_text
from bide.core.records import Count, State, Topic, summed
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.recurring import Coming, coming_of, recurring_tasks

SECOND: Millis = 1_000
MINUTE: Millis = 60 * SECOND
HOUR: Millis = 60 * MINUTE
DAY: Millis = 24 * HOUR
STEPS: tuple[Millis, ...] = (
    *(number * SECOND for number in (1, 2, 5, 10, 30)),
    *(number * MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
    *(number * DAY for number in (1, 7, 30)),
)
MOST = 120
"""The most intervals of a range that a viewer chose."""
SHORTEST: Millis = 10 * SECOND
LONGEST: Millis = 3_500 * DAY
BACK: Millis = DAY
"""How far back a range may go: as far as the history is kept."""
_MINUTES: Millis = 5 * MINUTE
"""A range that goes back further has no finer steps than the kept history."""
_LAST: Millis = LAST_INSTANT - 400 * DAY  # room for zones and for the last step
MOST_TOPICS = 100
"""The most topics that are counted by interval. With the peaks, a query makes at most some ten thousand counts."""
UPTO = 100_000
LEAST_UPTO, MOST_UPTO = 1_000, 1_000_000
_TOO_LONG, _SHORT = 0.8, 0.3
"""Seconds of a query above which the next one counts half as far, and below which twice as far if needed."""
_EVERY = 2.0
_SHARE = 0.01
"""The share of one processor that queries of one range may take."""
_PEAKS = 3
_RANGES = 32
"""The number of ranges whose queries are kept."""
_PARTS = 60
"""The number of parts into which one step splits an interval."""


class Span(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


class Range(NamedTuple):
    """A range from `first` (inclusive) to `until` (exclusive) in steps of `step`; not aligned yet."""

    first: Millis
    until: Millis
    step: Millis

    @property
    def length(self) -> Millis:
        return self.until - self.first


_SPANS: dict[Span, tuple[Millis, Millis, Millis]] = {
    Span.MINUTE: (0, 2 * MINUTE, SECOND),
    Span.HOUR: (HOUR, HOUR, MINUTE),
    Span.DAY: (12 * HOUR, 48 * HOUR, 30 * MINUTE),  # includes tomorrow evening at any time of day
    Span.MONTH: (0, 30 * DAY, 6 * HOUR),
}
"""For each span: how far back, how far ahead, and the step."""


def around(span: Span, now: Millis) -> Range:
    back, ahead, step = _SPANS[span]
    return Range(now - back, now + ahead, step)


def chosen(first: Millis, until: Millis, now: Millis) -> Range:
    """A range chosen by a viewer: at most a day back, and at least ten seconds long. Raises BadInput."""
    if until <= first:
        raise BadInput("until", instant_text(max(0, until)), f"a time after {instant_text(max(0, first))}, the start")
    if until <= now - BACK:
        raise BadInput("until", instant_text(max(0, until)), "a time that is not longer ago than a day")
    if until > _LAST:
        raise BadInput("until", instant_text(min(until, LAST_INSTANT)), "a time before the year 9998")
    first = max(first, now - BACK)
    if until - first > LONGEST:
        raise BadInput("until", instant_text(until), f"a time within {LONGEST // DAY:,} days of the start")
    missing = SHORTEST - (until - first)
    if missing > 0:
        first, until = first - missing // 2, until + missing - missing // 2
    step = step_for(until - first)
    return Range(first, until, max(step, MINUTE) if first < now - _MINUTES else step)


def step_for(length: Millis) -> Millis:
    """The smallest step that splits a range of this length into at most `MOST` intervals, wherever it begins."""
    for step in STEPS:
        # alignment may add one interval at the end, and a day of 23 hours another
        if -(-length // step) + 2 <= MOST:
            return step
    raise BadInput("length", length, f"at most {LONGEST // DAY:,} days")


def edges_of(asked: Range, zone: tzinfo) -> list[Millis]:
    """The edges of the intervals. The first is not after the range's start, the last not before its end. O(edges)."""
    return _by_wall(asked, zone) if asked.step > HOUR else _by_clock(asked, zone)


def _by_clock(asked: Range, zone: tzinfo) -> list[Millis]:
    """The edges for steps of up to an hour: of equal length, unless the clocks change by less than a step."""
    step = asked.step
    edge = asked.first - _beyond(asked.first, zone, step)
    edge -= _beyond(edge, zone, step)  # the clocks may have changed in between
    edges = [edge]
    while edge < asked.until:
        edge += step
        beyond = _beyond(edge, zone, step)
        if beyond:
            edge += step - beyond
        edges.append(edge)
    return edges


def _beyond(at: Millis, zone: tzinfo, step: Millis) -> Millis:
    """How far the wall clock is beyond a multiple of the step."""
    offset = as_datetime(at).astimezone(zone).utcoffset() or timedelta()
    return (at + offset // timedelta(milliseconds=1)) % step


def _by_wall(asked: Range, zone: tzinfo) -> list[Millis]:
    """The edges for longer steps: by the wall clock, at the first time if it shows a time twice."""
    step = timedelta(milliseconds=asked.step)
    wall = as_datetime(asked.first).astimezone(zone).replace(minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
    if asked.step < DAY:
        wall = wall.replace(hour=wall.hour - wall.hour % (asked.step // HOUR))
    else:
        wall = wall.replace(hour=0) - timedelta(days=(wall.toordinal() - 1) % (asked.step // DAY))
    while (edge := _instant(wall, zone)) > asked.first:
        wall -= step
    edges = [edge]
    while edge < asked.until:
        wall += step
        edge = _instant(wall, zone)
        if edge > edges[-1]:  # two wall times that the clocks skipped are the same instant
            edges.append(edge)
    return edges


def _instant(wall: datetime, zone: tzinfo) -> Millis:
    return instant(wall.replace(tzinfo=zone))


class Bar(NamedTuple):
    """The waiting tasks with low <= wake_at < high, by topic; topics without any are left out."""

    low: Millis
    high: Millis
    counts: Mapping[Topic, Count]

    @property
    def total(self) -> Count:
        return summed(self.counts.values())

    @property
    def exact(self) -> bool:
        return self.total.exact


class Peak(NamedTuple):
    """The fullest second of one of the fullest intervals."""

    top: Bar
    low: Millis
    high: Millis
    """The interval of the peak, with the neighbours that belong to it."""


class Outlook(NamedTuple):
    """The delivery of a bar at a given rate."""

    late: Millis
    """The lateness of its last task."""
    clear_at: Millis | None
    """When the backlog is empty; None: not within the range."""


Counting = Callable[[Sequence[Millis]], Awaitable[list[Bar]]]
"""A function that counts the bars between given edges."""


class ForecastQuery(NamedTuple):
    """A request. Equal requests share one query."""

    range: Span | Range
    """The range; a span moves with the clock."""
    zone: tzinfo
    only: Topic | None = None
    """One topic; None: all."""
    whose: Hashable = None
    """A value for the viewer's access. It must differ for viewers who may see different topics."""


class ForecastAnswer(NamedTuple):
    edges: list[Millis]
    """The edges of the whole range, including the part that has passed."""
    bars: list[Bar]
    """The waiting tasks from `counted_at` (or the range's start, if that is later) to the range's end."""
    due: Count | None
    """The number of overdue tasks; None unless the range begins before `counted_at`."""
    peaks: list[Peak]
    """In order of time."""
    profile: list[Bar]
    """The bars again, in finer parts around the peaks."""
    topics: frozenset[Topic]
    """All topics with waiting tasks that the viewer may see."""
    beyond: Count | None
    """The waiting tasks, at any time, in topics beyond `MOST_TOPICS`; None: all are in `bars`."""
    counted_at: Millis
    upto: int
    exact: bool
    later: Count
    """The occurrences in `bars` that follow the next one of their recurring task."""
    all_rules: bool
    """False: there may be recurring tasks that were not found, whose later occurrences are not in `bars`."""

    @property
    def total(self) -> Count:
        return summed(bar.total for bar in self.bars)


class Forecast:
    """The forecasts of an open client's store. Belongs to its event loop."""

    def __init__(self, client: Client) -> None:
        self.upto = UPTO
        """The number at which the count of an interval stops, if counting walks an index."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._queries: OrderedDict[ForecastQuery, CachedQuery[ForecastAnswer]] = OrderedDict()
        self._topics = CachedQuery(client.tally, every=_EVERY, share=_SHARE)

    async def get(self, query: ForecastQuery, admits: Callable[[Topic], bool]) -> ForecastAnswer:
        """The forecast, at most two seconds old, or a hundred times the duration of the query. Raises StoreError.

        `admits` returns True for topics that the viewer may see. A query costs one count of all topics, O(intervals x
        topics) counts for at most `MOST_TOPICS` topics, and up to a dozen smaller ones for the peaks. It is cancelled
        when its last viewer stops waiting.
        """
        cached = self._queries.pop(query, None)
        if cached is None:
            cached = CachedQuery(partial(self._count, query, admits), every=_EVERY, share=_SHARE, lasting=False)
        self._queries[query] = cached
        while len(self._queries) > _RANGES:
            self._queries.popitem(last=False)  # a running one ends by itself
        return await cached.get()

    async def close(self) -> None:
        for query in self._queries.values():
            await query.close()
        await self._topics.close()

    async def _count(self, query: ForecastQuery, admits: Callable[[Topic], bool]) -> ForecastAnswer:
        now, upto, only = self._client.clock.now(), self.upto, query.only
        asked = query.range if isinstance(query.range, Range) else around(query.range, now)
        edges = edges_of(asked, query.zone)
        begun = edges[0] < now
        ahead = [0, now, *(edge for edge in edges if edge > now)] if begun else edges
        counts = (await self._topics.get()).counts
        known = {topic for topic, _ in counts if admits(topic)}
        waiting = {topic: counts[topic, State.WAITING] for topic in known if (topic, State.WAITING) in counts}
        named, beyond = None if only is None else [only], None
        if only is None and len(counts) > MOST_TOPICS:
            named = nlargest(MOST_TOPICS, waiting, key=lambda topic: (waiting[topic].number, topic))
            rest = waiting.keys() - set(named)
            beyond = summed(waiting[topic] for topic in rest) if rest else None

        async def count(at: Sequence[Millis], upto: int) -> list[Bar]:
            tally = await self._client.tally([as_datetime(edge) for edge in at], upto=upto, topics=named)
            mine = {topic: counts for topic, counts in tally.forecast.items() if admits(topic)}
            known.update(topic for topic, _ in tally.counts if admits(topic))
            return [
                Bar(low, high, {topic: counts[place] for topic, counts in mine.items() if counts[place].number})
                for place, (low, high) in enumerate(pairwise(at))
            ]

        async def finer(at: Sequence[Millis]) -> list[Bar]:
            # within one interval there are fewer entries to walk
            quick = self._loop.time() - start < _TOO_LONG
            return with_coming(await count(at, max(upto, UPTO) if quick else upto), coming)

        start = self._loop.time()
        bars = await count(ahead, upto)
        self.learn(self._loop.time() - start, all(bar.exact for bar in bars))
        due = bars.pop(0) if begun else None
        shown = {of: counts[of] for of in counts if of[0] in known and (named is None or of[0] in named)}
        rules, all_rules = await recurring_tasks(self._client, shown)
        coming = await coming_of(rules, ahead[0], ahead[-1] - 1, now)
        bars = with_coming(bars, coming)
        later = summed(coming.between(ahead[0], ahead[-1]).values())
        peaks, profile = await _with_peaks(bars, finer)
        exact = all(bar.exact for bar in bars) and (due is None or due.exact)
        overdue = None if due is None else due.total
        return ForecastAnswer(
            edges, bars, overdue, peaks, profile, frozenset(known), beyond, now, upto, exact, later, all_rules
        )

    def learn(self, took: float, exact: bool) -> None:
        """Count less far after a slow query, and further after a fast one that stopped early."""
        if took > _TOO_LONG:
            self.upto = max(LEAST_UPTO, self.upto // 2)
        elif took < _SHORT and not exact:
            self.upto = min(MOST_UPTO, self.upto * 2)


def with_coming(bars: Sequence[Bar], coming: Coming) -> list[Bar]:
    """The bars with the coming occurrences of recurring tasks."""
    found: list[Bar] = []
    for bar in bars:
        more = coming.between(bar.low, bar.high)
        both = {topic: summed([count, bar.counts.get(topic, Count(0))]) for topic, count in more.items()}
        found.append(bar._replace(counts={**bar.counts, **both}))
    return found


# --- peaks


async def _with_peaks(bars: list[Bar], count: Counting) -> tuple[list[Peak], list[Bar]]:
    """The peaks in order of time, and the bars in finer parts around them.

    A bar that was not fully counted is replaced by the sum of its parts.
    """
    peaks: list[Peak] = []
    profile = list(bars)
    for bar, low, high in highest(bars, _PEAKS):
        top, parts = await split(bar, count)
        peaks.append(Peak(top, low, high))
        place = profile.index(bar)
        profile[place : place + 1] = parts
        if not bar.exact:
            bars[bars.index(bar)] = together(parts)
    return sorted(peaks, key=lambda peak: peak.top.low), profile


def together(bars: Sequence[Bar]) -> Bar:
    topics = {topic for bar in bars for topic in bar.counts}
    counts = {topic: summed(bar.counts[topic] for bar in bars if topic in bar.counts) for topic in topics}
    return Bar(bars[0].low, bars[-1].high, counts)


def highest(bars: Sequence[Bar], most: int) -> list[tuple[Bar, Millis, Millis]]:
    """Up to `most` of the fullest bars, fullest first, each with the bounds of its peak.

    A neighbour of a chosen bar is never a separate peak. If it is more than half as full, it belongs to the same peak
    and widens its bounds.
    """
    order = sorted(range(len(bars)), key=lambda place: -bars[place].total.number)
    found: list[int] = []
    for place in order:
        if len(found) == most or not bars[place].total.number:
            break
        if not any(abs(place - one) <= 1 for one in found):
            found.append(place)
    return [(bars[place], *_bounds(bars, place)) for place in found]


def _bounds(bars: Sequence[Bar], place: int) -> tuple[Millis, Millis]:
    low, high = bars[place].low, bars[place].high
    half = bars[place].total.number / 2
    if place and bars[place - 1].total.number > half:
        low = bars[place - 1].low
    if place + 1 < len(bars) and bars[place + 1].total.number > half:
        high = bars[place + 1].high
    return low, high


async def split(bar: Bar, count: Counting) -> tuple[Bar, list[Bar]]:
    """The fullest second of a bar, and the bar in parts that get finer towards it.

    Each count splits into sixtieths: 15 minutes take two counts, 30 days take four.
    """
    parts, top = [bar], bar
    while top.high - top.low > SECOND:
        finer = await count(cuts(top.low, top.high))
        place = parts.index(top)
        parts[place : place + 1] = finer
        fullest = max(finer, key=lambda one: one.total.number)
        if not fullest.total.number:
            break  # the tasks have been settled or moved meanwhile
        top = fullest
    return top, parts


def cuts(low: Millis, high: Millis) -> list[Millis]:
    """The edges of at most some sixty parts of an interval, each of whole seconds except the first."""
    step = -(-(high - low) // (_PARTS * SECOND)) * SECOND
    start = low - low % SECOND
    return [low, *range(start + step, high, step), high]


def outlook(bars: Sequence[Bar], at: Millis, *, backlog: int, rate: float) -> Outlook | None:
    """The outlook of the bar that begins at `at`, with `backlog` tasks before the first bar; None: no such bar.

    `rate`: tasks a second. `bars` must be consecutive, without a gap. O(bars).
    """
    waits = float(backlog)
    late: Millis | None = None
    for bar in bars:
        due, seconds = bar.total.number, (bar.high - bar.low) / SECOND
        if bar.low == at:
            late = round((waits + due) / rate * SECOND)
        if seconds <= 1:
            waits, drain = waits + due, rate
        else:
            drain = rate - due / seconds
        if late is not None and drain > 0 and waits <= drain * seconds:
            return Outlook(late, bar.low + round(waits / drain * SECOND))
        waits = max(0.0, waits - drain * seconds)
    return None if late is None else Outlook(late, None)
