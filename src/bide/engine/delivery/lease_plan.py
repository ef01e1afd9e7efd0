"""Which topics the next lease asks about, and for how many tasks of each.

**Topics.** A worker asks about a topic when its next wake has come: that of the last answer, or of a notification
since. So the cost of a lease depends on the number of topics where something is due, not on the number that the worker
handles. Because a notification may be lost, the worker also looks at each topic once a second, at many in one call.

**Turns.** All workers know of a wake, and one lease is enough for it. If the store notifies of what was taken, they ask
in turn, `TURN` apart: which one is first follows from the wake, so that they agree without a message. The others drop
the wakes that the first has taken. If it is full or gone, the next one asks.

**Slots.** `slots_to_lease` divides the free slots, so that a flood on one topic leaves room for the others (P6). Idle
topics lend their slots. The last slot of each idle topic is kept back from a flood, in total at most an eighth of all
slots: with ten topics each keeps one, with a thousand the flood still gets seven eighths. Topics with a known backlog
share the rest equally, starting with the one that runs least. The sum never exceeds the free slots.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge
from math import inf
from operator import itemgetter
from typing import Protocol
from zlib import crc32

from msgspec import Struct

from bide.core.instants import NEVER, Millis
from bide.core.records import Leased, Topic
from bide.ports import Clock

TURN: Millis = 10
"""Time for the worker before to ask, and for its message to arrive."""
_LAST_TURN = 5
_MOST_NOTED = 16
"""With so many wakes noted of a topic, no message keeps the worker from asking about it."""
MOST_LOOKS = 512
"""The most topics to look at in one call: a due topic waits for it."""
_FEW_LOOKS = 8
"""The most topics for which a look also requests tasks. Of many it reads the heads, which is cheaper."""
_AT_ONCE: Millis = 0
_FEW = 64


class Turns(Struct, eq=False):
    """Which of the live workers of a topic asks first about a wake, and which next."""

    holder: str
    _live: dict[str, frozenset[Topic]] = {}
    _places: dict[Topic, tuple[int, int]] = {}
    """The place of this worker among those of the topic, and their number."""
    taken: bool = False
    """True once the store has notified of what another worker took. Until then nobody waits."""

    def announced(self, live: Mapping[str, Collection[Topic]]) -> None:
        """Note the live workers with their topics. O(topics) for each worker that is new or has changed."""
        before, self._live = self._live, {}
        for holder, its in live.items():
            known = before.get(holder, frozenset())
            self._live[holder] = known if len(known) == len(its) else frozenset(its)
        if self._live != before:
            self._places.clear()

    def delay(self, topic: Topic, wake: Millis, behind: int = 0) -> Millis:
        """How long after a wake this worker asks about it, if it lets `behind` others go first in any case."""
        if not self.taken:
            return 0
        place = self._places.get(topic)
        if place is None:
            workers = sorted({self.holder, *(holder for holder, its in self._live.items() if topic in its)})
            place = self._places[topic] = workers.index(self.holder), len(workers)
        mine, number = place
        return TURN * min(_LAST_TURN, behind + (mine - crc32(topic.encode(), wake)) % number)


class TopicWakes:
    """When to ask about each topic next. O(log topics) for each topic that is noted or asked about."""

    def __init__(self, topics: Iterable[Topic], clock: Clock, cap: Millis, holder: str) -> None:
        """`cap`: the greatest time between two looks at a topic."""
        self.turns = Turns(holder)
        self._clock = clock
        self._cap = cap / 1000
        self._loop = asyncio.get_running_loop()
        self._wakes: dict[Topic, Millis] = {}
        self._noted: dict[Topic, list[Millis]] = {}
        """The wakes noted of each topic since it was last asked about."""
        self._by_wake: list[tuple[Millis, Topic]] = []
        """A heap. An entry counts only if it is the topic's present wake."""
        self._due: dict[Topic, None] = {}
        self._looks = OrderedDict.fromkeys(topics, -inf)
        """When to look at each topic at the latest, by the loop's time, and in its order."""
        self._again = OrderedDict[Topic, float]()
        """The same, of the topics about which the store wants to be asked earlier."""
        self._window = self._cap / 2
        """Looks that are due within this time are made together."""

    def note(self, topic: Topic, wake: Millis = _AT_ONCE, *, behind: int | None = 0) -> Millis:
        """Note that a task of the topic wakes at `wake`, or that there may be due ones. It can only bring forward.

        `behind`: see `Turns`; None: this worker is the first in any case. Returns when to ask about the topic.
        """
        if self.turns.taken:
            noted = self._noted.setdefault(topic, [])
            if len(noted) <= _MOST_NOTED:
                noted.append(wake)
        known = self._wakes.get(topic, NEVER)
        if wake < known and wake != _AT_ONCE and behind is not None:
            wake += self.turns.delay(topic, wake, behind)
        if wake >= known:
            return known
        self._wakes[topic] = wake
        heappush(self._by_wake, (wake, topic))
        if len(self._by_wake) > 2 * len(self._looks) + _FEW:  # most entries no longer count
            self._by_wake = [(wake, topic) for topic, wake in self._wakes.items() if topic not in self._due]
            heapify(self._by_wake)
        return wake

    def note_taken(self, topic: Topic, by: Millis, head: Millis, holder: str) -> None:
        """Note that `holder` has leased all of the topic that woke by then, and asks again at `head`.

        A task that was being added meanwhile may wake by then as well. The first worker in turn asks about it at once.
        """
        if holder == self.turns.holder:
            return
        if by >= NEVER:  # the store knows of each wake, and who goes first
            if self._clock.seconds_until(self._wakes.get(topic, _AT_ONCE)) > 0:
                self.drop(topic)
                self.note(topic, head)
            return
        self.turns.taken = True
        noted = self._noted.get(topic, [])
        if topic in self._due or _AT_ONCE in noted or len(noted) > _MOST_NOTED or (topic in self._wakes and not noted):
            return
        self.drop(topic)
        for wake in noted:
            if wake > by:
                self.note(topic, wake)
        if self._loop.time() + self._clock.seconds_until(head) < self._looks[topic]:  # else that look sees it
            self.note(topic, head, behind=1)

    def due(self) -> Iterator[Topic]:
        """The topics whose wake has come, in that order. They remain until `asking` or `drop` names them."""
        while self._by_wake and self._clock.seconds_until(self._by_wake[0][0]) <= 0:
            wake, topic = heappop(self._by_wake)
            if self._wakes.get(topic) == wake:
                self._due[topic] = None
        return iter(self._due)

    def take_looks(self) -> list[Topic]:
        """The topics to look at now, the longest unseen first; the time of their next look is set."""
        now = self._loop.time()
        if self.next_look() > now:
            return []
        found: dict[Topic, None] = {}
        for topic, at in merge(self._again.items(), self._looks.items(), key=itemgetter(1)):
            if at > now + self._window or len(found) == MOST_LOOKS:
                break
            found[topic] = None
        for topic in found:
            self._look_at(topic, now + self._cap)
        return list(found)

    def _look_at(self, topic: Topic, at: float) -> None:
        self._again.pop(topic, None)
        self._looks[topic] = at
        self._looks.move_to_end(topic)

    def next_look(self) -> float:
        """The time of the next look, by the loop's time; infinite without topics."""
        return min(next(iter(looks.values()), inf) for looks in (self._looks, self._again))

    def next_wake(self) -> Millis | None:
        """The next wake after those that are due; None: there is none."""
        while self._by_wake:
            wake, topic = self._by_wake[0]
            if self._wakes.get(topic) == wake and topic not in self._due:
                return wake
            heappop(self._by_wake)
        return None

    def asking(self, topics: Iterable[Topic]) -> None:
        """Note that a lease is about to be sent for these topics: it sees all that was noted so far."""
        look = self._loop.time() + self._cap
        for topic in topics:
            self.drop(topic)
            self._look_at(topic, look)

    def drop(self, topic: Topic) -> None:
        """Forget what was noted of the topic, because it is paused or has no room."""
        self._wakes.pop(topic, None)
        self._noted.pop(topic, None)
        self._due.pop(topic, None)

    def answered(self, topics: Iterable[Topic], leased: Leased) -> None:
        """Note the answer about these topics. The worker that took tasks of a topic is the first to ask again."""
        mine = {record.topic for record in leased.tasks}
        for topic, head in leased.heads.items():
            self.note(topic, head, behind=None if topic in mine else 0)
        if leased.again_by is not None:
            seconds = max(0.0, (leased.again_by - leased.now) / 1000)
            self._window = min(self._cap, seconds) / 2
            if seconds < self._cap:
                self._again |= dict.fromkeys(topics, self._loop.time() + seconds)


