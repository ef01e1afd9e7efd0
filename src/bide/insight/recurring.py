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
    began: Millis | None
    """When the first delivery of the occurrence began that the log has; None: it has none."""


def misses_of(events: Iterable[Event]) -> list[Miss]:
    """The misses in a log, in its order."""
    found, log, began = list[Miss](), list(events), dict[str, Millis]()
    for one in log:
        if one.kind not in (EventKind.CHANGE, EventKind.DROPPED) and one.was is not None:
            began[one.id] = min(one.was, began.get(one.id, one.was))
    for one in log:
        if one.kind in (EventKind.DROPPED, EventKind.DEAD):
            counted = _COUNTED.fullmatch(one.what) if one.kind is EventKind.DROPPED else None
            number, why = (int(counted[2].replace(",", "")), counted[1]) if counted else (0, one.what)
            found.append(Miss(one, number, why, began.get(one.id)))
    return found


def past_of(record: Record, now: Millis, misses: Sequence[Miss], most: int) -> list[tuple[Millis, Miss | None]]:
    """The last instants of the rule before `now`, newest first, each with the miss that tells of it. O(most) steps."""
    recurrence = recurrence_of(record.options)
    if recurrence is None:
        return []
    rule = recurrence.rule
    past = rule.latest(rule.start or 0, now, most)
    told: dict[Millis, Miss] = {}
    for miss in reversed(misses):  # of several the newest
        at, began, next_at = miss.event.at, miss.began, miss.event.wake_at
        if miss.event.kind is EventKind.DEAD:
            end, number = (at if began is None else began) + 1, 1
        else:
            # what runs in their place may be due already
            end = rule.nominal(next_at, record.key) if next_at is not None and next_at <= at else at + 1
            number = max(1, miss.number)
        before = bisect_left(past, end)
        told.update(dict.fromkeys(past[max(0, before - number) : before], miss))
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

    def between(self, topic: Topic, low: Millis, high: Millis) -> Count:
        """The number with low <= instant < high."""
        found = self.instants[topic]
        return Count(bisect_left(found, high) - bisect_left(found, low), high <= self.upto.get(topic, high))


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
