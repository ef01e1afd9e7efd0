"""A history split by task: the operations on each, the range of instants for each operation, and the lost calls.

One pass, O(events). An `Op` is one change or read that took effect at one instant between its `asked` and its
`answered`. These are places in the history and not times: several events may have the same time, but their order is
known.

A task that the store showed to a caller is a `Seen`. A task that no caller saw is an `Unsure`, with as much of it as
can be known: an unknown field is `ANY`, or a range (earliest, latest).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Result, State, Token, Topic
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event, Seen
from bide.testing.history.report import Report

NEVER = 1 << 100
"""Later than any instant or place: stands for the answer to a call that was never answered."""

# Kinds of operations. A *write* makes a new version of the task and reports its token; a *read* shows a version.
SCHEDULED, MOVED, CANCELLED, REDRIVEN, LEASED = 0, 1, 2, 3, 4
LAST_WRITE = LEASED
SHOWN = 5
"""A get, or an answer that changed nothing: the task as it was."""
ABSENT = 6
"""There was no task."""
EXTENDED, SETTLED = 7, 8
REFUSED = 9
"""An extend or settle that was answered with false."""

_MADE = {
    Result.CREATED: SCHEDULED,
    Result.REPLACED: SCHEDULED,
    Result.MOVED: MOVED,
    Result.CANCELLED: CANCELLED,
    Result.CANCELLED_WHILE_LEASED: CANCELLED,
    Result.REDRIVEN: REDRIVEN,
}
Lost: TypeAlias = ev.Asked | ev.Settling | ev.Extending
Question: TypeAlias = Lost | ev.Leasing
_NO_QUESTION = (0, None)


class Op(Struct, eq=False, gc=False):
    """One change or read of a task."""

    kind: int
    ask: Event
    answer: Event
    asked: int
    answered: int
    token: Token
    """The token of the version that it made or showed; for an extend or settle, the token it named; 0: none."""
    seen: Seen | None


class TaskHistory:
    """The part of a history that concerns one task."""

    __slots__ = ("began", "key", "leases", "left", "lost", "ops", "topic")

    def __init__(self, topic: Topic, key: str) -> None:
        self.topic = topic
        self.key = key
        self.ops: list[Op] = []
        self.lost: list[tuple[int, Lost]] = []
        """Calls that may or may not have taken effect, with their places, in order of place."""
        self.began: list[tuple[int, ev.Began]] = []
        self.leases: dict[Token, Op] = {}
        self.left = False


class Leasings:
    """Lease calls for one topic, with their places, ordered by the end of the leases asked for."""

    def __init__(self, those: list[tuple[int, ev.Leasing]]) -> None:
        self.in_order = sorted(those, key=lambda one: one[1].until)
        self.by_until: dict[Millis, list[tuple[int, ev.Leasing]]] = {}
        for one in self.in_order:
            self.by_until.setdefault(one[1].until, []).append(one)


class Clocks:
    """The recorded times of the store's clock, in the order of events, for rules that need more than one event."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._highest: list[Millis] = []
        """For each place, the latest time recorded up to it."""
        self.fallback: Millis = 0
        """The most that the clock ever went back."""

    def add(self, place: int, clock: Millis) -> None:
        highest = self._highest[-1] if self._highest else 0
        if clock > highest:
            highest = clock
        elif highest - clock > self.fallback:
            self.fallback = highest - clock
        self._places.append(place)
        self._highest.append(highest)

    def highest(self, place: int) -> Millis:
        """The latest time recorded up to that place in the history."""
        count = bisect_right(self._places, place)
        return self._highest[count - 1] if count else 0


