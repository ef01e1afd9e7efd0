"""The timeline: how much comes due when, what its peaks need, and behind it the past as it happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from bide.core.instants import Millis
from bide.core.names import check_topic
from bide.core.records import Count, Topic, summed
from bide.insight.forecast import (
    BACK,
    LONGEST,
    MINUTE,
    SECOND,
    Forecast,
    ForecastAnswer,
    ForecastQuery,
    Peak,
    Range,
    Span,
    around,
    chosen,
    outlook,
)
from bide.insight.minute_log import Fastest, PastInterval
from bide.service.authz import Verb
from bide.service.console.i18n import Phrases
from bide.service.console.page_request import Page, Shared, Visit
from bide.service.console.rendering import address, inert_line
from bide.service.requests import Reply

_COLOURS = 7
"""Topics with a colour of their own."""
_ASSUMED = 1_000
_IN_TIME: Millis = 1_000
_NOTHING_BESIDE = 20
"""A peak that is lower than the highest by this factor is not told."""
_NAMES = {Span.MINUTE: "Minute", Span.HOUR: "Hour", Span.DAY: "Day", Span.MONTH: "Month"}

PastOf = Callable[[Sequence[Millis]], list[PastInterval]]


class Asked(NamedTuple):
    """The range, topic and rate that a viewer asks for."""

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


class View:
    """The timeline of one viewer: the values of the templates."""

    def __init__(
        self, asked: Asked, seen: ForecastAnswer, phrases: Phrases, *, fastest: Fastest | None, past: PastOf
    ) -> None:
        self.asked = asked
        self.seen = seen
        self.phrases = phrases
        if isinstance(asked.range, Range):
            self.shown = asked.range
        else:
            self.shown = around(asked.range, phrases.now)._replace(first=seen.edges[0])
        self.rate = _rate(asked, fastest)
        self.series, self.others = _series(seen)
        self.begun = seen.edges[0] < seen.counted_at
        self.by_minute = self.begun and self.shown.step >= MINUTE
        gone = [edge for edge in seen.edges if edge < seen.counted_at]
        if len(gone) < len(seen.edges):
            gone.append(seen.counted_at)
        told = self.by_minute and len(gone) > 1
        self.behind = list(zip(pairwise(gone), past(gone), strict=True)) if told else []
        self.peaks = _worth_telling([self._peak(peak) for peak in seen.peaks])

    def values(self, *, topics: Sequence[Topic], past_known: bool) -> dict[str, Any]:
        asked, seen, shown = self.asked, self.seen, self.shown
        return {
            "spans": [(_NAMES[span], span.value, asked.at(span), asked.range is span) for span in Span],
            "moves": _moves(asked, shown, self.phrases.now),
            "asked": asked,
            "live": None if isinstance(asked.range, Range) else asked.at(asked.range, "/timeline/live"),
            "here": asked.at(asked.range),
            "shown": shown._replace(until=seen.edges[-1]),
            "whole_range": seen.edges[-1] - seen.edges[0],
            "topics": topics,
            "seen": seen,
            "rate": self.rate,
            "peaks": self.peaks,
            "series": [(topic, place, summed(counts)) for place, (topic, counts) in enumerate(self.series)],
            "others": summed(self.others) if self.others else None,
            "rows": self._rows(),
            "behind": [(low, high, one) for (low, high), one in self.behind if one.planned or one.done],
            "begun": self.begun,
            "by_minute": self.by_minute,
            "past_known": past_known,
            "day_back": self.begun and shown.first <= self.phrases.now - BACK + MINUTE,
            "empty": not seen.total.number and not any(one.planned or one.done for _, one in self.behind),
            "overdue": asked.tasks(self.phrases, 0, seen.counted_at),
            "chart": self._chart(),
        }

    def _chart(self) -> Mapping[str, Any]:
        """The data that the script draws."""
        seen, phrases, behind, step = self.seen, self.phrases, self.behind, self.shown.step
        drawn = [(inert_line(topic, 60), counts) for topic, counts in self.series]
        if self.others:
            drawn.append((phrases.say("others"), self.others))
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
            "others": bool(self.others),
            "peaks": [peak["top"].low for peak in self.peaks],
            "past": {
                "lows": [low for (low, _), _ in behind],
                "highs": [high for (_, high), _ in behind],
                "labels": [phrases.clock(low, step) for (low, _), _ in behind],
                "planned": [one.planned for _, one in behind],
                "done": [one.done for _, one in behind],
            },
            "words": {word: phrases.say(word) for word in ("{count} tasks", "planned", "done", "now")},
            "keep": address("", topic=self.asked.topic, rate=self.asked.rate).lstrip("?"),
            "topic": self.asked.topic or "",
        }

    def _peak(self, peak: Peak) -> Mapping[str, Any]:
        """A peak in words, and where to go from it."""
        top, backlog = peak.top, self.seen.due
        reckoned = outlook(
            self.seen.profile, top.low, backlog=0 if backlog is None else backlog.number, rate=self.rate.number
        )
        order = sorted(top.counts.items(), key=lambda one: (-one[1].number, one[0]))
        return {
            "top": top,
            "of": order[:_COLOURS],
            "more": summed(count for _, count in order[_COLOURS:]) if len(order) > _COLOURS else None,
            "outlook": reckoned,
            "in_time": reckoned is not None and reckoned.late <= _IN_TIME,
            "needs": top.total,
            "zoom": self.asked.at(_closer(peak, self.phrases.now)),
            # from the start of the second: a bar that begins now begins within one
            "tasks": self.asked.tasks(self.phrases, top.low - top.low % SECOND, top.high),
        }

    def _rows(self) -> dict[str, list[Mapping[str, Any]]]:
        """The intervals in which something comes due: the peaks first, then all in the order of time."""
        columns = [counts for _, counts in self.series] + ([self.others] if self.others else [])
        tops = {peak["top"].low for peak in self.peaks}
        rows: list[Mapping[str, Any]] = [
            {
                "low": bar.low,
                "total": bar.total,
                "counts": [counts[place] for counts in columns],
                "tasks": self.asked.tasks(self.phrases, bar.low, bar.high),
                "peak": any(bar.low <= top < bar.high for top in tops),
            }
            for place, bar in enumerate(self.seen.bars)
            if bar.total.number
        ]
        first = sorted((row for row in rows if row["peak"]), key=lambda row: -row["total"].number)
        return {"peaks": first, "all": rows}


def _rate(asked: Asked, fastest: Fastest | None) -> Rate:
    if asked.rate is not None:
        return Rate(asked.rate, "given", None)
    if fastest is not None:
        return Rate(fastest.rate, "seen", fastest.at)
    return Rate(_ASSUMED, "assumed", None)


def _series(seen: ForecastAnswer) -> tuple[list[tuple[Topic, list[Count]]], list[Count]]:
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


def _worth_telling(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The highest first; without those that are nothing compared with it, unless somebody has to wait there too."""
    found = sorted(found, key=lambda peak: -peak["top"].total.number)
    return [
        peak
        for peak in found
        if not peak["in_time"] or peak["top"].total.number * _NOTHING_BESIDE >= found[0]["top"].total.number
    ]


