"""The timeline: how much comes due when, what its peaks need, and behind it the past as it happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.names import check_topic
from bide.core.records import Count, Topic, summed
from bide.insight.forecast import Bar, Forecast, Peak, Seen, Wanted, outlook
from bide.insight.intervals import BACK, LONGEST, MINUTE, SECOND, Range, Span, around, chosen
from bide.insight.minute_log import Fastest, PastInterval
from bide.service.authz import Verb
from bide.service.console.i18n import Phrases
from bide.service.console.page_request import Answer, Route, Shared, Visit
from bide.service.console.rendering import address
from bide.service.console.sanitize import inert_line
from bide.service.replies import Reply

_COLOURS = 7
"""Topics with a colour of their own."""
_ASSUMED = 1_000
_IN_TIME: Millis = 1_000
_NOTHING_BESIDE = 20
"""A peak that is lower than the highest by this factor is not told."""
_NAMES = {Span.MINUTE: "Minute", Span.HOUR: "Hour", Span.DAY: "Day", Span.MONTH: "Month"}

PastOf = Callable[[Sequence[Millis]], list[PastInterval]]


class Asked(NamedTuple):
    """What somebody wants to see."""

    range: Span | Range
    topic: Topic | None
    rate: int | None
    """Tasks a second, as they say."""

    def at(self, where: Span | Range, path: str = "/timeline") -> str:
        """The address of the same for another range."""
        if isinstance(where, Span):
            return address(path, span=where.value, topic=self.topic, rate=self.rate)
        return address(path, **{"from": where.first, "until": where.until}, topic=self.topic, rate=self.rate)

    def tasks(self, phrases: Phrases, low: Millis, high: Millis, topic: Topic | None = None) -> str:
        """Where the tasks are listed that wait between these instants."""
        return address(
            "/tasks", topic=topic or self.topic, state="waiting", wake_from=phrases.utc(low),
            wake_before=phrases.utc(high),
        )  # fmt: skip


class Rate(NamedTuple):
    """How much goes out in a second, and how that is known."""

    number: float
    source: str
    """given, seen or assumed."""
    at: Millis | None


def view(
    asked: Asked, seen: Seen, phrases: Phrases, *, topics: Sequence[Topic], fastest: Fastest | None, past_known: bool,
    past: PastOf,
) -> dict[str, Any]:  # fmt: skip
    """The values of the templates."""
    now = phrases.now
    shown = asked.range if isinstance(asked.range, Range) else around(asked.range, now)._replace(first=seen.edges[0])
    step = shown.step
    rate = _rate(asked, fastest)
    series, others = _series(seen)
    begun = seen.edges[0] < seen.counted_at
    by_minute = begun and step >= MINUTE
    gone = [edge for edge in seen.edges if edge < seen.counted_at]
    if len(gone) < len(seen.edges):
        gone.append(seen.counted_at)
    behind = list(zip(pairwise(gone), past(gone), strict=True)) if by_minute and len(gone) > 1 else []
    backlog = 0 if seen.due is None else seen.due.number
    peaks = _peaks([_peak(asked, seen, phrases, peak, backlog, rate) for peak in seen.peaks])
    return {
        "spans": [(_NAMES[span], span.value, asked.at(span), asked.range is span) for span in Span],
        "moves": _moves(asked, shown, now),
        "asked": asked,
        "live": None if isinstance(asked.range, Range) else asked.at(asked.range, "/timeline/live"),
        "here": asked.at(asked.range),
        "shown": shown._replace(until=seen.edges[-1]),
        "whole_range": seen.edges[-1] - seen.edges[0],
        "topics": topics,
        "seen": seen,
        "rate": rate,
        "peaks": peaks,
        "series": [(topic, place, summed(counts)) for place, (topic, counts) in enumerate(series)],
        "others": summed(others) if others else None,
        "rows": _rows(asked, seen, phrases, series, others, {peak["top"].low for peak in peaks}),
        "behind": [(low, high, one) for (low, high), one in behind if one.planned or one.done],
        "begun": begun,
        "by_minute": by_minute,
        "past_known": past_known,
        "day_back": begun and shown.first <= now - BACK + MINUTE,
        "empty": not seen.total.number and not any(one.planned or one.done for _, one in behind),
        "overdue": asked.tasks(phrases, 0, seen.counted_at),
        "chart": _chart(asked, seen, phrases, step, series, others, behind, [peak["top"].low for peak in peaks]),
    }


def _chart(
    asked: Asked,
    seen: Seen,
    phrases: Phrases,
    step: Millis,
    series: list[tuple[Topic, list[Count]]],
    others: list[Count],
    behind: list[tuple[tuple[Millis, Millis], PastInterval]],
    peaks: list[Millis],
) -> Mapping[str, Any]:
    """What the script draws."""
    drawn = [(inert_line(topic, 60), counts) for topic, counts in series]
    if others:
        drawn.append((phrases.say("others"), others))
    return {
        "zone": phrases.zone_name,
        "now": seen.counted_at,
        "first": seen.edges[0],
        "until": seen.edges[-1],
        "step": step,
        "lows": [bar.low for bar in seen.bars],
        "highs": [bar.high for bar in seen.bars],
        "labels": [phrases.clock(bar.low, step) for bar in seen.bars],
        "totals": [phrases.number(bar.total) for bar in seen.bars],
        "series": [{"name": name, "counts": [count.number for count in counts]} for name, counts in drawn],
        "others": bool(others),
        "peaks": peaks,
        "past": {
            "lows": [low for (low, _), _ in behind],
            "highs": [high for (_, high), _ in behind],
            "labels": [phrases.clock(low, step) for (low, _), _ in behind],
            "planned": [one.planned for _, one in behind],
            "done": [one.done for _, one in behind],
        },
        "words": {word: phrases.say(word) for word in ("{count} tasks", "planned", "done", "now")},
        "keep": address("", topic=asked.topic, rate=asked.rate).lstrip("?"),
        "topic": asked.topic or "",
    }


def _rate(asked: Asked, fastest: Fastest | None) -> Rate:
    if asked.rate is not None:
        return Rate(asked.rate, "given", None)
    if fastest is not None:
        return Rate(fastest.rate, "seen", fastest.at)
    return Rate(_ASSUMED, "assumed", None)


def _series(seen: Seen) -> tuple[list[tuple[Topic, list[Count]]], list[Count]]:
    """The counts of the largest topics, by name so that each keeps its colour, and those of all others together."""
    totals: dict[Topic, int] = {}
    for bar in seen.bars:
        for topic, count in bar.counts.items():
            totals[topic] = totals.get(topic, 0) + count.number
    order = sorted(totals, key=lambda topic: (-totals[topic], topic))
    named, rest = (order, []) if len(order) <= _COLOURS + 1 else (order[:_COLOURS], order[_COLOURS:])
    nothing = Count(0)
    series = [(topic, [bar.counts.get(topic, nothing) for bar in seen.bars]) for topic in sorted(named)]
    return series, [summed(bar.counts.get(topic, nothing) for topic in rest) for bar in seen.bars] if rest else []


def _peak(asked: Asked, seen: Seen, phrases: Phrases, peak: Peak, backlog: int, rate: Rate) -> Mapping[str, Any]:
    """A peak in words, and where to go from it."""
    top = peak.top
    reckoned = outlook(seen.profile, top.low, backlog=backlog, rate=rate.number)
    order = sorted(top.counts.items(), key=lambda one: (-one[1].number, one[0]))
    return {
        "top": top,
        "of": order[:_COLOURS],
        "more": summed(count for _, count in order[_COLOURS:]) if len(order) > _COLOURS else None,
        "outlook": reckoned,
        "in_time": reckoned is not None and reckoned.late <= _IN_TIME,
        "needs": top.total,
        "zoom": asked.at(_closer(peak, phrases.now)),
        "tasks": asked.tasks(phrases, *_second(top)),
    }


def _peaks(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The highest first; without those that are nothing beside it, unless somebody has to wait there too."""
    found = sorted(found, key=lambda peak: -peak["top"].total.number)
    return [
        peak
        for peak in found
        if not peak["in_time"] or peak["top"].total.number * _NOTHING_BESIDE >= found[0]["top"].total.number
    ]


