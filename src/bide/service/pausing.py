"""Pausing and resuming by a caller: done, and in the audit log."""

from __future__ import annotations

import logging

from bide.core.instants import as_datetime
from bide.core.records import Count, State, Topic
from bide.engine.client import Client
from bide.service.shapes import CountShape, TopicShape, paused_shape

_log = logging.getLogger("bide.audit")
_NONE = Count(0)


async def pause_by(client: Client, topic: Topic, who: str) -> bool:
    """Whether it was not paused before. Raises BadInput, StoreError."""
    changed = await client.pause(topic, who=who)
    _note(who, "pause", topic, "paused" if changed else "paused already")
    return changed


async def resume_by(client: Client, topic: Topic, who: str) -> bool:
    """Whether it was paused. Raises BadInput, StoreError."""
    changed = await client.resume(topic, who=who)
    _note(who, "resume", topic, "resumed" if changed else "not paused")
    return changed


def _note(who: str, verb: str, topic: Topic, answer: str) -> None:
    _log.info(
        "%s: %s %s: %s", who, verb, topic, answer,
        extra={"who": who, "verb": verb, "topic": topic, "key": None, "answer": answer},
    )  # fmt: skip


async def topics_of(client: Client, only: Topic | None = None) -> list[TopicShape]:
    """Every topic that has tasks or is paused, or this one, with its counts. O(topics). Raises StoreError."""
    now = client.clock.now()
    asked = None if only is None else [only]
    tally = await client.tally([as_datetime(0), as_datetime(now + 1)], topics=asked)
    pauses = {topic: its for topic, its in (await client.paused()).items() if only in (None, topic)}
    names = sorted({topic for topic, _ in tally.counts} | tally.forecast.keys() | pauses.keys())

    def count(topic: Topic, state: State) -> CountShape:
        return _count(tally.counts.get((topic, state), _NONE))

    found: list[TopicShape] = []
    for topic in names:
        pause = pauses.get(topic)
        found.append(
            TopicShape(
                topic, count(topic, State.WAITING), count(topic, State.LEASED), count(topic, State.DONE),
                count(topic, State.CANCELLED), count(topic, State.DEAD),
                _count(tally.forecast.get(topic, [_NONE])[0]), None if pause is None else paused_shape(pause),
            )
        )  # fmt: skip
    return found


def _count(count: Count) -> CountShape:
    return CountShape(count.number, count.exact)
