"""The timeline: how many tasks come due when, the rate that peaks need, and the past as it happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from bide.core.instants import Millis, instant_text
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
from bide.service.access import Verb
from bide.service.console.i18n import Locale, inert_line
from bide.service.console.pages import ConsoleContext, Page, PageRequest
from bide.service.console.rendering import address
from bide.service.requests import Reply

_COLOURS = 7
"""Topics with a separate colour."""
_ASSUMED = 1_000
_IN_TIME: Millis = 1_000
_NEGLIGIBLE = 20
"""A peak that is lower than the highest by this factor is left out."""
_NAMES = {Span.MINUTE: "Minute", Span.HOUR: "Hour", Span.DAY: "Day", Span.MONTH: "Month"}

PastOf = Callable[[Sequence[Millis]], list[PastInterval]]


class TimelineQuery(NamedTuple):
    """The range, topic and rate of a timeline, as its address gives them."""

    range: Span | Range
    topic: Topic | None
    rate: int | None
    """Tasks per second, as the viewer entered it."""

    def at(self, where: Span | Range, path: str = "/timeline") -> str:
        if isinstance(where, Span):
            return address(path, span=where.value, topic=self.topic, rate=self.rate)
        return address(path, **{"from": where.first, "until": where.until}, topic=self.topic, rate=self.rate)

    def tasks(self, low: Millis, high: Millis) -> str:
        """The address of the list of tasks that wait between these instants."""
        when = {"wake_from": instant_text(low), "wake_before": instant_text(high)}
        return address("/tasks", topic=self.topic, state="waiting", **when)


class Rate(NamedTuple):
    """Deliveries per second, and where the figure comes from."""

    number: float
    source: str
    """`given`, `seen` or `assumed`."""
    at: Millis | None


class TimelineView:
    """The timeline of one viewer. Its attributes are the values for the templates."""

    def __init__(
        self, query: TimelineQuery, seen: ForecastAnswer, locale: Locale, *, fastest: Fastest | None, past: PastOf,
        topics: Sequence[Topic], past_known: bool,
    ) -> None:  # fmt: skip
        now = locale.now
        self.asked = query
        self.seen = seen
        self._locale = locale
        self.topics = topics
        self.past_known = past_known
        shown = query.range
        if isinstance(shown, Span):
            shown = around(shown, now)._replace(first=seen.edges[0])
        self.shown = shown._replace(until=seen.edges[-1])
        self.whole_range = seen.edges[-1] - seen.edges[0]
        self.spans = [(_NAMES[span], span.value, query.at(span), query.range is span) for span in Span]
        self.moves = _moves(query, shown, now)
        self.here = query.at(query.range)
        self.live = None if isinstance(query.range, Range) else query.at(query.range, "/timeline/live")
        if query.rate is not None:
            self.rate = Rate(query.rate, "given", None)
        else:
            self.rate = Rate(_ASSUMED, "assumed", None) if fastest is None else Rate(fastest.rate, "seen", fastest.at)
        self._columns, self._others = _columns(seen)
        self.series = [(topic, place, summed(counts)) for place, (topic, counts) in enumerate(self._columns)]
        self.others = summed(self._others) if self._others else None
        self.begun = seen.edges[0] < seen.counted_at
        self.by_minute = self.begun and shown.step >= MINUTE
        self.day_back = self.begun and shown.first <= now - BACK + MINUTE
        gone = [edge for edge in seen.edges if edge < seen.counted_at]
        if len(gone) < len(seen.edges):
            gone.append(seen.counted_at)
        shows_past = self.by_minute and len(gone) > 1
        intervals = zip(pairwise(gone), past(gone), strict=True) if shows_past else ()
        self._past = [(low, high, one) for (low, high), one in intervals]
        self.behind = [one for one in self._past if one[2].planned or one[2].done]
        self.empty = not seen.total.number and not self.behind
        self.overdue = query.tasks(0, seen.counted_at)
        self.peaks = _notable([self._peak(peak) for peak in seen.peaks])
        self.rows = self._rows()
        self.chart = self._chart()

    def _chart(self) -> Mapping[str, Any]:
        seen, locale, past, step = self.seen, self._locale, self._past, self.shown.step
        drawn = [(inert_line(topic, 60), counts) for topic, counts in self._columns]
        if self._others:
            drawn.append((locale.t("others"), self._others))
        return {
            "zone": locale.zone_name,
            "now": seen.counted_at,
            "first": seen.edges[0],
            "until": seen.edges[-1],
            "step": step,
            "lows": [bar.low for bar in seen.bars],
            "highs": [bar.high for bar in seen.bars],
            "labels": [locale.clock(bar.low, step) for bar in seen.bars],
            "totals": [locale.number(bar.total) for bar in seen.bars],
            "series": [{"name": name, "counts": [count.number for count in counts]} for name, counts in drawn],
            "others": bool(self._others),
            "peaks": [peak["top"].low for peak in self.peaks],
            "past": {
                "lows": [low for low, _, _ in past],
                "highs": [high for _, high, _ in past],
                "labels": [locale.clock(low, step) for low, _, _ in past],
                "planned": [one.planned for _, _, one in past],
                "done": [one.done for _, _, one in past],
            },
            "words": {word: locale.t(word) for word in ("{count} tasks", "planned", "done", "now")},
            "keep": address("", topic=self.asked.topic, rate=self.asked.rate).lstrip("?"),
            "topic": self.asked.topic or "",
        }

    def _peak(self, peak: Peak) -> Mapping[str, Any]:
        """A peak, with its outlook and the links from it."""
        top, backlog = peak.top, self.seen.due
        expected = outlook(
            self.seen.profile, top.low, backlog=0 if backlog is None else backlog.number, rate=self.rate.number
        )
        order = sorted(top.counts.items(), key=lambda one: (-one[1].number, one[0]))
        return {
            "top": top,
            "of": order[:_COLOURS],
            "more": summed(count for _, count in order[_COLOURS:]) if len(order) > _COLOURS else None,
            "outlook": expected,
            "in_time": expected is not None and expected.late <= _IN_TIME,
            "zoom": self.asked.at(_closer(peak, self._locale.now)),
            # from the start of the second: a bar that begins now begins within one
            "tasks": self.asked.tasks(top.low - top.low % SECOND, top.high),
        }

    def _rows(self) -> dict[str, list[Mapping[str, Any]]]:
        """The intervals in which tasks come due: the peaks, and all in order of time."""
        columns = [counts for _, counts in self._columns] + ([self._others] if self._others else [])
        tops = {peak["top"].low for peak in self.peaks}
        rows: list[Mapping[str, Any]] = [
            {
                "low": bar.low,
                "total": bar.total,
                "counts": [counts[place] for counts in columns],
                "tasks": self.asked.tasks(bar.low, bar.high),
                "peak": any(bar.low <= top < bar.high for top in tops),
            }
            for place, bar in enumerate(self.seen.bars)
            if bar.total.number
        ]
        first = sorted((row for row in rows if row["peak"]), key=lambda row: -row["total"].number)
        return {"peaks": first, "all": rows}


def _columns(seen: ForecastAnswer) -> tuple[list[tuple[Topic, list[Count]]], list[Count]]:
    """The counts of the largest topics, by name so that each keeps its colour, and the sum of all others."""
    totals: dict[Topic, int] = {}
    for bar in seen.bars:
        for topic, count in bar.counts.items():
            totals[topic] = totals.get(topic, 0) + count.number
    order = sorted(totals, key=lambda topic: (-totals[topic], topic))
    named, rest = (order, []) if len(order) <= _COLOURS + 1 else (order[:_COLOURS], order[_COLOURS:])
    nothing = Count(0)
    series = [(topic, [bar.counts.get(topic, nothing) for bar in seen.bars]) for topic in sorted(named)]
    return series, [summed(bar.counts.get(topic, nothing) for topic in rest) for bar in seen.bars] if rest else []


def _notable(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The highest peaks first, without the negligible ones, unless tasks are late there too."""
    found = sorted(found, key=lambda peak: -peak["top"].total.number)
    return [
        peak
        for peak in found
        if not peak["in_time"] or peak["top"].total.number * _NEGLIGIBLE >= found[0]["top"].total.number
    ]