def _second(top: Bar) -> tuple[Millis, Millis]:
    """From the start of the second: a bar that begins now begins within one."""
    return top.low - top.low % SECOND, top.high


def _closer(peak: Peak, now: Millis) -> Range:
    """A range around a peak: its interval, or the two minutes around its second where that is as fine already."""
    low, high = peak.low, peak.high
    if high - low <= 2 * MINUTE:
        low, high = peak.top.low - 30 * SECOND, peak.top.high + 90 * SECOND
    return Range(max(low, now - BACK), high, SECOND)


def _rows(
    asked: Asked,
    seen: Seen,
    phrases: Phrases,
    series: list[tuple[Topic, list[Count]]],
    others: list[Count],
    tops: set[Millis],
) -> dict[str, list[Mapping[str, Any]]]:
    """The intervals in which something comes due: the peaks first, then all in the order of time."""
    rows: list[Mapping[str, Any]] = []
    for place, bar in enumerate(seen.bars):
        if bar.total.number:
            row = {
                "low": bar.low,
                "total": bar.total,
                "counts": [counts[place] for _, counts in series] + ([others[place]] if others else []),
                "tasks": asked.tasks(phrases, bar.low, bar.high),
                "peak": any(bar.low <= top < bar.high for top in tops),
            }
            rows.append(row)
    first = sorted((row for row in rows if row["peak"]), key=lambda row: -row["total"].number)
    return {"peaks": first, "all": rows}


