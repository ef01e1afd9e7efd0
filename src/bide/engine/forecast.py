"""How much comes due when: counted from the index by time, by topic and interval, and not kept anywhere.

A delay queue knows its future load, since what waits is one index by time. Counting an interval costs O(log n) where
the store can tell ranks (memory, Redis), and a walk along the index where it cannot (the SQL stores: some ten million
entries a second); there it stops at `upto` for each topic and interval, which follows what a look has cost: so a look
at any number of tasks stays within some tenths of a second, and the page says where a count is "at least".

Topics are another matter: each has an index of its own. Of more than `MOST_TOPICS` the fullest are counted by interval,
and what waits in the others is one number.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from datetime import tzinfo
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

from bide.core.instants import Millis, as_datetime
from bide.core.records import Count, State, Topic
from bide.engine.client import Client
from bide.engine.intervals import Range, Span, around, edges_of
from bide.engine.looks import Look
from bide.engine.peaks import Bar, Counting, Peak, highest, summed, taken_apart, together

MOST_TOPICS = 100
"""Topics that are counted by interval: with the peaks, a look is some ten thousand counts at most."""
UPTO = 100_000
LEAST_UPTO, MOST_UPTO = 1_000, 1_000_000
_TOO_LONG, _SHORT = 0.8, 0.3
"""Seconds of a look after which the next counts half as far, and below which twice as far, if it has to."""
_EVERY = 2.0
_SHARE = 0.01
"""Of one processor that looks at one range may take."""
_PEAKS = 3
_LOOKS = 32
"""Ranges that are remembered."""


class Wanted(NamedTuple):
    """What to look at. Two that are equal share one look."""

    range: Span | Range
    """A span moves with the clock."""
    zone: tzinfo
    only: Topic | None = None
    """One topic; None: all."""
    whose: Hashable = None
    """For whom: looks of those who may see different topics must differ here."""


class Seen(NamedTuple):
    """A look at the future."""

    edges: list[Millis]
    """Of the whole range, also of what of it had passed."""
    bars: list[Bar]
    """What waits from `counted_at` on (or the range's start, if that is later) to its end."""
    due: Count | None
    """What was overdue; None where the range does not begin before `counted_at`."""
    due_by_topic: dict[Topic, Count]
    peaks: list[Peak]
    """In the order of time."""
    profile: list[Bar]
    """The bars again, in finer parts around the peaks."""
    topics: frozenset[Topic]
    """All that there are, for whom this is."""
    beyond: Count | None
    """What waits in topics beyond `MOST_TOPICS`, at whatever time; None: all are in `bars`."""
    counted_at: Millis
    upto: int
    exact: bool

    @property
    def total(self) -> Count:
        return summed(bar.total for bar in self.bars)


class Forecast:
    """Looks at an open client's store. Belongs to its event loop."""

    def __init__(self, client: Client) -> None:
        self.upto = UPTO
        """How far each interval is counted, where counting walks."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._looks: OrderedDict[Wanted, Look[Seen]] = OrderedDict()
        self._topics = Look(client.tally, every=_EVERY, share=_SHARE)

    async def seen(self, wanted: Wanted, admits: Callable[[Topic], bool]) -> Seen:
        """The forecast, not older than two seconds, or than a hundred times what the look took. Raises StoreError.

        `admits`: which topics they may see. A look costs one count of all topics, O(intervals x topics) counts, and up
        to a dozen smaller ones for the peaks, of `MOST_TOPICS` at most. It ends when nobody waits for it any more.
        """
        look = self._looks.pop(wanted, None)
        if look is None:
            look = Look(partial(self._look, wanted, admits), every=_EVERY, share=_SHARE, lasting=False)
        self._looks[wanted] = look
        while len(self._looks) > _LOOKS:
            self._looks.popitem(last=False)  # one that is under way ends by itself
        return await look.get()

    async def close(self) -> None:
        """Let looks that are under way end."""
        for look in self._looks.values():
            await look.close()
        await self._topics.close()

    async def _look(self, wanted: Wanted, admits: Callable[[Topic], bool]) -> Seen:
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
        self.learn(self._loop.time() - start, all(map(_exact, bars)))
        due = bars.pop(0) if begun else None
        peaks, profile = await _with_peaks(bars, finer)
        exact = all(map(_exact, bars)) and (due is None or _exact(due))
        return Seen(
            edges, bars, None if due is None else due.total, {} if due is None else dict(due.counts), peaks, profile,
            frozenset(known), beyond, now, upto, exact,
        )  # fmt: skip

    def learn(self, took: float, exact: bool) -> None:
        """Count less far after a look that took long, and further after one that was short and fell short."""
        if took > _TOO_LONG:
            self.upto = max(LEAST_UPTO, self.upto // 2)
        elif took < _SHORT and not exact:
            self.upto = min(MOST_UPTO, self.upto * 2)


def _exact(bar: Bar) -> bool:
    return bar.total.exact


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
        if not _exact(bar):
            bars[bars.index(bar)] = together(parts)
    return sorted(peaks, key=lambda peak: peak.top.low), profile