def _closer(peak: Peak, now: Millis) -> Range:
    """A range around a peak: its interval, or two minutes around its second if the interval is that short."""
    low, high = peak.low, peak.high
    if high - low <= 2 * MINUTE:
        low, high = peak.top.low - 30 * SECOND, peak.top.high + 90 * SECOND
    return Range(max(low, now - BACK), high, SECOND)


def _moves(query: TimelineQuery, shown: Range, now: Millis) -> Mapping[str, str | None]:
    """The links to zoom out and to go earlier or later; None where the range cannot move."""
    half, floor = shown.length // 2, now - BACK
    out = Range(max(floor, shown.first - shown.length), shown.until + shown.length, shown.step)
    if out.length > LONGEST:
        out = out._replace(until=out.first + LONGEST)
    earlier = Range(max(floor, shown.first - half), 0, shown.step)
    earlier = earlier._replace(until=earlier.first + shown.length)
    later = Range(shown.first + half, shown.until + half, shown.step)
    return {
        "out": query.at(out) if out.length > shown.length else None,
        "earlier": query.at(earlier) if earlier.first < shown.first - SECOND else None,
        "later": query.at(later),
    }


_MOST_RATE = 10_000_000
_PATIENCE = 0.35
"""Seconds to wait for the past: the first reading of a day of many processes takes longer, and is shown later."""


