"""Which topics the next lease asks about, and for how many tasks of each.

**Topics.** A worker asks about a topic when its next wake has come: that of the last answer, or of a notification
since. So the cost of a lease depends on the number of topics where something is due, not on the number that the worker
handles. Because a notification may be lost, the worker also looks at each topic once a second, at many in one call.

**Slots.** `slots_to_lease` divides the free slots, so that a flood on one topic leaves room for the others (P6). Idle
topics lend their slots. The last slot of each idle topic is kept back from a flood, in total at most an eighth of all
slots: with ten topics each keeps one, with a thousand the flood still gets seven eighths. Topics with a known backlog
share the rest equally, starting with the one that runs least. The sum never exceeds the free slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Protocol

from bide.core.instants import NEVER, Millis
from bide.core.records import Leased, Topic
from bide.ports import Clock

MOST_LOOKS = 256
"""The most topics to look at in one call: a due topic waits for it."""
_FEW_LOOKS = 8
"""The most topics for which a look also requests tasks. Of many it reads the heads, which is cheaper."""
_AT_ONCE: Millis = 0
_FEW = 64


class TopicWakes:
    """When to ask about each topic next. O(log topics) for each topic that is noted or asked about."""

    def __init__(self, topics: Iterable[Topic], clock: Clock, cap: Millis) -> None:
        """`cap`: the greatest time between two looks at a topic."""
        self._clock = clock
        self._cap = cap / 1000
        self._loop = asyncio.get_running_loop()
        self._wakes: dict[Topic, Millis] = {}
        self._by_wake: list[tuple[Millis, Topic]] = []
        """A heap. An entry counts only if it is the topic's present wake."""
        self._due: dict[Topic, None] = {}
        self._looks = dict.fromkeys(topics, -inf)
        """When to look at the latest, by the loop's time."""
        self._entries = dict(self._looks)
        """The time of the entry that counts for each topic in the heap of looks, not later than its look."""
        self._by_look = [(-inf, topic) for topic in self._looks]
        heapify(self._by_look)
        self._window = self._cap / 2
        """Looks that are due within this time are made together."""
        self._first_pause = min(self._cap, self._cap * MOST_LOOKS / max(1, len(self._looks)))
        """From a topic's first look to its second. The first looks are made at once, and the later ones spread."""

    def note(self, topic: Topic, wake: Millis = _AT_ONCE) -> None:
        """Note that a task of the topic wakes at `wake`, or that there may be due ones. It can only bring forward."""
        if wake < self._wakes.get(topic, NEVER):
            self._wakes[topic] = wake
            heappush(self._by_wake, (wake, topic))
            if len(self._by_wake) > 2 * len(self._looks) + _FEW:  # most entries no longer count
                self._by_wake = [(wake, topic) for topic, wake in self._wakes.items() if topic not in self._due]
                heapify(self._by_wake)

    def due(self) -> Iterator[Topic]:
        """The topics whose wake has come, in that order. They remain until `asking` or `drop` names them."""
        while self._by_wake and self._clock.seconds_until(self._by_wake[0][0]) <= 0:
            wake, topic = heappop(self._by_wake)
            if self._wakes.get(topic) == wake:
                self._due[topic] = None
        return iter(self._due)

    def take_looks(self) -> list[Topic]:
        """The topics to look at now, the longest unseen first; the time of their next look is set."""
        found: list[Topic] = []
        now = self._loop.time()
        if self.next_look() <= now:
            while self.next_look() <= now + self._window and len(found) < MOST_LOOKS:
                at, topic = self._by_look[0]
                found.append(topic)
                self._looks[topic] = now + (self._cap if at > -inf else self._first_pause)
            if len(found) == MOST_LOOKS:
                self._first_pause = min(self._cap, self._first_pause + self._cap * MOST_LOOKS / len(self._looks))
        return found

    def next_look(self) -> float:
        """The time of the next look, by the loop's time; infinite without topics."""
        while self._by_look:
            at, topic = self._by_look[0]
            if at != self._entries[topic]:
                heappop(self._by_look)
            elif at < self._looks[topic]:  # the topic has been asked about since
                self._entries[topic] = self._looks[topic]
                heapreplace(self._by_look, (self._looks[topic], topic))
            else:
                return at
        return inf

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
            if (
                self._looks[topic] < look - self._cap / 16
            ):  # else it was just set, and each change costs a step in the heap
                self._looks[topic] = look

    def drop(self, topic: Topic) -> None:
        """Forget what was noted of the topic, because it is paused or has no room."""
        self._wakes.pop(topic, None)
        self._due.pop(topic, None)

    def answered(self, topics: Iterable[Topic], leased: Leased) -> None:
        """Note the answer about these topics."""
        for topic, head in leased.heads.items():
            self.note(topic, head)
        if leased.again_by is not None:
            seconds = max(0.0, (leased.again_by - leased.now) / 1000)
            self._window, look = min(self._cap, seconds) / 2, self._loop.time() + seconds
            for topic in topics if seconds < self._cap else ():
                self._looks[topic] = min(look, self._looks[topic])
                if self._looks[topic] < self._entries[topic]:
                    self._entries[topic] = self._looks[topic]
                    heappush(self._by_look, (self._looks[topic], topic))


class TopicSlots(Protocol):
    """The slots of a topic, as in `TopicExecutor`."""

    @property
    def free(self) -> int:
        """How many more deliveries of it could run."""
        ...

    @property
    def occupied(self) -> int: ...

    @property
    def backlogged(self) -> bool:
        """True if there may be due tasks for which there was no room."""
        ...


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
