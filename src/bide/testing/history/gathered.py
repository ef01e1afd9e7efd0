"""A history taken apart: what was done to each task, between which instants, and what may have been done unseen.

One pass, O(events). `Op` is one thing that was done, or seen, at one instant between its `asked` and its `answered`.
These are places in the history, and no times: much may happen at one time, and the order of events is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from bide.core.instants import Millis
from bide.core.records import Result, Token, Topic
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event, Seen

NEVER = 1 << 100
"""Later than any instant, or place: when a question was answered that never was."""

# What an operation is. A *write* makes a new version of the task and tells its token; a *read* shows one.
SCHEDULED, MOVED, CANCELLED, REDRIVEN, LEASED = 0, 1, 2, 3, 4
LAST_WRITE = LEASED
SHOWN = 5
"""A get, or an answer that changed nothing: the task as it was."""
ABSENT = 6
"""There was no task."""
EXTENDED, SETTLED = 7, 8
REFUSED = 9
"""An extend or settle that was told false."""

_MADE = {
    Result.CREATED: SCHEDULED,
    Result.REPLACED: SCHEDULED,
    Result.MOVED: MOVED,
    Result.CANCELLED: CANCELLED,
    Result.CANCELLED_WHILE_LEASED: CANCELLED,
    Result.REDRIVEN: REDRIVEN,
}
Lost: TypeAlias = ev.Asked | ev.Settling | ev.Extending
_get = Asks.GET
_NO_QUESTION = (0, None)


class Op:
    """One thing that was done to a task, or seen of it."""

    __slots__ = ("answer", "answered", "ask", "asked", "kind", "seen", "token")

    def __init__(
        self, kind: int, ask: Event, answer: Event, asked: int, answered: int, token: Token, seen: Seen | None
    ) -> None:
        self.kind = kind
        self.ask = ask
        self.answer = answer
        self.asked = asked
        self.answered = answered
        self.token = token
        """Of the version that it made or showed; of an extend or settle, that which it named; 0: none."""
        self.seen = seen


class Told:
    """All that is told of one task."""

    __slots__ = ("began", "key", "leases", "left", "lost", "ops", "topic")

    def __init__(self, topic: Topic, key: str) -> None:
        self.topic = topic
        self.key = key
        self.ops: list[Op] = []
        self.lost: list[tuple[int, Lost]] = []
        """Questions of which nobody knows whether they were done, with their places, in that order."""
        self.began: list[tuple[int, ev.Began]] = []
        self.leases: dict[Token, Op] = {}
        self.left = False


class Leasings:
    """Who asked to lease tasks of one topic, with the places of the questions, by when the leases would end."""

    __slots__ = ("by_until", "in_order")

    def __init__(self, those: list[tuple[int, ev.Leasing]]) -> None:
        self.in_order = sorted(those, key=_until)
        self.by_until: dict[Millis, list[tuple[int, ev.Leasing]]] = {}
        for one in self.in_order:
            self.by_until.setdefault(one[1].until, []).append(one)


class Clocks:
    """The store's clock as it was told, in the order of events: for the few questions that need more than one event."""

    __slots__ = ("_highest", "_places", "clocks", "fallback")

    def __init__(self, places: list[int], clocks: list[Millis]) -> None:
        self._places = places
        self.clocks = clocks
        self._highest: list[Millis] = []
        highest, fallback = 0, 0
        for clock in clocks:
            if clock > highest:
                highest = clock
            elif highest - clock > fallback:
                fallback = highest - clock
        self.fallback: Millis = fallback
        """How far it ever went back."""

    def highest(self, place: int) -> Millis:
        """The latest time that it had shown until that place in the history."""
        if not self._highest:
            highest = 0
            for clock in self.clocks:
                highest = max(highest, clock)
                self._highest.append(highest)
        count = bisect_right(self._places, place)
        return self._highest[count - 1] if count else 0


