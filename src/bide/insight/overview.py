"""An overview of a store and its topics: the number of tasks, their lateness, and the workers on each topic.

An overview may be open all day in many browsers, on a store with millions of tasks. So it is made of four cached
queries. Each takes a small share of one processor, however many viewers there are:

* the counts of each topic and state, which most stores stop at ten thousand;
* if they stopped, an exact count of pending tasks, shown with its age and repeated only as often as its cost allows;
* the history of the last two minutes, the pauses, and the live workers;
* the leased tasks by worker, and the due time of the oldest task of each topic.

Answers are kept by topic, so that `Snapshot.overview` can show each viewer the permitted topics. The page of one topic
adds the announced settings of its workers and its last day, from cached queries too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.records import Count, Filter, Page, Pause, State, Tally, Topic, summed
from bide.engine.client import Client
from bide.engine.history import MINUTE, DeliveryCounts
from bide.engine.registry import Announced, HeldCount, HeldTasks, Workers, announced_routes
from bide.insight.cached_query import CachedQuery
from bide.insight.minute_log import Flow, LastDay, May, Quarter, Recent, Throughput

EVERY = 1.5
"""The least seconds between two queries of a kind. A page that polls every two seconds gets a new answer each time."""
_MOST_OLDEST, _MOST_HELD = 50, 20
"""The most topics whose oldest due task and holders are queried: those with the most such tasks."""
_EXACT_SHARE = 0.002
_WORK_SHARE = 0.002
_LIVE_SHARE = 0.02
"""The share for these calls. They cost little; most of their time is the network round trip to the store."""
_TOO_LONG, _SHORT = 0.25, 0.1
"""Seconds of an exact count above which the next one stops earlier, and below which it goes further if needed."""
_SOON = 0.15
"""Seconds that a viewer waits for the first exact count; a later answer appears in the next view."""
_FIRST_LIMIT = 1_000_000
_HIGHEST_LIMIT = 100_000_000
_LEAST_LIMIT = 20_000
_SETTLED: Millis = 5_000
"""A task that has been due for less time may still be leased by a consumer waiting over HTTP."""
_ROUTES_EVERY, _ROUTES_SHARE = 10.0, 0.01
"""Seconds between two queries of the announced routes, and the share of one processor that they may take."""
_ENDED = (State.DONE, State.CANCELLED)


class Figure(Struct, frozen=True):
    """A count, and the time it was made."""

    count: Count
    at: Millis


class TopicSeen(Struct, frozen=True, kw_only=True):
    topic: Topic
    counts: Mapping[State, Count]
    pending: Figure
    due: Figure
    """The pending tasks whose time has come."""
    oldest: Millis | None
    """The due time of the oldest due task; None: no task is due, or it was not queried."""
    hour: DeliveryCounts | None
    """Its deliveries within the last hour; None: unknown."""
    hour_span: Millis
    workers: Sequence[str] | None
    """The live workers; None: the store does not know them."""
    pause: Pause | None

    @property
    def leased(self) -> Count:
        return self.counts[State.LEASED]

    @property
    def dead(self) -> Count:
        return self.counts[State.DEAD]

    @property
    def late(self) -> Millis | None:
        """The lateness that 99 of 100 deliveries of the last hour did not exceed."""
        return None if self.hour is None else self.hour.lateness(0.99)

    @property
    def failed(self) -> int:
        """Deliveries of the last hour that failed: the task is retried later, or dead."""
        return 0 if self.hour is None else self.hour.failed

    def per_minute(self, number: int) -> float:
        """`number` of the last hour, per minute."""
        return number * MINUTE / max(self.hour_span, 1)

    @property
    def abandoned(self) -> bool:
        """True if the topic has no live worker, no leased task, and no delivery that began within the hour."""
        began = self.hour is not None and self.hour.begun > 0
        return self.workers is not None and not self.workers and not began and not self.leased.number


class Holder(Struct, frozen=True, kw_only=True):
    """A worker, or a consumer that holds tasks."""

    name: str
    topics: tuple[Topic, ...]
    """The topics that it announced; empty for a holder without announcements, such as a consumer over HTTP."""
    announced: bool
    held: Mapping[Topic, HeldCount]

    @property
    def number(self) -> int:
        """The number of tasks that it holds."""
        return sum(held.number for held in self.held.values())

    @property
    def lost(self) -> int:
        """The number of them whose lease has expired."""
        return sum(held.lost for held in self.held.values())


class Overview(Struct, frozen=True, kw_only=True):
    at: Millis
    pending: Figure
    """Waiting, due or not."""
    due: Figure
    leased: Count
    dead: Count
    ended: int
    """Done or cancelled tasks that are still kept; a lower bound."""
    oldest_due: tuple[Topic, Millis] | None
    """The topic and due time of the oldest due task, among the queried topics."""
    minute: Flow | None
    """None here and below: the store is a service, and the token may not read every topic."""
    hour: Flow | None
    latest: Topic | None
    """The topic with the greatest lateness within the last minute, by the 99th percentile."""
    by_minute: Sequence[int]
    """Deliveries that began in each minute of the last hour, the current one last."""
    topics: Sequence[TopicSeen]
    """By most due tasks, then by most pending tasks."""
    holders: Sequence[Holder]
    """Workers by name, then other holders."""
    holders_known: bool
    """True if the store knows the live workers."""
    holding_whole: bool
    """True if all leases were read for `holders`."""
    unworked: Sequence[TopicSeen]
    """Topics that are not paused, have a task due for some seconds and no live worker, and of which no task is leased
    or was delivered within the last minute."""

    @property
    def empty(self) -> bool:
        return not (self.pending.count.number or self.leased.number or self.dead.number or self.ended)

    @property
    def held_back(self) -> Sequence[TopicSeen]:
        """Paused topics with due tasks."""
        return [one for one in self.topics if one.pause is not None and one.due.count.number]


class TopicCounts(NamedTuple):
    """A tally whose first interval contains the due tasks, and the time it was taken."""

    tally: Tally
    at: Millis

    def of(self, topic: Topic, state: State) -> Count:
        return self.tally.counts.get((topic, state), Count(0))

    def due(self, topic: Topic) -> Count:
        return summed(self.tally.forecast.get(topic, ())[:1])

    def pending(self, topic: Topic) -> Count:
        """For an exact count: the sum of all intervals."""
        return summed(self.tally.forecast.get(topic, ()))


class Snapshot(NamedTuple):
    """The answers of the queries for all topics."""

    at: Millis
    counts: TopicCounts
    exact: TopicCounts | None
    recent: Recent | None
    """None: a service refuses it."""
    pauses: Mapping[Topic, Pause]
    workers: Mapping[str, Sequence[Topic]] | None
    """The live workers and their topics; None: unknown."""
    oldest: Mapping[Topic, Millis]
    """The due time of the oldest due task, by topic."""
    holding: HeldTasks

    def names(self) -> set[Topic]:
        """The topics that have tasks, or are paused."""
        return {topic for topic, _ in self.counts.tally.counts} | set(self.pauses)

    def topics(self, names: Iterable[Topic]) -> list[TopicSeen]:
        """The named topics, in the given order. O(topics + workers)."""
        counts, recent = self.counts, self.recent
        workers: defaultdict[Topic, list[str]] = defaultdict(list)
        for holder, its in sorted((self.workers or {}).items()):
            for topic in its:
                workers[topic].append(holder)
        return [
            TopicSeen(
                topic=topic,
                counts={state: counts.of(topic, state) for state in State},
                pending=self._figure(topic, counts.of(topic, State.WAITING), TopicCounts.pending),
                due=self._figure(topic, counts.due(topic), TopicCounts.due),
                oldest=self.oldest.get(topic),
                hour=None if recent is None else recent.hour.topics.get(topic) or DeliveryCounts(),
                hour_span=0 if recent is None else recent.hour_span,
                workers=None if self.workers is None else workers[topic],
                pause=self.pauses.get(topic),
            )
            for topic in names
        ]

    def overview(self, may: May | None = None) -> Overview:
        """The overview of the topics that `may` admits; None: of all. O(topics + holders)."""
        recent = self.recent
        topics = self.topics(topic for topic in self.names() if may is None or may(topic))
        topics.sort(key=lambda one: (-one.due.count.number, -one.pending.count.number, one.topic))
        oldest = [(since, topic) for topic, since in self.oldest.items() if may is None or may(topic)]
        return Overview(
            at=self.at,
            pending=_together((one.pending for one in topics), self.counts.at),
            due=_together((one.due for one in topics), self.counts.at),
            leased=summed(one.leased for one in topics),
            dead=summed(one.dead for one in topics),
            ended=sum(one.counts[state].number for one in topics for state in _ENDED),
            oldest_due=(min(oldest)[1], min(oldest)[0]) if oldest else None,
            minute=None if recent is None else recent.last_minute(may),
            hour=None if recent is None else recent.last_hour(may),
            latest=None if recent is None else recent.latest(may),
            by_minute=[] if recent is None else recent.by_minute(may),
            topics=topics,
            holders=self._holders(may),
            holders_known=self.workers is not None,
            holding_whole=self.holding.whole,
            unworked=[one for one in topics if self._is_unworked(one)],
        )

    def _figure(self, topic: Topic, quick: Count, of: Callable[[TopicCounts, Topic], Count]) -> Figure:
        """The quick count; if that stopped at its limit, the older exact count if it is larger."""
        if not quick.exact and self.exact is not None:
            slow = of(self.exact, topic)
            if slow.number > quick.number:
                return Figure(slow, self.exact.at)
        return Figure(quick, self.counts.at)

    def _holders(self, may: May | None) -> list[Holder]:
        workers = self.workers or {}
        held: defaultdict[str, dict[Topic, HeldCount]] = defaultdict(dict)
        for (name, topic), one in self.holding.by.items():
            if may is None or may(topic):
                held[name][topic] = one
        found = []
        for name in sorted(workers.keys() | held.keys(), key=lambda name: (name not in workers, name)):
            topics = tuple(topic for topic in workers.get(name, ()) if may is None or may(topic))
            if topics or name in held:
                its = dict(sorted(held[name].items(), key=lambda of: (-of[1].number, of[0]))) if name in held else {}
                found.append(Holder(name=name, topics=topics, announced=name in workers, held=its))
        return found

    def _is_unworked(self, one: TopicSeen) -> bool:
        if one.pause is not None or one.workers is None or one.workers or one.leased.number:
            return False
        if one.oldest is None or self.at - one.oldest < _SETTLED:
            return False
        return self.recent is None or one.topic not in self.recent.minute.topics


def _together(figures: Iterable[Figure], at: Millis) -> Figure:
    """The sum of `figures`, as old as the oldest of them."""
    known = list(figures)
    return Figure(summed(one.count for one in known), min((one.at for one in known), default=at))


class Overviews:
    """Queries the store of an open client for all viewers. Make it in the client's event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._workers = Workers(client)
        self._throughput = Throughput(client.store, client.clock)
        self._limit = _FIRST_LIMIT
        self._last_exact: TopicCounts | None = None
        self._counts = CachedQuery(self._count, every=EVERY, of=2)
        self._exact = CachedQuery(self._count_exactly, every=EVERY, share=_EXACT_SHARE, of=2)
        self._live = CachedQuery(self._ask_live, every=EVERY, share=_LIVE_SHARE, of=2)
        self._work = CachedQuery(self._ask_work, every=EVERY, share=_WORK_SHARE, of=2)

    async def quick(self) -> Snapshot:
        """A snapshot of the store without exact counts; each part is as old as its query. Raises StoreError."""
        counts, live, work = await asyncio.gather(self._counts.get(), self._live.get(), self._work.get())
        return Snapshot(self._client.clock.now(), counts, None, *live, *work)

    async def get(self) -> Snapshot:
        """The same, with exact counts in place of quick ones that stopped. Raises StoreError."""
        seen = await self.quick()
        if _stopped(seen.counts):
            try:
                async with asyncio.timeout(_SOON if self._last_exact is None else 0):
                    self._last_exact = await self._exact.get()
            except TimeoutError:
                pass  # the count goes on for the next viewer; this one gets the last result
        return seen._replace(at=self._client.clock.now(), exact=self._last_exact)

    async def changed(self) -> None:
        """Query again after a pause or a schedule, so that the next view shows the change. Raises StoreError."""
        await asyncio.gather(self._counts.fresh(), self._live.fresh())

    async def close(self) -> None:
        for query in (self._work, self._live, self._exact, self._counts):
            await query.close()

    # --- the queries

    async def _count(self) -> TopicCounts:
        now = self._client.clock.now()
        return TopicCounts(await self._client.tally([as_datetime(0), as_datetime(now + 1)]), now)

    async def _count_exactly(self) -> TopicCounts:
        """Count up to a limit, which falls after a slow count and rises after a fast one that stopped."""
        stopped = max(sum(not count.exact for count in (await self._counts.get()).tally.counts.values()), 1)
        limit = max(self._limit // stopped, _LEAST_LIMIT)
        now, began = self._client.clock.now(), self._loop.time()
        tally = await self._client.tally([as_datetime(edge) for edge in (0, now + 1, LAST_INSTANT)], upto=limit)
        took = self._loop.time() - began
        if took > _TOO_LONG:
            self._limit = limit // 4 * stopped
        elif took < _SHORT and not all(count.exact for counts in tally.forecast.values() for count in counts):
            self._limit = min(limit * 4 * stopped, _HIGHEST_LIMIT)
        return TopicCounts(tally, now)

    async def _ask_live(self) -> tuple[Recent | None, Mapping[Topic, Pause], Mapping[str, Sequence[Topic]] | None]:
        return await asyncio.gather(self._recent(), self._client.paused(), self._workers.workers())

    async def _recent(self) -> Recent | None:
        try:
            return await self._throughput.read()
        except SetupError:  # a service refuses it if the token may not read every topic
            return None

    async def _ask_work(self) -> tuple[Mapping[Topic, Millis], HeldTasks]:
        counts = await self._counts.get()
        due = {topic: counts.due(topic) for topic in counts.tally.forecast}
        leased = {topic: count for (topic, state), count in counts.tally.counts.items() if state is State.LEASED}
        return await asyncio.gather(
            oldest_due(self._client, _most(due, _MOST_OLDEST), self._client.clock.now()),
            self._workers.holding(_most(leased, _MOST_HELD), whole=len(leased) <= _MOST_HELD),
        )


def _stopped(counts: TopicCounts) -> bool:
    """True if more tasks are pending than were counted."""
    return any(not count.exact for (_, state), count in counts.tally.counts.items() if state is State.WAITING) or any(
        not count.exact for intervals in counts.tally.forecast.values() for count in intervals
    )


def _most(counts: Mapping[Topic, Count], number: int) -> list[Topic]:
    """The topics with the most tasks, without empty ones."""
    some = [topic for topic, count in counts.items() if count.number]
    return sorted(some, key=lambda topic: (-counts[topic].number, topic))[:number]


async def oldest_due(client: Client, topics: Collection[Topic], now: Millis) -> dict[Topic, Millis]:
    """The due time of the oldest due task of each topic; topics without a due task are left out.

    Reads one page of one task for each topic. Raises StoreError.
    """

    async def of(topic: Topic) -> Millis | None:
        where = Filter(topic=topic, state=State.WAITING, wake_before=now + 1)
        found = await client.find_page(where, Page(limit=1))
        return found.tasks[0].wake_at if found.tasks else None

    found = await asyncio.gather(*(of(topic) for topic in topics))
    return {topic: wake for topic, wake in zip(topics, found, strict=True) if wake is not None}


class TopicDetails(Struct, frozen=True):
    """One topic with its routes, holders and last day."""

    seen: TopicSeen
    routes: Sequence[Announced]
    holders: Mapping[str, HeldCount]
    """The current holders of its tasks with their numbers, among some hundreds of tasks that were read."""
    day: Sequence[Quarter]
    """The last day by quarters of an hour, oldest first, the current one last; empty if unknown."""


class Topics:
    """Queries the topics of an open client's store. Belongs to its event loop; `close` it before the client.

    `overviews` and `day` must be of the same store. They are shared, so `close` does not close them. Raises StoreError.
    """

    def __init__(self, client: Client, overviews: Overviews, day: LastDay) -> None:
        self._client = client
        self._overviews = overviews
        self._workers = Workers(client)
        self._day = day
        self._routes = CachedQuery(
            lambda: announced_routes(client.store, client.clock), every=_ROUTES_EVERY, share=_ROUTES_SHARE
        )

    async def all(self) -> list[TopicSeen]:
        """All topics that have tasks or live workers, are paused, were announced, or had deliveries within the hour."""
        seen, routes = await asyncio.gather(self._overviews.quick(), self._routes.get())
        names = seen.names() | {*seen.counts.tally.forecast, *(one.route.topic for one in routes)}
        names.update(*(seen.workers or {}).values())
        if seen.recent is not None:
            names.update(topic for topic in seen.recent.hour.topics if topic)
        return seen.topics(sorted(names))

    async def one(self, topic: Topic) -> TopicDetails:
        """The details of `topic`, even if it has no tasks."""
        seen, routes, _, holding, oldest = await asyncio.gather(
            self._overviews.quick(), self._routes.get(), self._day.refresh(),
            self._workers.holding([topic], whole=False), oldest_due(self._client, [topic], self._client.clock.now()),
        )  # fmt: skip
        return TopicDetails(
            seen._replace(oldest=oldest).topics([topic])[0],
            [one for one in routes if one.route.topic == topic],
            {holder: held for (holder, _), held in sorted(holding.by.items())},
            self._day.quarters(topic),
        )

    async def close(self) -> None:
        await self._routes.close()
