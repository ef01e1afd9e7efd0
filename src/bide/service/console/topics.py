"""Topics: counts, lateness, workers and settings; charts of the retries and the last day; pause and resume.

Charts are SVG paths and sizes without styles. Lengths and heights are logarithmic where seconds meet hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log1p
from typing import Any, NamedTuple

from bide.core.instants import Millis
from bide.core.names import check_topic
from bide.core.records import State, summed
from bide.engine.history import DeliveryCounts
from bide.engine.registry import Announced, RouteSettings, settings_of_consumers
from bide.insight.minute_log import QUARTER, Quarter
from bide.insight.overview import TopicDetails, Topics, TopicSeen
from bide.service.access import Verb
from bide.service.console.pages import ConsoleContext, Page, PageRequest
from bide.service.console.rendering import address, topic_address
from bide.service.requests import Reply
from bide.service.verbs import set_paused

WIDTH, HEIGHT = 960, 100
_UNIT = 100
"""Milliseconds below which pauses look the same."""


class RetryBar(NamedTuple):
    failure: int
    """The number of the failure that it follows."""
    pause: Millis
    after: Millis
    """The sum of the pauses since the first failure."""
    width: int
    """In percent."""


class RetryChart(NamedTuple):
    """The announced pauses of a retry policy, and what follows them."""

    bars: Sequence[RetryBar]
    tries: int | None
    left: int
    """Pauses beyond the announced ones; 0 if the policy never ends."""


class DayChart(NamedTuple):
    """The last day as two charts of `WIDTH` by `HEIGHT`, and as a table."""

    box: str
    most: int
    """Most outcomes in a quarter of an hour."""
    done: str
    retried: str
    dead: str
    late_most: Millis
    half: str
    nearly_all: str
    marks: Sequence[Millis]
    """The instants on the axis: the beginning, each quarter of the day, the end."""
    bars: Sequence[tuple[int, Quarter]]
    """The quarters of an hour with deliveries, by their position."""
    total: DeliveryCounts


def retry_chart(route: RouteSettings) -> RetryChart:
    longest = max(route.pauses, default=0)
    bars: list[RetryBar] = []
    after = 0
    for place, pause in enumerate(route.pauses, 1):
        after += pause
        width = round(100 * log1p(pause / _UNIT) / log1p(longest / _UNIT)) if longest else 0
        bars.append(RetryBar(place, pause, after, max(1, width)))
    left = 0 if route.tries is None else max(0, route.tries - 1 - len(bars))
    return RetryChart(bars, route.tries, left)


def day_chart(day: Sequence[Quarter]) -> DayChart | None:
    """Draw the last day; None if nothing is known of it."""
    if not day:
        return None
    total = DeliveryCounts()
    for quarter in day:
        total.add(quarter.deliveries)
    ended = [(quarter.deliveries.done, quarter.deliveries.retried, quarter.deliveries.dead) for quarter in day]
    most = max(sum(numbers) for numbers in ended)
    heights = [
        [max(1, round(number / most * (HEIGHT - 2))) if number else 0 for number in numbers] for numbers in ended
    ]
    step = WIDTH // len(day)

    def bars(kind: int) -> str:
        return "".join(
            f"M{place * step} {HEIGHT - sum(stack[:kind])}v-{stack[kind]}h{step - 2}v{stack[kind]}z"
            for place, stack in enumerate(heights)
            if stack[kind]
        )

    half = [quarter.deliveries.lateness(0.5) for quarter in day]
    nearly_all = [quarter.deliveries.lateness(0.99) for quarter in day]
    late_most = max((late for late in nearly_all if late is not None), default=0)
    part = len(day) // 4
    marks = [quarter.since for quarter in day[::part]][:4] if part else []
    return DayChart(
        f"0 0 {WIDTH} {HEIGHT}", most, bars(0), bars(1), bars(2), late_most, _steps(half, step, late_most),
        _steps(nearly_all, step, late_most), [*marks, day[-1].since + QUARTER],
        [
            (place * step, quarter) for place, quarter in enumerate(day)
            if quarter.deliveries.begun or quarter.deliveries.ended
        ],
        total,
    )  # fmt: skip


def _steps(lates: Sequence[Millis | None], step: int, most: Millis) -> str:
    """A stepped line on a logarithmic scale, broken where nothing was delivered."""
    found: list[str] = []
    before: Millis | None = None
    for place, late in enumerate(lates):
        if late is not None:
            height = HEIGHT - 4 - round((HEIGHT - 8) * log1p(late) / (log1p(most) or 1.0))
            found.append(f"M{place * step} {height}h{step}" if before is None else f"V{height}h{step}")
        before = late
    return "".join(found)


_DONE = {(True, True): "paused", (True, False): "paused-before", (False, True): "resumed", (False, False): "not-paused"}
"""The word for the last action in the address: by whether it was a pause, and whether it changed anything."""
_MOST_SHOWN = 500

COLUMNS: Mapping[str, tuple[str, Callable[[TopicSeen], Any]]] = {
    "topic": ("Topic", lambda one: one.topic),
    "waiting": ("Pending", lambda one: one.counts[State.WAITING].number),
    "due": ("Due now", lambda one: one.due.count.number),
    "oldest": ("Oldest due", lambda one: -(one.oldest or 2**62)),
    "leased": ("Leased", lambda one: one.leased.number),
    "dead": ("Dead", lambda one: one.dead.number),
    "late": ("Lateness, p99", lambda one: -1 if one.late is None else one.late),
    "done": ("Done/min", lambda one: 0 if one.hour is None else one.hour.done),
    "failing": ("Failed/min", lambda one: one.failed),
    "workers": ("Workers", lambda one: len(one.workers or ())),
}
"""The columns by their name in the address: the heading, and the sort key."""


class TopicsPage(Page):
    def __init__(self, context: ConsoleContext) -> None:
        self._app = context.app
        self._policy_of = context.policy_of
        self._overviews = context.overviews
        self._topics = Topics(context.app, context.overviews, context.day)
        self.routes = {
            ("GET", "/topics"): self._list,
            ("GET", "/topics/{topic}"): self._one,
            ("POST", "/topics/{topic}/pause"): partial(self._set_paused, True),
            ("POST", "/topics/{topic}/resume"): partial(self._set_paused, False),
        }
        context.stack.push_async_callback(self._topics.close)

    async def _list(self, request: PageRequest) -> Reply:
        request.caller.check_somewhere(Verb.READ)
        seen = [one for one in await self._topics.all() if request.caller.may(Verb.READ, one.topic)]
        given = request.field("sort", "topic")
        by, falling = given.removeprefix("-"), given.startswith("-")
        if by not in COLUMNS:
            by, falling = "topic", False
        seen.sort(key=COLUMNS[by][1], reverse=falling)
        return request.render(
            _part(request, "topics"), topics=seen[:_MOST_SHOWN], more=len(seen) - _MOST_SHOWN, columns=COLUMNS, by=by,
            falling=falling, rate=rate, live=address("/topics", part="live", sort=given),
            may_pause=[request.caller.may(Verb.ADMIN, one.topic) for one in seen[:_MOST_SHOWN]], **_said(request),
        )  # fmt: skip

    async def _one(self, request: PageRequest) -> Reply:
        topic = check_topic(request.path_values[0])
        request.caller.check(Verb.READ, topic)
        story = await self._topics.one(topic)
        if _unknown(story):  # it may be newer than the last overview
            await self._overviews.changed()
            story = await self._topics.one(topic)
        routes, unknown = story.routes, _unknown(story)
        if not routes and not unknown:  # no worker has announced it: these are the settings for consumers
            routes = [Announced(settings_of_consumers(topic, self._policy_of(topic), self._app.config), 0)]
        charts = [(announced, retry_chart(announced.route)) for announced in routes]
        return request.render(
            _part(request, "topic"), status=404 if unknown else 200, topic=topic, seen=story.seen, story=story,
            routes=charts, day=day_chart(story.day), unknown=unknown,
            live=address(topic_address(topic), part="live"), rate=rate,
            may_pause=request.caller.may(Verb.ADMIN, topic), **_said(request),
        )  # fmt: skip

    async def _set_paused(self, paused: bool, request: PageRequest) -> Reply:
        """Pause or resume, and go back to the list, sorted as before, or to the topic's page."""
        topic = check_topic(request.path_values[0])
        request.caller.check(Verb.ADMIN, topic)
        done = _DONE[paused, await set_paused(self._app, topic, request.caller.name, paused=paused)]
        await self._overviews.changed()
        if request.field("from") == "list" or not request.caller.may(Verb.READ, topic):
            return request.redirect(address("/topics", sort=request.field("sort"), done=done, of=topic))
        return request.redirect(address(topic_address(topic), done=done))


def _part(request: PageRequest, name: str) -> str:
    """The template of the whole page, or of its live part."""
    return f"{name}_live.html" if request.field("part") == "live" else f"{name}.html"


def _said(request: PageRequest) -> dict[str, Any]:
    done = request.field("done")
    return {"done": done if done in _DONE.values() else "", "of": request.field("of")}


def rate(number: float) -> str:
    """A rate per minute in a few characters."""
    if 0 < number < 0.1:
        return "<0.1"
    return f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:,.0f}"


def _unknown(story: TopicDetails) -> bool:
    seen = story.seen
    past = any(quarter.deliveries.begun or quarter.deliveries.ended for quarter in story.day)
    tasks = summed(seen.counts.values()).number
    return not (past or story.routes or seen.workers or seen.pause is not None or tasks)