class Gathered:
    """A history, by task and by holder."""

    def __init__(self) -> None:
        self.header = ev.Header()
        self.tasks: dict[tuple[Topic, str], Told] = {}
        self.leasings: dict[Topic, list[tuple[int, ev.Leasing]]] = {}
        """Who asked to lease, by topic, in the order of time."""
        self.lost_leasings: set[int] = set()
        """The calls of those that were never answered."""
        self._by_topic: dict[Topic, tuple[Leasings, Leasings]] = {}
        self.leased: list[tuple[int, ev.Leasing, ev.Leased]] = []
        """Leases that gave something, with their place in the history."""
        self.ended: dict[tuple[str, Topic, str, Token], int] = {}
        self.began_at: dict[tuple[Topic, str, Token], int] = {}
        """The place in the history at which each delivery began, and ended."""
        self.settling: dict[tuple[Topic, str, Token], int] = {}
        """And at which its outcome was first told."""
        self.left: list[tuple[int, ev.Left]] = []
        self.end: ev.End | None = None
        self.clocks = Clocks([], [])
        self.exact = True
        """Whether leases end when their holders ask them to: stores with a clock of their own count from that."""
        self.unknown = self.events = self.calls = self.answered = self.failed = self.deaths = self.faults = 0
        self.settled = self.refused = 0

    def leasings_of(self, topic: Topic) -> tuple[Leasings, Leasings]:
        """Who asked for tasks of a topic: those that were never answered, and the others."""
        known = self._by_topic.get(topic)
        if known is None:
            lost: list[tuple[int, ev.Leasing]] = []
            answered: list[tuple[int, ev.Leasing]] = []
            for one in self.leasings.get(topic, ()):
                (lost if one[1].call in self.lost_leasings else answered).append(one)
            known = self._by_topic[topic] = Leasings(lost), Leasings(answered)
        return known


def _made_since(asked: Sequence[tuple[int, ev.Leasing]], who: str, clock: Millis, place: int) -> int:
    """The place of the question, before the one at `place`, that a lease made at that time was the answer to.

    A store of several servers does not wait long for one of them; what that one leased all the same comes with the
    answer to a later question of the same holder. A lease's token is the store's clock, so it tells when it was made.
    O(the questions since then).
    """
    for number, one in reversed(asked):
        if one.who == who:
            place = min(place, number)
            if one.clock <= clock:
                break
    return place


