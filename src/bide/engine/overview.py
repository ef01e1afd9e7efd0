"""All of a store at a glance: how much there is, how late it goes out, and who works on it.

What was looked at (see `overview_looks`) is kept by topic, so that `Seen.overview` can tell everybody what is of the
topics that they may see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Count, State, Tally, Topic
from bide.engine.pauses import Pause
from bide.engine.presence import Held, Holding
from bide.engine.throughput import Flow, May, Recent

_SETTLED: Millis = 5_000
"""What has been due for less may be taken yet, by somebody who waits over HTTP."""


class Figure(Struct, frozen=True):
    """How many, and when that was counted."""

    count: Count
    at: Millis


class OfTopic(Struct, frozen=True, kw_only=True):
    """One topic."""

    topic: Topic
    pending: Figure
    due: Figure
    """Of the pending, those whose time has come."""
    leased: Count
    dead: Count
    pause: Pause | None
    workers: int | None
    """How many say that they live and work on it; None: that is not known."""


class Holder(Struct, frozen=True, kw_only=True):
    """A worker, or a consumer that holds something."""

    name: str
    topics: tuple[Topic, ...]
    """What it says that it works on; nothing for one that says nothing, such as a consumer over HTTP."""
    announced: bool
    held: Mapping[Topic, Held]

    @property
    def number(self) -> int:
        """Tasks that it holds."""
        return sum(held.number for held in self.held.values())

    @property
    def lost(self) -> int:
        """Those of them whose lease has run out."""
        return sum(held.lost for held in self.held.values())


class Overview(Struct, frozen=True, kw_only=True):
    """What somebody sees of a store."""

    at: Millis
    pending: Figure
    """Waiting, due or not."""
    due: Figure
    leased: Count
    dead: Count
    ended: int
    """Done or cancelled, and still remembered; at least so many."""
    oldest_due: tuple[Topic, Millis] | None
    """Of which topic the task is that is due for longest, as far as looked for, and since when."""
    minute: Flow | None
    """None here and below: a service is in between, and its token may not read every topic."""
    hour: Flow | None
    latest: Topic | None
    """The topic that went out latest within the last minute, by the 99th percentile."""
    by_minute: Sequence[int]
    """Deliveries that began in each minute of the last hour, the running one last."""
    topics: Sequence[OfTopic]
    """Those with most due first, then with most pending."""
    holders: Sequence[Holder]
    """Workers by name, then who holds something without being one."""
    holders_known: bool
    """Whether the store tells which workers live."""
    holding_whole: bool
    """Whether all that is leased was looked at for `holders`."""
    paused: Sequence[Pause]
    unworked: Sequence[OfTopic]
    """Topics, not paused, with a task that has been due for seconds, on which no worker works, and of which nothing is
    held or was delivered within the last minute."""

    @property
    def empty(self) -> bool:
        """Whether there is no task at all."""
        return not (self.pending.count.number or self.leased.number or self.dead.number or self.ended)

    @property
    def workers(self) -> int:
        """How many live."""
        return sum(holder.announced for holder in self.holders)

    @property
    def held_back(self) -> Sequence[OfTopic]:
        """Paused topics with due tasks."""
        return [one for one in self.topics if one.pause is not None and one.due.count.number]


class Counted(NamedTuple):
    """A tally whose first interval is what is due, and when it was taken."""

    tally: Tally
    at: Millis

    def due(self, topic: Topic) -> Count:
        counts = self.tally.forecast.get(topic)
        return counts[0] if counts else Count(0)

    def pending(self, topic: Topic) -> Count:
        """Of an exact count: the sum of all intervals."""
        counts = self.tally.forecast.get(topic, ())
        return Count(sum(one.number for one in counts), all(one.exact for one in counts))


class Told(NamedTuple):
    """What processes tell of themselves, and what is paused. None: not to be had."""

    recent: Recent | None
    pauses: Mapping[Topic, Pause]
    workers: Mapping[str, Sequence[Topic]] | None


class Work(NamedTuple):
    """What is held by whom, and since when the oldest task of a topic is due."""

    oldest: Mapping[Topic, Millis]
    holding: Holding


class Seen(NamedTuple):
    """What the looks have found, of every topic."""

    at: Millis
    counts: Counted
    exact: Counted | None
    told: Told
    work: Work

    def overview(self, may: May | None = None) -> Overview:
        """Of the topics that somebody may see; None: of all. O(topics + holders)."""
        recent = self.told.recent
        topics = self._topics(may)
        oldest = [(since, topic) for topic, since in self.work.oldest.items() if may is None or may(topic)]
        ended = (self.counts.tally.counts.get((one.topic, state)) for one in topics for state in _ENDED)
        return Overview(
            at=self.at,
            pending=_together((one.pending for one in topics), self.counts.at),
            due=_together((one.due for one in topics), self.counts.at),
            leased=_sum(one.leased for one in topics),
            dead=_sum(one.dead for one in topics),
            ended=_sum(count for count in ended if count is not None).number,
            oldest_due=(min(oldest)[1], min(oldest)[0]) if oldest else None,
            minute=None if recent is None else recent.last_minute(may),
            hour=None if recent is None else recent.last_hour(may),
            latest=None if recent is None else recent.latest(may),
            by_minute=[] if recent is None else recent.by_minute(may),
            topics=topics,
            holders=self._holders(may),
            holders_known=self.told.workers is not None,
            holding_whole=self.work.holding.whole,
            paused=[pause for topic, pause in sorted(self.told.pauses.items()) if may is None or may(topic)],
            unworked=[one for one in topics if self._is_unworked(one)],
        )

    def _topics(self, may: May | None) -> list[OfTopic]:
        counts, exact = self.counts, self.exact
        names = {topic for topic, _ in counts.tally.counts} | set(self.told.pauses)
        workers: defaultdict[Topic, int] = defaultdict(int)
        for topics in (self.told.workers or {}).values():
            for topic in topics:
                workers[topic] += 1

        def number(topic: Topic, state: State) -> Count:
            return counts.tally.counts.get((topic, state), Count(0))

        found = [
            OfTopic(
                topic=topic,
                pending=_better(
                    number(topic, State.WAITING), counts.at, None if exact is None else exact.pending(topic), exact
                ),
                due=_better(counts.due(topic), counts.at, None if exact is None else exact.due(topic), exact),
                leased=number(topic, State.LEASED),
                dead=number(topic, State.DEAD),
                pause=self.told.pauses.get(topic),
                workers=None if self.told.workers is None else workers[topic],
            )
            for topic in names
            if may is None or may(topic)
        ]
        found.sort(key=lambda one: (-one.due.count.number, -one.pending.count.number, one.topic))
        return found

    def _holders(self, may: May | None) -> list[Holder]:
        workers = self.told.workers or {}
        held: defaultdict[str, dict[Topic, Held]] = defaultdict(dict)
        for (name, topic), one in self.work.holding.by.items():
            if may is None or may(topic):
                held[name][topic] = one
        found = []
        for name in sorted(workers.keys() | held.keys(), key=lambda name: (name not in workers, name)):
            topics = tuple(topic for topic in workers.get(name, ()) if may is None or may(topic))
            if topics or name in held:
                its = dict(sorted(held[name].items(), key=lambda of: (-of[1].number, of[0]))) if name in held else {}
                found.append(Holder(name=name, topics=topics, announced=name in workers, held=its))
        return found

    def _is_unworked(self, one: OfTopic) -> bool:
        since = self.work.oldest.get(one.topic)
        if one.pause is not None or one.workers != 0 or one.leased.number or not one.due.count.number:
            return False
        if since is None or self.at - since < _SETTLED:
            return False
        return self.told.recent is None or one.topic not in self.told.recent.minute


_ENDED = (State.DONE, State.CANCELLED)


def _better(quick: Count, at: Millis, slow: Count | None, exact: Counted | None) -> Figure:
    """The count that stopped, or the older one that went on."""
    if quick.exact or slow is None or exact is None or slow.number <= quick.number:
        return Figure(quick, at)
    return Figure(slow, exact.at)


def _sum(counts: Iterable[Count]) -> Count:
    number, exact = 0, True
    for count in counts:
        number, exact = number + count.number, exact and count.exact
    return Count(number, exact)


def _together(figures: Iterable[Figure], at: Millis) -> Figure:
    """Their sum, as old as the oldest of them."""
    known = list(figures)
    return Figure(_sum(one.count for one in known), min((one.at for one in known), default=at))
