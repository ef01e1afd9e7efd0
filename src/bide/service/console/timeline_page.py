"""The timeline: how much comes due when, what its peaks need, and behind it the past as it happened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.names import check_topic
from bide.core.records import Topic
from bide.engine.forecast import Forecast, Wanted
from bide.engine.intervals import Range, Span, chosen
from bide.engine.passed import Passed
from bide.service.callers import Verb
from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route
from bide.service.console.timeline_view import Asked, view
from bide.service.console.visit import Visit
from bide.service.replies import Reply

_MOST_RATE = 10_000_000
_PATIENCE = 0.35
"""Seconds that the past is waited for: a first look at a day of many processes takes longer, and is shown later."""


class TimelinePage:
    def __init__(self, shared: Shared) -> None:
        self._forecast = Forecast(shared.app)
        self._passed = Passed(shared.app)
        self._reading: asyncio.Task[None] | None = None

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {("GET", "/timeline"): self._page, ("GET", "/timeline/live"): self._live}

    async def close(self) -> None:
        """Let the looks under way end."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._forecast.close()
        await self._passed.close()

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
        fastest = self._passed.fastest((whose, asked.topic), shown)
        topics = sorted(seen.topics | {topic for topic in self._passed.topics() if topic and may(topic)})
        return view(
            asked, seen, visit.phrases, topics=topics, fastest=fastest, past_known=known,
            past=lambda edges: self._passed.between(edges, shown),
        )  # fmt: skip

    async def _past(self) -> bool:
        """Whether all of it is known; what is missing is being read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._passed.look(), name="bide timeline: the past")
        reading = self._reading
        await asyncio.wait([reading], timeout=_PATIENCE)
        if reading.done():
            reading.result()
        return self._passed.whole


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