def _closer(peak: Peak, now: Millis) -> Range:
    """A range around a peak: its interval, or the two minutes around its second where that is as fine already."""
    low, high = peak.low, peak.high
    if high - low <= 2 * MINUTE:
        low, high = peak.top.low - 30 * SECOND, peak.top.high + 90 * SECOND
    return Range(max(low, now - BACK), high, SECOND)


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


class TimelinePage(Page):
    """The page, its main part for a page that is open and goes to another range, and what changes by itself."""

    def __init__(self, shared: Shared) -> None:
        self._forecast = Forecast(shared.app)
        self._day = shared.day
        routes = {("GET", "/timeline"): self._page, ("GET", "/timeline/live"): self._live}
        super().__init__(routes, self._forecast)

    async def _page(self, visit: Visit) -> Reply:
        return visit.page("timeline_part.html" if visit.by_script else "timeline.html", **await self._values(visit))

    async def _live(self, visit: Visit) -> Reply:
        return visit.page("timeline_live.html", **await self._values(visit))

    async def _values(self, visit: Visit) -> Mapping[str, Any]:
        visit.caller.check_somewhere(Verb.READ)
        asked = _asked(visit)
        if asked.topic is not None:
            visit.caller.check(Verb.READ, asked.topic)

        def may(topic: Topic) -> bool:
            return visit.caller.may(Verb.READ, topic)

        def shown(topic: Topic) -> bool:
            return may(topic) and asked.topic in (None, topic)

        whose = visit.caller.topics
        wanted = ForecastQuery(asked.range, visit.phrases.zone, asked.topic, whose)
        seen, known = await asyncio.gather(self._forecast.get(wanted, may), self._past())
        fastest = self._day.fastest((whose, asked.topic), shown)
        topics = sorted(seen.topics | {topic for topic in self._day.topics() if topic and may(topic)})
        view = View(asked, seen, visit.phrases, fastest=fastest, past=lambda edges: self._day.between(edges, shown))
        return view.values(topics=topics, past_known=known)

    async def _past(self) -> bool:
        """Tell whether all of it is known; what is missing goes on being read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._day.refresh()
        return self._day.whole


def _asked(visit: Visit) -> Asked:
    """Read the address. Raises BadInput."""
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
    return visit.choice("span", Span, Span.DAY)


def _time(visit: Visit, text: str, field: str) -> Millis:
    """Milliseconds since the epoch, as links have them; or as somebody writes a time."""
    if text.isascii() and text.isdigit() and 9 <= len(text) <= 15:
        return int(text)
    return visit.phrases.read_time(text, field)
