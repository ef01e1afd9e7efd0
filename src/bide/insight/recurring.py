"""Recurring tasks for a reader: a bounded search for them, occurrences that did not run, and those that are to come.

No index knows which tasks recur. So a search reads tasks, of each topic those that are due soonest, and some `MOST` in
all: small topics are read to their end, and large ones share the rest. Of these, paused ones are read besides.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from bide.core.errors import BadInput
from bide.core.events import Event, EventKind
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.options import recurrence_of
from bide.core.records import Count, Filter, Page, Record, State, Topic
from bide.core.recurrence.rules import Rule
from bide.engine.client import Client

MOST = 4_000
"""The most tasks that a search reads in the order of time; and the most paused ones."""
MOST_OF_RULE, MOST_COMING = 1_000, 10_000
"""The most coming occurrences of one rule, and of all."""
_TOPICS, _NEW = 200, 100
"""The most topics that a search reads, and the tasks that a topic may have beyond those that were counted."""
_COUNTED = re.compile(r"(late|overlap): ([0-9,]+)(?: or more)? occurrences? did not run")


class Miss(NamedTuple):
    """Occurrences that did not run, or one that died, as the event log tells it."""

    event: Event
    number: int
    """The occurrences that did not run; 0 if the log does not have the number."""
    why: str
    """`late` or `overlap` if the log has the number; else its text."""
    began: Millis
    """When the first delivery that the log has of the occurrence began; if it has none, when this was noted."""


def misses_of(events: Sequence[Event]) -> list[Miss]:
    """The misses in a log, in its order: the newest first."""
    found, began = list[Miss](), dict[str, Millis]()
    for one in reversed(events):
        if one.kind in (EventKind.DROPPED, EventKind.DEAD):
            counted = _COUNTED.fullmatch(one.what) if one.kind is EventKind.DROPPED else None
            number, why = (int(counted[2].replace(",", "")), counted[1]) if counted else (0, one.what)
            found.append(Miss(one, number, why, began.get(one.id, one.at if one.was is None else one.was)))
        elif one.kind is not EventKind.CHANGE and one.was is not None:
            began.setdefault(one.id, one.was)
    return found[::-1]


def past_of(rule: Rule, key: str, now: Millis, misses: Iterable[Miss], most: int) -> list[tuple[Millis, Miss | None]]:
    """The last instants of a rule before `now`, newest first, each with the newest miss that tells of it.

    `key` and `misses` are those of its task. O(most) steps.
    """
    past, told = rule.latest(rule.start or 0, now, most), dict[Millis, Miss]()
    for miss in misses:
        end, next_at = 1 + (miss.began if miss.event.kind is EventKind.DEAD else miss.event.at), miss.event.wake_at
        if miss.event.kind is EventKind.DROPPED and next_at is not None and next_at < end:
            end = rule.nominal(next_at, key)  # what runs in their place was due already
        before = bisect_left(past, end)
        for at in past[max(0, before - max(1, miss.number)) : before]:
            told.setdefault(at, miss)
    return [(at, told.get(at)) for at in reversed(past)]


async def recurring_tasks(
    client: Client, counts: Mapping[tuple[Topic, State], Count] | None = None
) -> tuple[list[Record], bool]:
    """The recurring tasks of the topics in a tally's `counts`, or of all; those due soonest come first.

    Second, whether these are all of them. The caller shows a viewer only those that they may read.
    """
    live: dict[Topic, int] = {}
    for (topic, state), count in ((await client.tally()).counts if counts is None else counts).items():
        if state.live:
            live[topic] = live.get(topic, 0) + count.number
    order, left, limits = sorted(live, key=lambda topic: live[topic])[:_TOPICS], MOST, list[int]()
    for place, topic in enumerate(order):
        limits.append(min(live[topic] + _NEW, left // (len(order) - place)))
        left -= limits[-1]

    async def read(topic: Topic, most: int) -> tuple[list[Record], bool]:
        page = await client.find_page(Filter(topic=topic, wake_from=0), Page(limit=most))
        if page.cursor is None:
            return page.tasks, True
        paused = await client.find_page(Filter(topic=topic, wake_from=LAST_INSTANT), Page(limit=most))
        return page.tasks + paused.tasks, False

    pages = await asyncio.gather(*map(read, order, limits))
    found = {one.ref: one for tasks, _ in pages for one in tasks if recurrence_of(one.options) is not None}
    whole = len(order) == len(live) and all(ended for _, ended in pages)
    return sorted(found.values(), key=lambda one: (one.wake_at, one.ref)), whole


class Coming(NamedTuple):
    """The occurrences after the next one of each recurring task: instants in order, by topic."""

    instants: Mapping[Topic, Sequence[Millis]]
    upto: Mapping[Topic, Millis]
    """The instant from which on there may be more than these, by topic."""

    def between(self, low: Millis, high: Millis) -> dict[Topic, Count]:
        """The numbers with low <= instant < high; topics that surely have none are left out."""
        counts = {
            topic: Count(bisect_left(found, high) - bisect_left(found, low), high <= self.upto.get(topic, high))
            for topic, found in self.instants.items()
        }
        return {topic: count for topic, count in counts.items() if count != Count(0)}


async def coming_of(tasks: Iterable[Record], first: Millis, last: Millis, now: Millis) -> Coming:
    """The coming occurrences from `first` to `last`. At most `MOST_COMING` steps of rules."""
    found: dict[Topic, list[Millis]] = {}
    upto: dict[Topic, Millis] = {}
    left = MOST_COMING
    for record in tasks:
        recurrence = recurrence_of(record.options)
        if recurrence is None or recurrence.paused:
            continue
        rule, most = recurrence.rule, min(left, MOST_OF_RULE)
        start = max(record.due_at, now, first - rule.jitter - 1) + 1
        with suppress(BadInput):  # a zone that is not known here
            nominal = rule.upto(start, last, most) if most else []
            left -= len(nominal)
            if len(nominal) == most and start <= last:
                beyond = nominal[-1] + 1 if nominal else start
                upto[record.topic] = min(beyond, upto.get(record.topic, beyond))
            found.setdefault(record.topic, []).extend(rule.fires_at(one, record.key) for one in nominal)
        await asyncio.sleep(0)
    return Coming({topic: sorted(instants) for topic, instants in found.items()}, upto)