class Gathered:
    """A history split by task and by holder."""

    def __init__(self) -> None:
        self.header = ev.Header()
        self.tasks: dict[tuple[Topic, str], TaskHistory] = {}
        self.leasings: dict[Topic, list[tuple[int, ev.Leasing]]] = {}
        """Lease calls, by topic, in the order of time."""
        self.lost_leasings: set[int] = set()
        """The numbers of the lease calls that were never answered."""
        self._by_topic: dict[Topic, tuple[Leasings, Leasings]] = {}
        self.leased: list[tuple[int, ev.Leasing, ev.Leased]] = []
        """Lease calls whose answer held a task, with their place in the history."""
        self.ended: dict[tuple[str, Topic, str, Token], int] = {}
        self.began_at: dict[tuple[Topic, str, Token], int] = {}
        """The place in the history at which each delivery began; `ended`, at which it ended."""
        self.settling: dict[tuple[Topic, str, Token], int] = {}
        """The place at which each delivery's outcome was first sent to the store."""
        self.left: list[tuple[int, ev.Left]] = []
        self.end: ev.End | None = None
        self.clocks = Clocks()
        self.exact = True
        """True if leases end exactly when their holders ask; a store with a clock of its own counts from that clock."""
        self.report = Report()
        """With the counts of the events."""

    def leasings_of(self, topic: Topic) -> tuple[Leasings, Leasings]:
        """The lease calls for a topic: those that were never answered, and the others."""
        known = self._by_topic.get(topic)
        if known is None:
            lost: list[tuple[int, ev.Leasing]] = []
            answered: list[tuple[int, ev.Leasing]] = []
            for one in self.leasings.get(topic, ()):
                (lost if one[1].call in self.lost_leasings else answered).append(one)
            known = self._by_topic[topic] = Leasings(lost), Leasings(answered)
        return known


def gather(events: Iterable[Event]) -> Gathered:
    """Split a history by task. Raises ValueError for an answer without its call."""
    gathering = _Gathering()
    number = 0
    for number, event in enumerate(events, 1):
        _STEPS[type(event)](gathering, number, event)
    return gathering.end(number)


