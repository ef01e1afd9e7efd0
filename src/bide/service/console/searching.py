"""What is searched for among the tasks, and the pages of what is found: keyset pages, each read from an index.

Two lists have no index of their own. Who may read some topics only gets these one after another. And what is narrowed
within a group is looked at task by task, so many to a page at most: such a page may show fewer, and still go on.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from bide.core.errors import BadInput
from bide.core.names import check_name, check_topic
from bide.core.records import Filter, Found, Page, Record, Ref, State, Topic
from bide.engine.client import Client
from bide.service.callers import Verb
from bide.service.console.refs import DUE, filter_given
from bide.service.console.visit import Visit

LIMITS = (50, 200, 1_000)
_LOOKED_AT = 4_000
"""Tasks of a group that are looked at for one page."""
_MOST_TOPICS = 200
"""Topics in which a key is looked up."""


class Search(NamedTuple):
    """What somebody searches for."""

    where: Filter
    key: str
    """An exact key; empty: any."""
    due: bool
    """Only what waits and is due."""
    limit: int
    cursor: str

    @property
    def anything(self) -> bool:
        """Whether nothing narrows it."""
        return self.where == Filter() and not self.key


class Result(NamedTuple):
    """One page of what was found."""

    tasks: Sequence[Record]
    cursor: str
    """Of the next page; empty: this is the last."""
    passed: int = 0
    """Tasks that were looked at and did not match, where that was done one by one."""
    left_out: Sequence[Record] = ()
    """Those of the key that the other conditions leave out."""


def search_of(visit: Visit) -> Search:
    """What an address asks for. Raises BadInput."""
    key = visit.exact("key")
    where = filter_given(visit)
    if where.topic is not None:
        check_topic(where.topic)
    limit = visit.whole("limit", LIMITS[0], least=1, most=LIMITS[-1])
    due = visit.given("state") == DUE
    return Search(where, check_name("key", key) if key else "", due, limit, visit.given("cursor"))


async def search(visit: Visit, asked: Search, topics: Sequence[Topic]) -> Result:
    """One page; `topics`: all that are known and that they may read. Raises BadInput, Forbidden, StoreError."""
    where = asked.where
    visit.check(Verb.READ, where.topic if where.topic is not None or visit.may(Verb.READ, None) else _some(visit))
    if asked.key:
        in_topics = [where.topic] if where.topic is not None else topics[:_MOST_TOPICS]
        found = await _by_key(visit.client, asked, in_topics)
    else:
        one_by_one = None if where.topic is not None or visit.may(Verb.READ, None) else topics
        found = await _page(visit.client, asked, one_by_one)
    visible = visit.caller.visible
    return found._replace(tasks=visible(found.tasks), left_out=visible(found.left_out))


def _some(visit: Visit) -> str | None:
    """A topic that they may read, to tell whoever may read none."""
    if Verb.READ not in visit.caller.verbs or not visit.caller.topics:
        return None
    return next((topic for topic in visit.caller.topics if visit.may(Verb.READ, topic)), None)


async def _by_key(client: Client, asked: Search, topics: Sequence[Topic]) -> Result:
    found = [task.record for task in await client.get_many([Ref(topic, asked.key) for topic in topics]) if task]
    fits = [one for one in found if asked.where.admits(one)]
    return Result(fits, "", left_out=[one for one in found if one not in fits])


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Where a page ended."""

    topic: str = ""
    """Of a list topic by topic: the one that it is in."""
    cursor: str | None = None
    """The store's own."""
    after: tuple[str, str] | None = None
    """Of a list that is narrowed task by task: the last (topic, key) of the store's page that was looked at."""


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(_Place).decode


def _write(place: _Place) -> str:
    return base64.urlsafe_b64encode(_encode(place)).decode().rstrip("=")


def _read(text: str) -> _Place:
    if not text:
        return _Place()
    try:
        return _decode(base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)))
    except (ValueError, msgspec.MsgspecError):
        raise BadInput("cursor", text, "the cursor of the page before, as it came") from None


async def _page(client: Client, asked: Search, topics: Sequence[Topic] | None) -> Result:
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
            return Result(tasks, found.cursor, passed)
        if len(tasks) >= asked.limit:
            later = [one for one in topics if one > topic]
            return Result(tasks, _write(_Place(min(later))) if later else "", passed)
    return Result(tasks, "", passed)


async def _of_one(client: Client, asked: Search, where: Filter, place: _Place) -> Result:
    """A page of one list of the store."""
    topic = place.topic
    narrowed = where.state is not None or where.wake_from is not None or where.wake_before is not None
    if where.group is None or not narrowed:
        found = await client.find_page(where, Page(limit=asked.limit, cursor=place.cursor))
        return Result(found.tasks, _write(_Place(topic, found.cursor)) if found.cursor else "")
    wide = Filter(topic=where.topic, group=where.group)
    tasks: list[Record] = []
    looked_at = 0
    cursor, after = place.cursor, place.after
    while True:
        page: Found = await client.find_page(wide, Page(limit=max(asked.limit, LIMITS[1]), cursor=cursor))
        for record in page.tasks:
            if after is not None and record.ref <= after:
                continue  # it was on the page before
            if where.admits(record):
                if len(tasks) == asked.limit:
                    return Result(tasks, _write(_Place(topic, cursor, after)), looked_at - len(tasks))
                tasks.append(record)
            looked_at += 1
            after = record.ref
        cursor, after = page.cursor, None
        if cursor is None or looked_at >= _LOOKED_AT:
            return Result(tasks, _write(_Place(topic, cursor)) if cursor else "", looked_at - len(tasks))


def countable(asked: Search) -> bool:
    """Whether counts by topic, state and time tell how many match."""
    return not asked.key and asked.where.group is None


def waits(asked: Search) -> bool:
    """Whether it asks for what waits within a time: which is what a forecast counts."""
    where = asked.where
    return where.state is State.WAITING and (where.wake_from is not None or where.wake_before is not None)
