"""The lists of tasks: a search by topic, key, group, state and time, and the dead letters by topic and error.

The address holds the whole state of a page, so that it can be shared. Pages are keyset pages, each read from an index.
No tasks are read to be counted: if an index has the number of matches it is shown, else only that there are more.

Two lists have no index. A viewer who may read only some topics gets these one after another. And a filter
within a group is applied task by task, to a limited number for each page: such a page may show fewer tasks than it
could, and still have a next page.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from bide.core import records
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, as_datetime
from bide.core.names import check_name, check_topic, error_parts
from bide.core.records import Count, Filter, Found, Pause, Record, Ref, Result, State, Tally, Topic, summed
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.insight.dead_letters import DeadLetters, dead_letters, tasks_of_group
from bide.service.access import Verb
from bide.service.console.actions import possible
from bide.service.console.i18n import inert_line, isolated
from bide.service.console.pages import ConsoleContext, Page, PageRequest, filter_fields, read_filter
from bide.service.console.rendering import address
from bide.service.console.task import TaskPage
from bide.service.requests import Reply

LIMITS = (50, 200, 1_000)
_LOOKED_AT = 4_000
"""Most tasks of a group that are read for one page."""
_MOST_TOPICS = 200
"""Most topics in which a key is looked up."""


class Search(NamedTuple):
    """A search for tasks, as its address describes it."""

    where: Filter
    key: str
    """An exact key; empty: any."""
    limit: int
    cursor: str

    @property
    def anything(self) -> bool:
        return self.where == Filter() and not self.key


class TasksFound(NamedTuple):
    tasks: Sequence[Record]
    cursor: str
    """The cursor of the next page; empty: this is the last."""
    passed: int = 0
    """Tasks that were read and did not match, where the filter is applied one by one."""
    left_out: Sequence[Record] = ()
    """Tasks with the key that fail the other conditions."""


def search_of(request: PageRequest) -> Search:
    """Read the address. Raises BadInput."""
    key = request.raw_field("key")
    where = read_filter(request)
    limit = request.number_field("limit", LIMITS[0], least=1, most=LIMITS[-1])
    return Search(where, check_name("key", key) if key else "", limit, request.field("cursor"))


async def search(request: PageRequest, asked: Search, topics: Sequence[Topic]) -> TasksFound:
    """Find one page. `topics`: the topics that the viewer may read. Raises BadInput, Forbidden, StoreError."""
    where, caller = asked.where, request.caller
    if where.topic is not None:
        caller.check(Verb.READ, where.topic)
    if asked.key:
        in_topics = [where.topic] if where.topic is not None else topics[:_MOST_TOPICS]
        named = await request.client.get_many([Ref(topic, asked.key) for topic in in_topics])
        there = [task.record for task in named if task is not None]
        fits = [one for one in there if where.admits(one)]
        found = TasksFound(fits, "", left_out=[one for one in there if one not in fits])
    else:
        whole = where.topic is not None or caller.may(Verb.READ, None)
        found = await _page(request.client, asked, None if whole else topics)
    return found._replace(tasks=caller.visible(found.tasks), left_out=caller.visible(found.left_out))


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The position at which a page ended."""

    topic: str = ""
    """The current topic of a list that goes topic by topic."""
    cursor: str | None = None
    """The store's own cursor."""
    after: tuple[str, str] | None = None
    """For a filter that is applied task by task: the last (topic, key) that was read of the store's page."""


def _write(place: _Place) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(place)).decode().rstrip("=")


def _read(text: str) -> _Place:
    if not text:
        return _Place()
    try:
        encoded = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        return msgspec.msgpack.decode(encoded, type=_Place)
    except (ValueError, msgspec.MsgspecError):
        raise BadInput("cursor", text, "the cursor of the previous page, unchanged") from None


async def _page(client: Client, asked: Search, topics: Sequence[Topic] | None) -> TasksFound:
    place = _read(asked.cursor)
    if topics is None:
        return await _of_one(client, asked, asked.where, place)
    tasks: list[Record] = []
    passed = 0
    for topic in sorted(topics):
        if topic < place.topic:
            continue
        start = place if topic == place.topic else _Place(topic)
        left = asked._replace(limit=asked.limit - len(tasks))
        found = await _of_one(client, left, replace(asked.where, topic=topic), start)
        tasks += found.tasks
        passed += found.passed
        if found.cursor:
            return TasksFound(tasks, found.cursor, passed)
        if len(tasks) >= asked.limit:
            later = [one for one in topics if one > topic]
            return TasksFound(tasks, _write(_Place(min(later))) if later else "", passed)
    return TasksFound(tasks, "", passed)