class TimelinePage(Page):
    """The page, its main part for an open page that goes to another range, and its live part."""

    def __init__(self, context: ConsoleContext) -> None:
        self._forecast = Forecast(context.app)
        self._day = context.day
        self.routes = {
            ("GET", "/timeline"): partial(self._shown, "timeline.html"),
            ("GET", "/timeline/live"): partial(self._shown, "timeline_live.html"),
        }
        context.stack.push_async_callback(self._forecast.close)

    async def _shown(self, template: str, request: PageRequest) -> Reply:
        if request.is_htmx and template == "timeline.html":
            template = "timeline_part.html"
        request.caller.check_somewhere(Verb.READ)
        query = _query_of(request)
        if query.topic is not None:
            request.caller.check(Verb.READ, query.topic)

        def may(topic: Topic) -> bool:
            return request.caller.may(Verb.READ, topic)

        def shown(topic: Topic) -> bool:
            return may(topic) and query.topic in (None, topic)

        whose = request.caller.topics
        wanted = ForecastQuery(query.range, request.locale.zone, query.topic, whose)
        seen, known = await asyncio.gather(self._forecast.get(wanted, may), self._past())
        fastest = self._day.fastest((whose, query.topic), shown)
        topics = sorted(seen.topics | {topic for topic in self._day.topics() if topic and may(topic)})
        past = partial(self._day.between, admits=shown)
        view = TimelineView(query, seen, request.locale, fastest=fastest, past=past, topics=topics, past_known=known)
        return request.render(template, **vars(view))

    async def _past(self) -> bool:
        """Tell whether all of the past is known; reading goes on in the background."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._day.refresh()
        return self._day.whole


def _query_of(request: PageRequest) -> TimelineQuery:
    """Read the address. Raises BadInput."""
    rate = request.number_field("rate", 0, least=1, most=_MOST_RATE) or None
    topic, now = request.raw_field("topic"), request.locale.now
    shown: Span | Range
    if request.field("from") or request.field("until"):
        shown = chosen(_time(request, "from"), _time(request, "until"), now)
    else:
        shown = request.choice_field("span", Span, Span.DAY)
    return TimelineQuery(shown, check_topic(topic) if topic else None, rate)


def _time(request: PageRequest, field: str) -> Millis:
    """An instant: milliseconds since the epoch, as in links, or a time that the viewer typed; now, if it is empty."""
    text = request.field(field)
    if text.isascii() and text.isdigit() and 9 <= len(text) <= 15:
        return int(text)
    return request.locale.read_time(text, field) if text else request.locale.now