def gather(events: Iterable[Event]) -> Gathered:
    """Take a history apart."""
    got = Gathered()
    tasks, leasings = got.tasks, got.leasings
    asked: dict[int, tuple[int, Lost | ev.Leasing]] = {}
    unsure: list[tuple[int, Lost | ev.Leasing]] = []
    maybe: list[tuple[int, Lost | ev.Leasing]] = []
    places: list[int] = []
    clocks: list[Millis] = []
    made, number = _MADE.get, 0

    def told(topic: Topic, key: str) -> Told:
        its = tasks.get((topic, key))
        if its is None:
            its = tasks[topic, key] = Told(topic, key)
        return its

    for number, event in enumerate(events, 1):
        if type(event) is ev.Asked or type(event) is ev.Settling or type(event) is ev.Extending:
            asked[event.call] = number, event
            places.append(number)
            clocks.append(event.clock)
            if type(event) is ev.Asked:
                got.calls += 1
            elif type(event) is ev.Settling:
                got.settling.setdefault((event.topic, event.key, event.token), number)
        elif type(event) is ev.Answered:
            place, ask = asked.pop(event.call, _NO_QUESTION)
            if type(ask) is not ev.Asked:
                raise _unasked(event, "asked")
            got.answered += 1
            places.append(number)
            clocks.append(event.clock)
            seen = event.task
            if seen is None:
                op = Op(ABSENT, ask, event, place, number, 0, None)
            else:
                write = made(event.result, SHOWN) if event.result is not None else SHOWN
                op = Op(write, ask, event, place, number, seen.token, seen)
            told(ask.topic, ask.key).ops.append(op)
        elif type(event) is ev.Told:
            place, ask = asked.pop(event.call, _NO_QUESTION)
            places.append(number)
            clocks.append(event.clock)
            if type(ask) is ev.Settling:
                what = SETTLED if event.ok else REFUSED
            elif type(ask) is ev.Extending:
                what = EXTENDED if event.ok else REFUSED
                if not event.ok:  # the answer of a second sending, by which the lease had ended, may hide a first
                    maybe.append((place, ask))
            else:
                raise _unasked(event, "settling or extending")
            if what == SETTLED:
                got.settled += 1
            elif what == REFUSED:
                got.refused += 1
            told(ask.topic, ask.key).ops.append(Op(what, ask, event, place, number, ask.token, None))
        elif type(event) is ev.Leasing:
            asked[event.call] = number, event
            places.append(number)
            clocks.append(event.clock)
            for topic in event.wants:
                those = leasings.get(topic)
                if those is None:
                    leasings[topic] = [(number, event)]
                else:
                    those.append((number, event))
        elif type(event) is ev.Leased:
            place, ask = asked.pop(event.call, _NO_QUESTION)
            if type(ask) is not ev.Leasing:
                raise _unasked(event, "leasing")
            if event.tasks:
                got.leased.append((number, ask, event))
                for held in event.tasks:
                    task = held.task
                    its = told(held.topic, held.key)
                    since = place
                    made_at = task.token // 1000 - got.header.slack  # at the earliest, by the clock of the questions
                    if made_at < ask.clock:
                        since = _made_since(leasings.get(held.topic, ()), ask.who, made_at, place)
                    op = Op(LEASED, ask, event, since, number, task.token, task)
                    its.ops.append(op)
                    its.leases[task.token] = op
                    if task.wake_at != ask.until or got.header.own_clock:
                        got.exact = False
        elif type(event) is ev.Began:
            told(event.topic, event.key).began.append((number, event))
            got.began_at.setdefault((event.topic, event.key, event.token), number)
            places.append(number)
            clocks.append(event.clock)
        elif type(event) is ev.Ended:
            got.ended[event.who, event.topic, event.key, event.token] = number
        elif type(event) is ev.Failed:
            place, ask = asked.pop(event.call, _NO_QUESTION)
            if ask is None:
                raise _unasked(event, "asked")
            if event.unknown:
                unsure.append((place, ask))
            else:
                got.failed += 1
        elif type(event) is ev.Died:
            got.deaths += 1
        elif type(event) is ev.Fault:
            got.faults += 1
            if event.clock is not None:
                places.append(number)
                clocks.append(event.clock)
        elif type(event) is ev.Left:
            got.left.append((number, event))
            places.append(number)
            clocks.append(event.clock)
        elif type(event) is ev.End:
            got.end = event
            places.append(number)
            clocks.append(event.clock)
        elif type(event) is ev.Header:
            got.header = event
    got.events = number
    got.clocks = Clocks(places, clocks)
    unsure += asked.values()  # nobody answered, or it died before it could say so
    got.unknown = len(unsure)
    for place, lost in sorted(unsure + maybe, key=_place):
        if isinstance(lost, ev.Leasing):
            got.lost_leasings.add(lost.call)
        elif type(lost) is not ev.Asked or lost.asks is not _get:
            told(lost.topic, lost.key).lost.append((place, lost))
    _end(got)
    return got


def _end(got: Gathered) -> None:
    """What was left is a last look at each task; where nothing was left, at nothing.

    A task that is kept no longer is answered as absent, and lies in the store until the next purge: of one that was
    absent before, such a last look says nothing.
    """
    end = got.end
    for place, left in got.left:
        its = got.tasks.get((left.topic, left.key))
        if its is not None:
            its.left = True
            keep = left.task.keep_until
            over = not left.task.state.live and keep is not None and keep <= left.clock + got.header.slack
            if not (over and any(op.kind == ABSENT for op in its.ops)):
                its.ops.append(Op(SHOWN, left, left, place, place, left.task.token, left.task))
    if end is not None and end.drained:
        for its in got.tasks.values():
            if not its.left:
                its.ops.append(Op(ABSENT, end, end, got.events, got.events, 0, None))


def _place(placed: tuple[int, Lost | ev.Leasing]) -> int:
    return placed[0]


def _until(placed: tuple[int, ev.Leasing]) -> Millis:
    return placed[1].until


def _unasked(event: ev.Answered | ev.Told | ev.Leased | ev.Failed, what: str) -> ValueError:
    return ValueError(
        f"call {event.call}, answered at {event.at}, is not open: before {type(event).__name__} comes one {what!r} "
        "event with the same number, once; were all files given, and are the numbers of their calls apart?"
    )