async def _of_one(client: Client, asked: Search, where: Filter, place: _Place) -> TasksFound:
    topic = place.topic
    narrowed = where.state is not None or where.wake_from is not None or where.wake_before is not None
    if where.group is None or not narrowed:
        found = await client.find_page(where, records.Page(limit=asked.limit, cursor=place.cursor))
        return TasksFound(found.tasks, _write(_Place(topic, found.cursor)) if found.cursor else "")
    wide = Filter(topic=where.topic, group=where.group)
    tasks: list[Record] = []
    looked_at = 0
    cursor, after = place.cursor, place.after
    while True:
        page: Found = await client.find_page(wide, records.Page(limit=max(asked.limit, LIMITS[1]), cursor=cursor))
        for record in page.tasks:
            if after is not None and record.ref <= after:
                continue  # it was on the page before
            if where.admits(record):
                if len(tasks) == asked.limit:
                    return TasksFound(tasks, _write(_Place(topic, cursor, after)), looked_at - len(tasks))
                tasks.append(record)
            looked_at += 1
            after = record.ref
        cursor, after = page.cursor, None
        if cursor is None or looked_at >= _LOOKED_AT:
            return TasksFound(tasks, _write(_Place(topic, cursor)) if cursor else "", looked_at - len(tasks))


FIELDS = ("topic", "key", "group", "state", "wake_from", "wake_before", "limit")
_MOST_COUNTED = 100
"""Most topics for which the waiting tasks within a time are counted."""
_MOST_NAMED = 200


class TasksPage(Page):
    def __init__(self, context: ConsoleContext) -> None:
        self._app = context.app
        self._tally: CachedQuery[Tally] = CachedQuery(self._app.tally, every=5.0)
        self._paused: CachedQuery[Mapping[str, Pause]] = CachedQuery(self._app.paused, every=2.0, share=0.1)
        self.routes = {("GET", "/tasks"): self._page, **TaskPage(context, self._paused).routes}
        context.stack.push_async_callback(self._tally.close)
        context.stack.push_async_callback(self._paused.close)

    async def _page(self, request: PageRequest) -> Reply:
        request.caller.check_somewhere(Verb.READ)
        tally, paused = await asyncio.gather(self._tally.get(), self._paused.get())
        topics = _readable(request, tally)
        given = {name: request.raw_field(name) for name in FIELDS}
        try:
            asked = search_of(request)
            found = await search(request, asked, topics)
            if asked.key and asked.where.topic is None and not found.tasks and self._tally.age > 1.0:
                tally = await self._tally.fresh()  # its topic may be new
                topics = _readable(request, tally)
                found = await search(request, asked, topics)
        except BadInput as error:
            return request.render(
                "tasks.html", status=422, given=given, topics=topics[:_MOST_NAMED], asked=None, rows=(), paused=paused,
                wrong=_wrong(request, error),
            )  # fmt: skip
        held = {name: text for name, text in given.items() if text}
        part = given["topic"].strip().lower()
        shown = sorted({record.topic for record in found.tasks})
        return request.render(
            "tasks.html",
            given={**given, **_times(request, asked)},
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
            all_chosen=request.field("chosen") == "all",
            verbs=possible(request, given["state"].strip(), shown),
            matching={} if asked.key else filter_fields(asked.where),
            keep=self._app.config.retentions.of(asked.where.topic or ""),
            alike=[one for one in topics if part and part in one.lower() and one != given["topic"]][:10],
            widen=[(_NAMES[name], address("/tasks", **{**held, name: ""})) for name in FIELDS[:-1] if name in held],
        )

    async def _count(self, asked: Search, found: TasksFound, tally: Tally, topics: Sequence[Topic]) -> Count | None:
        """The number of matches, if this page has all of them or an index counts them; None: unknown."""
        if not asked.cursor and not found.cursor:
            return Count(len(found.tasks))
        where = asked.where
        if asked.key or where.group is not None:  # counts are by topic, state and time
            return None
        wanted = [where.topic] if where.topic is not None else topics
        if where.wake_from is None and where.wake_before is None:
            states = State if where.state is None else (where.state,)
            return summed(tally.counts.get((topic, state), Count(0)) for topic in wanted for state in states)
        if where.state is not State.WAITING or len({topic for topic, _ in tally.counts}) > _MOST_COUNTED:
            return None
        last = LAST_INSTANT if where.wake_before is None else where.wake_before
        edges = (where.wake_from or 0, max(last, where.wake_from or 0))
        forecast = (await self._app.tally([as_datetime(edge) for edge in edges])).forecast
        return summed(count for topic in wanted for count in forecast.get(topic, ()))


