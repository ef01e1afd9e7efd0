"""How much comes due when, the peaks of that to the second, and what they would need.

A delay queue knows its future load, since what waits is one index by time. Counting an interval costs O(log n) where
the store can tell ranks (memory, Redis), and a walk along the index where it cannot (the SQL stores: some ten million
entries a second); there it stops at `upto` for each topic and interval, which follows what a query has cost: so a query
of any number of tasks stays within some tenths of a second, and the page says where a count is "at least". Nothing is
kept but the last answers.

Topics are another matter: each has an index of its own. Of more than `MOST_TOPICS` the fullest are counted by interval,
and what waits in the others is one number.

Whether workers keep up is reckoned as with water and a drain: so much flows in, at most `rate` a second flows out, and
the rest waits. What falls on one second is taken to come at its start, what falls on a longer interval to come evenly.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from datetime import tzinfo
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

from bide.core.instants import Millis, as_datetime
from bide.core.records import Count, State, Topic, summed
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.intervals import SECOND, Range, Span, around, edges_of

MOST_TOPICS = 100
"""Topics that are counted by interval: with the peaks, a query is some ten thousand counts at most."""
UPTO = 100_000
LEAST_UPTO, MOST_UPTO = 1_000, 1_000_000
_TOO_LONG, _SHORT = 0.8, 0.3
"""Seconds of a query after which the next counts half as far, and below which twice as far, if it has to."""
_EVERY = 2.0
_SHARE = 0.01
"""Of one processor that queries of one range may take."""
_PEAKS = 3
_RANGES = 32
"""Ranges that are remembered."""
_PARTS = 60
"""Into how many parts an interval is taken apart at once."""


class Bar(NamedTuple):
    """The tasks with low <= wake_at < high that wait, by topic; topics without any are left out."""

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
    """Of the interval that it was found in, with those neighbours that belong to it."""


class Outlook(NamedTuple):
    """How a bar goes out at some rate."""

    late: Millis
    """How late the last of it begins."""
    clear_at: Millis | None
    """When nothing waits any more; None: not within what is known."""


Counting = Callable[[Sequence[Millis]], Awaitable[list[Bar]]]
"""The bars between these edges."""


class Wanted(NamedTuple):
    """A request. Two that are equal share one query."""

    range: Span | Range
    """A span moves with the clock."""
    zone: tzinfo
    only: Topic | None = None
    """One topic; None: all."""
    whose: Hashable = None
    """For whom: viewers who may see different topics must differ here."""


class ForecastAnswer(NamedTuple):
    """The answer to a request."""

    edges: list[Millis]
    """Of the whole range, also of what of it had passed."""
    bars: list[Bar]
    """The waiting tasks from `counted_at` on (or the range's start, if that is later) to its end."""
    due: Count | None
    """How many were overdue; None where the range does not begin before `counted_at`."""
    peaks: list[Peak]
    """In the order of time."""
    profile: list[Bar]
    """The bars again, in finer parts around the peaks."""
    topics: frozenset[Topic]
    """All that there are, for whom this is."""
    beyond: Count | None
    """How many wait in topics beyond `MOST_TOPICS`, at whatever time; None: all are in `bars`."""
    counted_at: Millis
    upto: int
    exact: bool

    @property
    def total(self) -> Count:
        return summed(bar.total for bar in self.bars)


class Forecast:
    """Of an open client's store. Belongs to its event loop."""

    def __init__(self, client: Client) -> None:
        self.upto = UPTO
        """How far each interval is counted, where counting walks."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._queries: OrderedDict[Wanted, CachedQuery[ForecastAnswer]] = OrderedDict()
        self._topics = CachedQuery(client.tally, every=_EVERY, share=_SHARE)

    async def seen(self, wanted: Wanted, admits: Callable[[Topic], bool]) -> ForecastAnswer:
        """The forecast, not older than two seconds, or than a hundred times what the query took. Raises StoreError.

        `admits`: which topics they may see. A query costs one count of all topics, O(intervals x topics) counts, and up
        to a dozen smaller ones for the peaks, of `MOST_TOPICS` at most. It ends when nobody waits for it any more.
        """
        query = self._queries.pop(wanted, None)
        if query is None:
            query = CachedQuery(partial(self._count, wanted, admits), every=_EVERY, share=_SHARE, lasting=False)
        self._queries[wanted] = query
        while len(self._queries) > _RANGES:
            self._queries.popitem(last=False)  # one that is under way ends by itself
        return await query.get()

    async def close(self) -> None:
        """Let no query go on."""
        for query in self._queries.values():
            await query.close()
        await self._topics.close()

    async def _count(self, wanted: Wanted, admits: Callable[[Topic], bool]) -> ForecastAnswer:
        now, upto, only = self._client.clock.now(), self.upto, wanted.only
        asked = wanted.range if isinstance(wanted.range, Range) else around(wanted.range, now)
        edges = edges_of(asked, wanted.zone)
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
            # within one interval there is less to walk along
            quick = self._loop.time() - start < _TOO_LONG
            return await count(at, max(upto, UPTO) if quick else upto)

        start = self._loop.time()
        bars = await count(ahead, upto)
        self.learn(self._loop.time() - start, all(bar.exact for bar in bars))
        due = bars.pop(0) if begun else None
        peaks, profile = await _with_peaks(bars, finer)
        exact = all(bar.exact for bar in bars) and (due is None or due.exact)
        overdue = None if due is None else due.total
        return ForecastAnswer(edges, bars, overdue, peaks, profile, frozenset(known), beyond, now, upto, exact)

    def learn(self, took: float, exact: bool) -> None:
        """Count less far after a query that took long, and further after one that was short and fell short."""
        if took > _TOO_LONG:
            self.upto = max(LEAST_UPTO, self.upto // 2)
        elif took < _SHORT and not exact:
            self.upto = min(MOST_UPTO, self.upto * 2)


# --- peaks


async def _with_peaks(bars: list[Bar], count: Counting) -> tuple[list[Peak], list[Bar]]:
    """The peaks, in the order of time, and the bars in finer parts around them.

    A bar that was not counted to its end becomes what its parts are together.
    """
    peaks: list[Peak] = []
    profile = list(bars)
    for bar, low, high in highest(bars, _PEAKS):
        top, parts = await taken_apart(bar, count)
        peaks.append(Peak(top, low, high))
        place = profile.index(bar)
        profile[place : place + 1] = parts
        if not bar.exact:
            bars[bars.index(bar)] = together(parts)
    return sorted(peaks, key=lambda peak: peak.top.low), profile


def together(bars: Sequence[Bar]) -> Bar:
    """Bars that follow each other as one."""
    topics = {topic for bar in bars for topic in bar.counts}
    counts = {topic: summed(bar.counts[topic] for bar in bars if topic in bar.counts) for topic in topics}
    return Bar(bars[0].low, bars[-1].high, counts)


def highest(bars: Sequence[Bar], most: int) -> list[tuple[Bar, Millis, Millis]]:
    """Up to `most` of the fullest bars, the fullest first, with the bounds of each and of its neighbours.

    A bar beside one that was chosen is part of the same peak and only widens its bounds, if it is fuller than half of
    it; and it is no peak of its own in any case.
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


async def taken_apart(bar: Bar, count: Counting) -> tuple[Bar, list[Bar]]:
    """The fullest second of a bar, and the bar in parts that are the finer the nearer they are to it.

    Asks once for each sixtieth: 15 minutes are two questions, 30 days are four.
    """
    parts, top = [bar], bar
    while top.high - top.low > SECOND:
        finer = await count(cuts(top.low, top.high))
        place = parts.index(top)
        parts[place : place + 1] = finer
        fullest = max(finer, key=lambda one: one.total.number)
        if not fullest.total.number:
            break  # they have gone meanwhile
        top = fullest
    return top, parts


def cuts(low: Millis, high: Millis) -> list[Millis]:
    """The edges of at most some sixty parts of an interval, each of whole seconds but the first."""
    step = -(-(high - low) // (_PARTS * SECOND)) * SECOND
    start = low - low % SECOND
    return [low, *range(start + step, high, step), high]


def outlook(bars: Sequence[Bar], at: Millis, *, backlog: int, rate: float) -> Outlook | None:
    """How the bar that begins at `at` goes out, if so many wait before the first bar; None: there is no such bar.

    `rate`: tasks a second. `bars` follow each other without a gap. O(bars).
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
