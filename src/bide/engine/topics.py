"""What is to be known of each topic: its counts, how late it goes out, who works on it and how, and its last day.

Everything comes from looks that all who ask share (`engine.looks`), so that a page which is open all day in many
browsers costs a small part of one processor. Counts stop at ten thousand on most stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from bide.core.instants import Millis, as_datetime
from bide.core.records import Count, State, Tally, Topic
from bide.engine.client import Client
from bide.engine.history import MINUTE, Past, rows_between, summed
from bide.engine.looks import Look
from bide.engine.oldest import oldest_due
from bide.engine.pauses import Pause
from bide.engine.presence import Held, Presence
from bide.engine.throughput import Recent, Throughput
from bide.engine.told_routes import Told, told_routes
from bide.ports import Served

QUARTER: Millis = 15 * MINUTE
QUARTERS = 96
"""Of an hour: a day."""
_MOST_OLDEST = 50
"""Topics whose oldest due task is looked for: those with the most due."""
_AFRESH: Millis = 60 * MINUTE
"""After so long the whole day is read again: what could not be written in its time comes later."""
_LATE_ROWS: Millis = 5 * MINUTE
_NONE = Count(0)
_SHARE = 0.01


class TopicSeen(Struct, frozen=True):
    """One topic."""

    topic: Topic
    counts: Mapping[State, Count]
    due: Count
    """Of the waiting those whose time has come."""
    oldest: Millis | None
    """Since when the oldest of these is due; None: none is, or it was not looked for."""
    hour: Past | None
    """What happened within the last hour; None: that is not to be had."""
    hour_span: Millis
    workers: Sequence[str] | None
    """Those alive; None: the store cannot tell."""
    pause: Pause | None

    @property
    def late(self) -> Millis | None:
        """The lateness that 99 of 100 deliveries of the last hour did not pass."""
        return None if self.hour is None else self.hour.lateness(0.99)

    @property
    def failed(self) -> int:
        """Deliveries of the last hour that failed: tried again later, or dead."""
        return 0 if self.hour is None else self.hour.retried + self.hour.dead

    def per_minute(self, number: int) -> float:
        """So many of the last hour, by the minute."""
        return number * MINUTE / max(self.hour_span, 1)

    @property
    def abandoned(self) -> bool:
        """Nobody works on it: no worker is alive for it, and within the hour nobody began anything."""
        began = self.hour is not None and self.hour.begun > 0
        leased = self.counts.get(State.LEASED, _NONE).number > 0
        return self.workers is not None and not self.workers and not began and not leased


class Quarter(NamedTuple):
    """What happened to one topic in a quarter of an hour."""

    since: Millis
    past: Past


class TopicStory(Struct, frozen=True):
    """One topic, and what costs more to know."""

    seen: TopicSeen
    routes: Sequence[Told]
    holders: Mapping[str, Held]
    """Who holds tasks of it now, and how many; of some hundreds that were looked at."""
    day: Sequence[Quarter]
    """The last day, the oldest first, the running quarter of an hour last; empty where that is not to be had."""


class _Counted(NamedTuple):
    tally: Tally
    oldest: Mapping[Topic, Millis]
    pauses: Mapping[Topic, Pause]


class Topics:
    """Those of an open client's store. Belongs to its event loop; `close` it before the client. Raises StoreError."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._presence = Presence(client)
        self._throughput = Throughput(client.store, client.clock)
        self._day = _Day(client)
        self._told = not isinstance(client.store, Served)
        """A service keeps to itself what is there to be shown."""
        self._counts = Look(self._count, every=1.5, share=_SHARE)
        self._recent = Look(self._throughput.look, every=4.0, share=_SHARE)
        self._workers = Look(self._presence.workers, every=1.5, share=_SHARE)
        self._routes = Look(self._read_routes, every=10.0, share=_SHARE)
        self._days = Look(self._day.look, every=10.0)

    async def all(self) -> list[TopicSeen]:
        """Every topic that has tasks, is paused, is worked on, was told of, or was delivered within the hour."""
        counted, workers, routes, recent = await asyncio.gather(
            self._counts.get(), self._workers.get(), self._routes.get(), self._hour()
        )
        names = {topic for topic, _ in counted.tally.counts}
        names |= {*counted.tally.forecast, *counted.pauses}
        names |= {told.route.topic for told in routes}
        names |= {topic for topics in (workers or {}).values() for topic in topics}
        if recent is not None:
            names |= {topic for topic in recent.hour if topic}
        working: dict[Topic, list[str]] = {}
        for holder, topics in (workers or {}).items():
            for topic in topics:
                working.setdefault(topic, []).append(holder)
        return [
            self._seen(topic, counted, recent, None if workers is None else working.get(topic, []))
            for topic in sorted(names)
        ]

    async def one(self, topic: Topic) -> TopicStory:
        """This one, whether or not there is anything of it."""
        counted, workers, routes, recent, day, holding = await asyncio.gather(
            self._counts.get(), self._workers.get(), self._routes.get(), self._hour(), self._last_day(),
            self._presence.holding([topic], whole=False),
        )  # fmt: skip
        working = None if workers is None else sorted(holder for holder, its in workers.items() if topic in its)
        return TopicStory(
            self._seen(topic, counted, recent, working),
            [told for told in routes if told.route.topic == topic],
            {holder: held for (holder, _), held in sorted(holding.by.items())},
            [Quarter(since, topics.get(topic) or Past()) for since, topics in day],
        )

    async def changed(self) -> None:
        """Somebody has just paused or resumed: what is seen next is to show it. Raises StoreError."""
        await self._counts.fresh()

    async def close(self) -> None:
        """Let no look go on."""
        for look in (self._counts, self._recent, self._workers, self._routes, self._days):
            await look.close()

    # --- the looks

    async def _hour(self) -> Recent | None:
        return await self._recent.get() if self._told else None

    async def _last_day(self) -> Sequence[tuple[Millis, Mapping[Topic, Past]]]:
        return await self._days.get() if self._told else ()

    async def _read_routes(self) -> list[Told]:
        return await told_routes(self._client.store, self._client.clock) if self._told else []

    async def _count(self) -> _Counted:
        client = self._client
        now = client.clock.now()
        tally, pauses = await asyncio.gather(client.tally([as_datetime(0), as_datetime(now + 1)]), client.paused())
        due = {topic: counts[0].number for topic, counts in tally.forecast.items() if counts and counts[0].number}
        fullest = sorted(due, key=lambda topic: -due[topic])[:_MOST_OLDEST]
        return _Counted(tally, await oldest_due(client, fullest, now), pauses)

    def _seen(self, topic: Topic, counted: _Counted, recent: Recent | None, workers: Sequence[str] | None) -> TopicSeen:
        tally = counted.tally
        due = tally.forecast.get(topic)
        return TopicSeen(
            topic,
            {state: tally.counts.get((topic, state), _NONE) for state in State},
            due[0] if due else _NONE,
            counted.oldest.get(topic),
            None if recent is None else recent.hour.get(topic) or Past(),
            0 if recent is None else recent.hour_span,
            workers,
            counted.pauses.get(topic),
        )