_NAMES = {"topic": "Topic", "key": "Key", "group": "Group", "state": "State", "wake_from": "Due from",
          "wake_before": "and before", "limit": "Per page"}  # fmt: skip


def _wrong(request: PageRequest, error: BadInput) -> str:
    """Name the value that is not accepted, in the form's own words."""
    name, given = request.t(_NAMES.get(error.field, error.field)), isolated(str(error.value), 60)
    return request.t("{name}: {given} is not accepted; give {accepted}", name=name, given=given,
                     accepted=inert_line(request.t(error.accepted)))  # fmt: skip


def _times(request: PageRequest, asked: Search) -> Mapping[str, str]:
    """The times that an address gives in UTC, converted to the viewer's zone for the fields."""
    locale = request.locale
    times = {"wake_from": asked.where.wake_from, "wake_before": asked.where.wake_before}
    shown = {
        name: locale.moment(at) for name, at in times.items() if at is not None and request.field(name).endswith("Z")
    }
    return {name: text for name, text in shown.items() if locale.read_time(text, name) == times[name]}


def _readable(request: PageRequest, tally: Tally) -> list[Topic]:
    return sorted({topic for topic, _ in tally.counts if request.caller.may(Verb.READ, topic)})


_EVERY = 1.0
"""Least seconds between two readings of the dead tasks, for all viewers together."""
_SHARE = 0.05
"""Share of the time that readings may take: the page does not refresh by itself."""
_MOST_GROUPS = 200


class DeadPage(Page):
    def __init__(self, context: ConsoleContext) -> None:
        self._groups_query: CachedQuery[DeadLetters] = CachedQuery(
            lambda: dead_letters(context.app), every=_EVERY, share=_SHARE
        )
        self.routes = {("GET", "/dead"): self._page}
        context.stack.push_async_callback(self._groups_query.close)

    async def _page(self, request: PageRequest) -> Reply:
        topic = request.raw_field("topic")
        error = request.field("error")
        if error and not topic:
            raise BadInput("topic", topic, "the topic of the group as well")
        if topic and (error or request.field("list")):
            return await self._group(request, check_topic(topic), error or None)
        only = check_topic(topic) if topic else None
        if only is None:
            request.caller.check_somewhere(Verb.READ)
        else:
            request.caller.check(Verb.READ, only)
        said = _said(request)
        found = await (self._groups_query.fresh() if said or request.field("fresh") else self._groups_query.get())
        shown = {
            topic: count
            for topic, count in found.totals.items()
            if only in (None, topic) and request.caller.may(Verb.READ, topic)
        }
        groups = [group for group in found.groups if group.topic in shown]
        may_redrive = {topic for topic in shown if request.caller.may(Verb.REDRIVE, topic)}
        return request.render(
            "dead.html", only=only, groups=groups[:_MOST_GROUPS], more=max(0, len(groups) - _MOST_GROUPS),
            totals=sorted(shown.items(), key=lambda one: (-one[1].number, one[0])), all=summed(shown.values()),
            partly=found.partly & shown.keys(), looked=sum(group.number for group in groups),
            may=may_redrive, said=said, age=int(self._groups_query.age * 1000),
        )  # fmt: skip

    async def _group(self, request: PageRequest, topic: Topic, error: str | None) -> Reply:
        """Render the tasks of one group, or of a topic, to choose from."""
        request.caller.check(Verb.READ, topic)
        limit = request.number_field("limit", 100, least=1, most=500)
        page = await tasks_of_group(request.client, topic, error, request.field("cursor") or None, limit=limit)
        tasks = request.caller.visible(page.tasks)
        traced = [one for one in tasks if error and error_parts(one.error)[1]]
        here = partial(address, "/dead", topic=topic, error=error, list="yes")
        return request.render(
            "dead_group.html", topic=topic, error=error, tasks=tasks, here=here(), said=_said(request),
            next=None if page.cursor is None else here(limit=limit, cursor=page.cursor),
            first=here() if request.field("cursor") else None, may=request.caller.may(Verb.REDRIVE, topic),
            traced=traced[-1] if traced else None,
        )  # fmt: skip


def _said(request: PageRequest) -> str:
    """The answer to the form that led back to this page."""
    return Result.REDRIVEN.value if request.field("said") == Result.REDRIVEN.value else ""