def _moves(asked: Asked, shown: Range, now: Millis) -> Mapping[str, str | None]:
    """Where to go from here: out, earlier, later; None where there is nowhere to go."""
    half, floor = shown.length // 2, now - BACK
    out = Range(max(floor, shown.first - shown.length), shown.until + shown.length, shown.step)
    if out.length > LONGEST:
        out = out._replace(until=out.first + LONGEST)
    earlier = Range(max(floor, shown.first - half), 0, shown.step)
    earlier = earlier._replace(until=earlier.first + shown.length)
    later = Range(shown.first + half, shown.until + half, shown.step)
    return {
        "out": asked.at(out) if out.length > shown.length else None,
        "earlier": asked.at(earlier) if earlier.first < shown.first - SECOND else None,
        "later": asked.at(later),
    }


_MOST_RATE = 10_000_000
_PATIENCE = 0.35
"""Seconds that the past is waited for: a first look at a day of many processes takes longer, and is shown later."""


class TimelinePage:
    def __init__(self, shared: Shared) -> None:
        self._forecast = Forecast(shared.app)
        self._day = shared.day

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {("GET", "/timeline"): self._page, ("GET", "/timeline/live"): self._live}

    async def close(self) -> None:
        """Let no query go on."""
        await self._forecast.close()

    async def _page(self, visit: Visit) -> Reply:
        """The whole page; its main part for a page that is open and goes to another range."""
        part = visit.request.header(b"hx-request") == "true"
        return visit.page("timeline_part.html" if part else "timeline.html", **await self._values(visit))

    async def _live(self, visit: Visit) -> Reply:
        """What changes by itself while the page is open."""
        return visit.page("timeline_live.html", **await self._values(visit))

    async def _values(self, visit: Visit) -> Mapping[str, Any]:
        if Verb.READ not in visit.caller.verbs:
            visit.check(Verb.READ, None)
        asked = _asked(visit)
        if asked.topic is not None:
            visit.check(Verb.READ, asked.topic)

        def may(topic: Topic) -> bool:
            return visit.may(Verb.READ, topic)

        def shown(topic: Topic) -> bool:
            return may(topic) and asked.topic in (None, topic)

        whose = visit.caller.topics
        wanted = Wanted(asked.range, visit.phrases.zone, asked.topic, whose)
        seen, known = await asyncio.gather(self._forecast.seen(wanted, may), self._past())
        fastest = self._day.fastest((whose, asked.topic), shown)
        topics = sorted(seen.topics | {topic for topic in self._day.topics() if topic and may(topic)})
        return view(
            asked, seen, visit.phrases, topics=topics, fastest=fastest, past_known=known,
            past=lambda edges: self._day.between(edges, shown),
        )  # fmt: skip

    async def _past(self) -> bool:
        """Whether all of it is known; what is missing is being read."""
        with suppress(TimeoutError):  # it is read on meanwhile
            async with asyncio.timeout(_PATIENCE):
                await self._day.look()
        return self._day.whole


def _asked(visit: Visit) -> Asked:
    """What the address says. Raises BadInput."""
    rate = visit.whole("rate", 0, least=1, most=_MOST_RATE) or None
    topic = visit.given("topic")
    return Asked(_range(visit), check_topic(topic) if topic else None, rate)


def _range(visit: Visit) -> Span | Range:
    first, until = visit.given("from"), visit.given("until")
    if first or until:
        now = visit.phrases.now
        return chosen(
            _time(visit, first, "from") if first else now, _time(visit, until, "until") if until else now, now
        )
    span = visit.given("span", Span.DAY.value)
    try:
        return Span(span)
    except ValueError:
        raise BadInput("span", span, f"one of {', '.join(Span)}") from None


def _time(visit: Visit, text: str, field: str) -> Millis:
    """Milliseconds since the epoch, as links have them; or as somebody writes a time."""
    if text.isascii() and text.isdigit() and 9 <= len(text) <= 15:
        return int(text)
    return visit.phrases.read_time(text, field)