class _Day:
    """The history of a day by quarters of an hour. What is over is read once an hour, what is new at each look."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._quarters: dict[int, Mapping[Topic, Past]] = {}
        """By number since the epoch: those that change no more."""
        self._whole_at: Millis | None = None

    async def look(self) -> list[tuple[Millis, Mapping[Topic, Past]]]:
        """O(minutes not yet known x processes)."""
        now = self._client.clock.now()
        last = now // QUARTER
        first = last - QUARTERS + 1
        if self._whole_at is None or not 0 <= now - self._whole_at < _AFRESH:
            self._whole_at, self._quarters = now, {}
        known = self._quarters = {quarter: topics for quarter, topics in self._quarters.items() if quarter >= first}
        unknown = next((quarter for quarter in range(first, last + 1) if quarter not in known), last)
        per = QUARTER // MINUTE
        rows = await rows_between(self._client.store, self._client.clock, unknown * per, last * per + per - 1)
        read = {
            quarter: summed(row.topics for minute, row in rows.items() if minute // per == quarter)
            for quarter in range(unknown, last + 1)
        }
        self._quarters |= {
            quarter: topics for quarter, topics in read.items() if (quarter + 1) * QUARTER + _LATE_ROWS <= now
        }
        both = {**known, **read}
        return [(quarter * QUARTER, both.get(quarter, {})) for quarter in range(first, last + 1)]