class _Gathering:
    """The pass over a history. Each step takes an event and its place."""

    def __init__(self) -> None:
        self._got = Gathered()
        self._open: dict[int, tuple[int, Question]] = {}
        """Calls that are not answered yet, with their places, by number."""
        self._unsure: list[tuple[int, Question]] = []
        """Calls that failed and may have taken effect."""
        self._maybe: list[tuple[int, Question]] = []
        """Extends that were refused and may have taken effect before."""

    def asked(self, place: int, event: ev.Asked | ev.Settling | ev.Extending) -> None:
        self._open[event.call] = place, event
        self._got.clocks.add(place, event.clock)
        if type(event) is ev.Asked:
            self._got.report.calls += 1
        elif type(event) is ev.Settling:
            self._got.settling.setdefault((event.topic, event.key, event.token), place)

    def answered(self, place: int, event: ev.Answered) -> None:
        asked, ask = self._open.pop(event.call, _NO_QUESTION)
        if type(ask) is not ev.Asked:
            raise _unasked(event, "asked")
        self._got.report.answered += 1
        self._got.clocks.add(place, event.clock)
        seen = event.task
        if seen is None:
            op = Op(ABSENT, ask, event, asked, place, 0, None)
        else:
            kind = _MADE.get(event.result, SHOWN) if event.result is not None else SHOWN
            op = Op(kind, ask, event, asked, place, seen.token, seen)
        self._task(ask.topic, ask.key).ops.append(op)

    def told(self, place: int, event: ev.Told) -> None:
        asked, ask = self._open.pop(event.call, _NO_QUESTION)
        self._got.clocks.add(place, event.clock)
        if type(ask) is not ev.Settling and type(ask) is not ev.Extending:
            raise _unasked(event, "settling or extending")
        if not event.ok:
            kind = REFUSED
            self._got.report.refused += 1
            if type(ask) is ev.Extending:  # if it was sent twice, the first may have been accepted, the second refused
                self._maybe.append((asked, ask))
        elif type(ask) is ev.Settling:
            kind = SETTLED
            self._got.report.settled += 1
        else:
            kind = EXTENDED
        self._task(ask.topic, ask.key).ops.append(Op(kind, ask, event, asked, place, ask.token, None))

    def leasing(self, place: int, event: ev.Leasing) -> None:
        self._open[event.call] = place, event
        self._got.clocks.add(place, event.clock)
        for topic in event.wants:
            self._got.leasings.setdefault(topic, []).append((place, event))

    def leased(self, place: int, event: ev.Leased) -> None:
        asked, ask = self._open.pop(event.call, _NO_QUESTION)
        if type(ask) is not ev.Leasing:
            raise _unasked(event, "leasing")
        if not event.tasks:
            return
        got = self._got
        got.leased.append((place, ask, event))
        for held in event.tasks:
            task = held.task
            since = asked
            made_at = task.token // 1000 - got.header.slack  # at the earliest, by the callers' clock
            if made_at < ask.clock:
                since = _made_since(got.leasings.get(held.topic, ()), ask.who, made_at, asked)
            op = Op(LEASED, ask, event, since, place, task.token, task)
            its = self._task(held.topic, held.key)
            its.ops.append(op)
            its.leases[task.token] = op
            if task.wake_at != ask.until or got.header.own_clock:
                got.exact = False

    def began(self, place: int, event: ev.Began) -> None:
        self._task(event.topic, event.key).began.append((place, event))
        self._got.began_at.setdefault((event.topic, event.key, event.token), place)
        self._got.clocks.add(place, event.clock)

    def ended(self, place: int, event: ev.Ended) -> None:
        self._got.ended[event.who, event.topic, event.key, event.token] = place

    def failed(self, _: int, event: ev.Failed) -> None:
        asked, ask = self._open.pop(event.call, _NO_QUESTION)
        if ask is None:
            raise _unasked(event, "asked")
        if event.unknown:
            self._unsure.append((asked, ask))
        else:
            self._got.report.failed += 1

    def died(self, _: int, event: ev.Died) -> None:
        self._got.report.deaths += 1

    def fault(self, place: int, event: ev.Fault) -> None:
        self._got.report.faults += 1
        if event.clock is not None:
            self._got.clocks.add(place, event.clock)

    def left(self, place: int, event: ev.Left) -> None:
        self._got.left.append((place, event))
        self._got.clocks.add(place, event.clock)

    def ending(self, place: int, event: ev.End) -> None:
        self._got.end = event
        self._got.clocks.add(place, event.clock)

    def header(self, _: int, event: ev.Header) -> None:
        self._got.header = event

    def end(self, events: int) -> Gathered:
        """Finish a history of this many events."""
        got = self._got
        got.report.events = events
        self._unsure += self._open.values()  # no answer came, or the caller died before it could record one
        got.report.unknown = len(self._unsure)
        for place, lost in sorted(self._unsure + self._maybe, key=itemgetter(0)):
            if isinstance(lost, ev.Leasing):
                got.lost_leasings.add(lost.call)
            elif type(lost) is not ev.Asked or lost.asks is not Asks.GET:
                self._task(lost.topic, lost.key).lost.append((place, lost))
        _end(got)
        return got

    def _task(self, topic: Topic, key: str) -> TaskHistory:
        its = self._got.tasks.get((topic, key))
        if its is None:
            its = self._got.tasks[topic, key] = TaskHistory(topic, key)
        return its


_STEPS: Mapping[type[Event], Callable[[_Gathering, int, Any], None]] = {
    ev.Header: _Gathering.header, ev.Asked: _Gathering.asked, ev.Answered: _Gathering.answered,
    ev.Failed: _Gathering.failed, ev.Leasing: _Gathering.leasing, ev.Leased: _Gathering.leased,
    ev.Extending: _Gathering.asked, ev.Settling: _Gathering.asked, ev.Told: _Gathering.told,
    ev.Began: _Gathering.began, ev.Ended: _Gathering.ended, ev.Died: _Gathering.died, ev.Fault: _Gathering.fault,
    ev.Left: _Gathering.left, ev.End: _Gathering.ending,
}  # fmt: skip


