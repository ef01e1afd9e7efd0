"""Topics: how much each has, how late it goes out, who works on it and how; and pause and resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bide.core.names import check_topic
from bide.core.records import Count, State, Topic
from bide.core.retry import policy
from bide.engine.told_routes import Told, told_of_policy
from bide.engine.topics import Topics, TopicSeen, TopicStory
from bide.engine.verdicts import TopicPolicy
from bide.service.callers import Verb
from bide.service.console.rendering import address, topic_address
from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route
from bide.service.console.topic_drawing import drawn_day, drawn_ladder
from bide.service.console.visit import Visit
from bide.service.pausing import pause_by, resume_by
from bide.service.replies import Reply

_DONE = ("paused", "paused-before", "resumed", "not-paused")
"""What a page may be told of what was just done."""
_MOST_SHOWN = 500
"""Topics in one list."""


def _of_state(state: State) -> Callable[[TopicSeen], float]:
    return lambda one: one.counts[state].number


COLUMNS: Mapping[str, tuple[str, Callable[[TopicSeen], Any]]] = {
    "topic": ("Topic", lambda one: one.topic),
    "waiting": ("Pending", _of_state(State.WAITING)),
    "due": ("Due now", lambda one: one.due.number),
    "oldest": ("Oldest due", lambda one: -(one.oldest or 2**62)),
    "leased": ("Leased", _of_state(State.LEASED)),
    "dead": ("Dead", _of_state(State.DEAD)),
    "late": ("Lateness, p99", lambda one: -1 if one.late is None else one.late),
    "done": ("Done/min", lambda one: 0 if one.hour is None else one.hour.done),
    "failing": ("Failed/min", lambda one: one.failed),
    "workers": ("Workers", lambda one: len(one.workers or ())),
}
"""By the name in the address: the head, and what it is sorted by."""


class TopicsPage:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._topics = Topics(shared.app)

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {
            ("GET", "/topics"): self._list,
            ("GET", "/topics/{topic}"): self._one,
            ("POST", "/topics/{topic}/pause"): self._pause,
            ("POST", "/topics/{topic}/resume"): self._resume,
        }

    async def close(self) -> None:
        """Let no look go on."""
        await self._topics.close()

    async def _list(self, visit: Visit) -> Reply:
        if Verb.READ not in visit.caller.verbs:
            visit.check(Verb.READ, None)
        seen = [one for one in await self._topics.all() if visit.may(Verb.READ, one.topic)]
        given = visit.given("sort", "topic")
        by, falling = given.removeprefix("-"), given.startswith("-")
        if by not in COLUMNS:
            by, falling = "topic", False
        seen.sort(key=COLUMNS[by][1], reverse=falling)
        return visit.page(
            _part(visit, "topics"), topics=seen[:_MOST_SHOWN], more=len(seen) - _MOST_SHOWN, columns=COLUMNS, by=by,
            falling=falling, rate=rate, live=address("/topics", part="live", sort=given),
            may_pause=[visit.may(Verb.ADMIN, one.topic) for one in seen[:_MOST_SHOWN]], **_said(visit),
        )  # fmt: skip

    async def _one(self, visit: Visit) -> Reply:
        topic = check_topic(visit.part[0])
        visit.check(Verb.READ, topic)
        story = await self._topics.one(topic)
        if _unknown(story):  # it may have come since the last look
            await self._topics.changed()
            story = await self._topics.one(topic)
        routes = story.routes or ([] if _unknown(story) else [self._by_policy(topic)])
        drawn = [(told, drawn_ladder(told.route)) for told in routes]
        return visit.page(
            _part(visit, "topic"), status=404 if _unknown(story) else 200, topic=topic, seen=story.seen, story=story,
            routes=drawn, told=bool(story.routes), day=drawn_day(story.day), unknown=_unknown(story),
            live=address(topic_address(topic), part="live"), rate=rate,
            may_pause=visit.may(Verb.ADMIN, topic), **_said(visit),
        )  # fmt: skip

    def _by_policy(self, topic: Topic) -> Told:
        """How this service tries again what its consumers get of a topic that nobody has told of."""
        settings = self._shared.app.settings
        its = self._shared.policies.get(topic) or TopicPolicy(policy(None), settings.losses)
        return Told(told_of_policy(topic, "consumer", "", its.retry, its.losses, self._shared.app.terms), 0)

    # --- pause and resume

    async def _pause(self, visit: Visit) -> Reply:
        topic = self._asked(visit)
        changed = await pause_by(self._shared.app, topic, visit.caller.name)
        return await self._back(visit, topic, "paused" if changed else "paused-before")

    async def _resume(self, visit: Visit) -> Reply:
        topic = self._asked(visit)
        changed = await resume_by(self._shared.app, topic, visit.caller.name)
        return await self._back(visit, topic, "resumed" if changed else "not-paused")

    def _asked(self, visit: Visit) -> Topic:
        topic = check_topic(visit.part[0])
        visit.check(Verb.ADMIN, topic)
        return topic

    async def _back(self, visit: Visit, topic: Topic, done: str) -> Reply:
        """To the list, sorted as it was, or to the topic's own page; what was done is said there."""
        await self._topics.changed()
        listed = visit.given("from") == "list" or not visit.may(Verb.READ, topic)
        if listed:
            return visit.goto(address("/topics", sort=visit.given("sort"), done=done, of=topic))
        return visit.goto(address(topic_address(topic), done=done))


def _part(visit: Visit, name: str) -> str:
    """The template: of the whole page, or of what is kept fresh in it."""
    return f"{name}_live.html" if visit.given("part") == "live" else f"{name}.html"


def _said(visit: Visit) -> dict[str, Any]:
    done = visit.given("done")
    return {"done": done if done in _DONE else "", "of": visit.given("of")}


def rate(number: float) -> str:
    """So many a minute, as short as tells it."""
    if 0 < number < 0.1:
        return "<0.1"
    return f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:,.0f}"


def _unknown(story: TopicStory) -> bool:
    """Whether there is nothing at all that would be of this topic."""
    seen = story.seen
    past = any(quarter.past.begun or quarter.past.ended for quarter in story.day)
    return not (past or story.routes or seen.workers or seen.pause is not None or any(map(_any, seen.counts.values())))


def _any(count: Count) -> bool:
    return count.number > 0
