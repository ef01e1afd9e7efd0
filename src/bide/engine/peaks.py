"""What a forecast is made of, how a peak of it is taken apart to the second, and what it would need.

Whether workers keep up is reckoned as with water and a drain: so much flows in, at most `rate` a second flows out, and
the rest waits. What falls on one second is taken to come at its start, what falls on a longer interval to come evenly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bide.core.instants import Millis
from bide.core.records import Count, Topic
from bide.engine.intervals import SECOND

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


def summed(counts: Iterable[Count]) -> Count:
    """All of them together: exact where each is."""
    number, exact = 0, True
    for count in counts:
        number += count.number
        exact = exact and count.exact
    return Count(number, exact)


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