def _made_since(asked: Sequence[tuple[int, ev.Leasing]], who: str, clock: Millis, place: int) -> int:
    """The place of the lease call, at or before `place`, that caused a lease made at time `clock`.

    A store of several servers does not wait long for one of them. Tasks that this server leased nevertheless come with
    the answer to a later call of the same holder. A lease's token is the store's clock, so it shows when the lease was
    made. O(calls since then).
    """
    for number, one in reversed(asked):
        if one.who == who:
            place = min(place, number)
            if one.clock <= clock:
                break
    return place


def _end(got: Gathered) -> None:
    """Add a final read of each task: the version left in the store, or ABSENT if none was left.

    A task whose retention is over is answered as absent but stays in the store until the next purge. If such a task was
    absent before, no final read is added: it would prove nothing.
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
                its.ops.append(Op(ABSENT, end, end, got.report.events, got.report.events, 0, None))


def _unasked(event: ev.Answered | ev.Told | ev.Leased | ev.Failed, what: str) -> ValueError:
    return ValueError(
        f"call {event.call}, answered at {event.at}, is not open: before {type(event).__name__} comes one {what!r} "
        "event with the same number, once; were all files given, and are the numbers of their calls apart?"
    )


_WAITING, _LEASED = State.WAITING, State.LEASED
Wrong: TypeAlias = tuple[Any, ...] | None
"""A promise, a text and its values; None: all is right."""


class _Any:
    def __repr__(self) -> str:
        return "?"


ANY: Any = _Any()
_NAMES = Seen.__struct_fields__


class Unsure:
    """A task as it must be, as far as it can be known, with the fields of `Seen`."""

    __slots__ = _NAMES

    id: Any
    state: State
    due_at: Any
    wake_at: Any
    planned_at: Any
    attempt: Any
    failures: Any
    losses: Any
    token: Any
    created_at: Any
    group: Any
    deadline: Any
    finished_at: Any
    keep_until: Any
    error: Any

    def __init__(self, old: Task, **changed: Any) -> None:
        for name in _NAMES:
            setattr(self, name, changed[name] if name in changed else getattr(old, name))

    @property
    def known(self) -> tuple[Any, ...]:
        """All fields, which distinguish it from another."""
        return tuple(getattr(self, name) for name in _NAMES)


Task: TypeAlias = Seen | Unsure
NOBODY = Seen("", _WAITING, 0, 0, 0, 0, 0, 0, 0, 0)


def same(known: Any, told: Any) -> bool:
    """True if a field may have the reported value."""
    if known == told or known is ANY:
        return True
    return type(known) is tuple and told is not None and bool(known[0] <= told <= known[1])


def earliest(known: Any) -> Millis:
    """The earliest value that a time may have."""
    least: Millis = 0 if known is ANY or known is None else known[0] if type(known) is tuple else known
    return least


def latest(known: Any) -> Millis:
    most: Millis = NEVER if known is ANY else 0 if known is None else known[1] if type(known) is tuple else known
    return most


def sentence(wrong: tuple[Any, ...]) -> str:
    """Format the violation as a sentence."""
    text: str = wrong[1] % tuple(map(_shown, wrong[2:]))
    return text


def _shown(value: Any) -> Any:
    if type(value) is tuple:
        return f"{value[0]} or later" if value[1] >= NEVER else f"{value[0]} to {value[1]}"
    if type(value) is not Seen and type(value) is not Unsure:
        return value
    if value is NOBODY:
        return "there was no task: never, or ended and forgotten"
    if value.state in (_WAITING, _LEASED):
        return f"the task was {value.state}, with token {value.token}, to wake at {_shown(value.wake_at)}"
    return f"the task had ended: {value.state} at {_shown(value.finished_at)}, with token {value.token}"


def differs(task: Task, seen: Seen) -> str | None:
    """The first field of `seen` that the task cannot have; None: it can be this version. O(1)."""
    if task is seen or task == seen:
        return None
    for name in _NAMES:
        if not same(getattr(task, name), getattr(seen, name)):
            return name
    return None
