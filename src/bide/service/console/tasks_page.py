"""Tasks: search by topic, key, group, state and time, page by page, and what may be done with those that were found.

The address is the whole state of the page, so that it can be shared. Nothing is counted by looking through tasks: where
an index counts what matches, the number is shown, and else only that there are more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, as_datetime
from bide.core.records import Count, State, Tally, Topic
from bide.engine.looks import Look
from bide.engine.pauses import Pause, Pauses
from bide.service.callers import Verb
from bide.service.console.inert import inert_line, isolated
from bide.service.console.rendering import address
from bide.service.console.searching import Result, Search, countable, search, search_of, waits
from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route
from bide.service.console.task_page import TaskPage, possible
from bide.service.console.visit import Visit
from bide.service.replies import Reply

FIELDS = ("topic", "key", "group", "state", "wake_from", "wake_before", "limit")
_MOST_COUNTED = 100
"""Topics up to which what waits within a time is counted."""
_MOST_NAMED = 200
_VERBS: Mapping[str, tuple[str, ...]] = {
    "": ("move", "shift", "fire", "cancel", "redrive"),
    "due": ("move", "shift", "cancel"),
    State.WAITING: ("move", "shift", "fire", "cancel"),
    State.LEASED: ("cancel",),
    State.DONE: (),
    State.CANCELLED: (),
    State.DEAD: ("redrive",),
}
"""What makes sense for tasks of this state."""


class TasksPage:
    """The list, and with it the page of one task."""

    def __init__(self, shared: Shared) -> None:
        self._app = shared.app
        self._tally: Look[Tally] = Look(self._app.tally, every=5.0)
        self._paused: Look[Mapping[str, Pause]] = Look(self._look_for_pauses, every=2.0, share=0.1)
        self._task = TaskPage(shared, self._paused)

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {("GET", "/tasks"): self._page, **self._task.routes()}

    async def close(self) -> None:
        """Nothing runs in the background but looks that somebody waits for."""
        await self._tally.close()
        await self._paused.close()

    async def _look_for_pauses(self) -> Mapping[str, Pause]:
        pauses = Pauses(self._app.store, self._app.clock)
        await pauses.look()
        return pauses.topics

    async def _page(self, visit: Visit) -> Reply:
        if Verb.READ not in visit.caller.verbs:
            visit.check(Verb.READ, None)
        tally, paused = await asyncio.gather(self._tally.get(), self._paused.get())
        topics = _readable(visit, tally)
        given = {name: visit.exact(name) for name in FIELDS}
        try:
            asked = search_of(visit)
            found = await search(visit, asked, topics)
            if asked.key and asked.where.topic is None and not found.tasks and self._tally.age > 1.0:
                tally = await self._tally.fresh()  # its topic may be new
                topics = _readable(visit, tally)
                found = await search(visit, asked, topics)
        except BadInput as error:
            return visit.page(
                "tasks.html", status=422, given=given, topics=topics[:_MOST_NAMED], asked=None, rows=(), paused=paused,
                wrong=_wrong(visit, error),
            )  # fmt: skip
        held = {name: text for name, text in given.items() if text}
        shown = sorted({record.topic for record in found.tasks})
        return visit.page(
            "tasks.html",
            given={**given, **_times(visit, asked)},
            topics=topics[:_MOST_NAMED],
            asked=asked,
            wrong="",
            found=found,
            rows=found.tasks,
            count=await self._count(asked, found, tally, topics),
            paused=paused,
            first=address("/tasks", **held) if asked.cursor else "",
            following=address("/tasks", **held, cursor=found.cursor) if found.cursor else "",
            all_address=address("/tasks", **held, cursor=asked.cursor, chosen="all"),
            all_chosen=visit.given("chosen") == "all",
            verbs=possible(visit, _VERBS[given["state"].strip()], shown),
            matching=_fields_of(visit, asked),
            keep=self._app.terms.retention_of(asked.where.topic or ""),
            alike=_alike(given["topic"], topics),
            widen=[(name, address("/tasks", **{**held, name: ""})) for name in FIELDS[:-1] if name in held],
        )

    async def _count(self, asked: Search, found: Result, tally: Tally, topics: Sequence[Topic]) -> Count | None:
        """How many match: exact where this page is all of them or an index counts them; None: that is not known."""
        if not asked.cursor and not found.cursor:
            return Count(len(found.tasks))
        if not countable(asked):
            return None
        where = asked.where
        wanted = [where.topic] if where.topic is not None else topics
        if where.wake_from is None and where.wake_before is None:
            states = State if where.state is None else (where.state,)
            return _sum([tally.counts.get((topic, state)) for topic in wanted for state in states])
        if not waits(asked) or len({topic for topic, _ in tally.counts}) > _MOST_COUNTED:
            return None
        last = LAST_INSTANT if where.wake_before is None else where.wake_before
        edges = (where.wake_from or 0, max(last, where.wake_from or 0))
        forecast = (await self._app.tally([as_datetime(edge) for edge in edges])).forecast
        return _sum([count for topic in wanted for count in forecast.get(topic, ())])


_NAMES = {"topic": "Topic", "key": "Key", "group": "Group", "state": "State", "wake_from": "Due from",
          "wake_before": "and before", "limit": "A page has"}  # fmt: skip
"""What the form calls its fields."""


def _wrong(visit: Visit, error: BadInput) -> str:
    """What is not accepted, in the form's own words."""
    name, given = visit.say(_NAMES.get(error.field, error.field)), isolated(str(error.value), 60)
    return visit.say("{name}: {given} is not accepted; give {accepted}", name=name, given=given,
                     accepted=inert_line(visit.say(error.accepted)))  # fmt: skip


def _alike(text: str, topics: Sequence[Topic]) -> Sequence[Topic]:
    """Topics that somebody may have meant who gave a part of one."""
    part = text.strip().lower()
    return [topic for topic in topics if part and part in topic.lower() and topic != text][:10]


def _times(visit: Visit, asked: Search) -> Mapping[str, str]:
    """What the fields for times show of an address that names them in UTC: the same in the viewer's zone."""
    phrases = visit.phrases
    times = {"wake_from": asked.where.wake_from, "wake_before": asked.where.wake_before}
    shown = {
        name: phrases.field(at) for name, at in times.items() if at is not None and visit.given(name).endswith("Z")
    }
    return {name: text for name, text in shown.items() if phrases.read_time(text, name) == times[name]}


def _readable(visit: Visit, tally: Tally) -> list[Topic]:
    """The topics that there are and that they may read."""
    return sorted({topic for topic, _ in tally.counts if visit.may(Verb.READ, topic)})


def _sum(counts: Sequence[Count | None]) -> Count:
    known = [count for count in counts if count is not None]
    return Count(sum(count.number for count in known), all(count.exact for count in known))


def _fields_of(visit: Visit, asked: Search) -> Mapping[str, str]:
    """The filter for a form that means all that match: its times are instants, and do not pass while it is open."""
    where = asked.where
    if asked.key:
        return {}
    return {
        name: text
        for name, text in (
            ("topic", where.topic),
            ("state", None if where.state is None else where.state.value),
            ("group", where.group),
            ("wake_from", None if where.wake_from is None else visit.phrases.utc(where.wake_from)),
            ("wake_before", None if where.wake_before is None else visit.phrases.utc(where.wake_before)),
        )
        if text is not None
    }