class TopicSlots(Protocol):
    """The slots of a topic, as in `TopicExecutor`."""

    @property
    def free(self) -> int: ...

    @property
    def occupied(self) -> int: ...

    @property
    def backlogged(self) -> bool: ...


def kept_back(slots: int, idle: int) -> int:
    """How many of all `slots` no flood gets, with this many idle topics without a backlog."""
    return min(idle, max(slots // 8, min(2, slots // 2)))


def slots_to_lease(
    due: Mapping[Topic, TopicSlots], looks: Mapping[Topic, TopicSlots], free: int, kept: int
) -> dict[Topic, int]:
    """How many tasks to request of each topic, earlier topics first; 0: no slot is left. O(topics).

    Backlogged topics share all but `kept` slots, the other due topics what is left, and then those that the worker only
    looks at, if they are few.
    """
    asked = dict.fromkeys((*due, *looks), 0)
    backlogged = sorted((topic for topic, its in due.items() if its.backlogged), key=lambda topic: due[topic].occupied)
    free -= _share(due, backlogged, free - kept, asked)
    free -= _share(due, [topic for topic, its in due.items() if not its.backlogged], free, asked)
    if len(looks) <= _FEW_LOOKS:
        _share(looks, list(looks), free, asked)
    return asked


def _share(topics: Mapping[Topic, TopicSlots], among: Sequence[Topic], count: int, asked: dict[Topic, int]) -> int:
    """Add equal parts of `count` to `asked`, as far as there is room. Returns the number added."""
    left = count
    while left > 0 and (among := [one for one in among if asked[one] < topics[one].free]):
        part = max(1, left // len(among))
        for topic in among:
            more = min(part, left, topics[topic].free - asked[topic])
            if more > 0:
                asked[topic] += more
                left -= more
    return max(0, count) - max(0, left)
