"""A history split by task: the operations on each, the range of instants for each operation, and the lost calls.

One pass, O(events). An `Op` is one change or read that took effect at one instant between its `asked` and its
`answered`. These are places in the history and not times: several events may have the same time, but their order is
known.

A task that no caller saw is a `Seen`, too, with as much of it as can be known: an unknown field is `ANY`, or a range
(earliest, latest).
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

MADE = {
    Result.CREATED: SCHEDULED,
    Result.REPLACED: SCHEDULED,
    Result.MOVED: MOVED,
    Result.CANCELLED: CANCELLED,
    Result.CANCELLED_WHILE_LEASED: CANCELLED,
    Result.REDRIVEN: REDRIVEN,
}
Lost: TypeAlias = ev.Asked | ev.Settling | ev.Extending
Question: TypeAlias = Lost | ev.Leasing


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


class TaskHistory(Struct, eq=False):
    """The part of a history that concerns one task."""

    topic: Topic
    key: str
    ops: list[Op] = []
    lost: list[tuple[int, Lost]] = []
    """Calls that may or may not have taken effect, with their places, in order of place."""
    began: list[tuple[int, ev.Began]] = []
    leases: dict[Token, Op] = {}
    left: bool = False


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
    """A history split by task and by holder. Raises ValueError for an answer without its call."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.header = ev.Header()
        self.tasks: dict[tuple[Topic, str], TaskHistory] = {}
        self.leasings: dict[Topic, list[tuple[int, ev.Leasing]]] = {}
        """Lease calls, by topic, in the order of time."""
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
        self._open: dict[int, tuple[int, Question]] = {}
        """Calls that are not answered yet, with their places, by number."""
        self._unsure: list[tuple[int, Question]] = []
        """Calls that failed and may have taken effect."""
        self._refused: list[tuple[int, Question]] = []
        """Extends that were refused. If one was sent twice, the first may have been accepted, the second refused."""
        self._lost_leasings: set[int] = set()
        self._by_topic: dict[Topic, tuple[Leasings, Leasings]] = {}
        for place, event in enumerate(events, 1):
            self.report.events = place
            if type(event) is not ev.Leased and (clock := getattr(event, "clock", None)) is not None:
                self.clocks.add(place, clock)
            _STEPS[type(event)](self, place, event)
        self._finish()

    def task(self, topic: Topic, key: str) -> TaskHistory:
        its = self.tasks.get((topic, key))
        if its is None:
            its = self.tasks[topic, key] = TaskHistory(topic, key)
        return its

    def leasings_of(self, topic: Topic) -> tuple[Leasings, Leasings]:
        """The lease calls for a topic: those that were never answered, and the others."""
        known = self._by_topic.get(topic)
        if known is None:
            of, lost = self.leasings.get(topic, []), self._lost_leasings
            known = self._by_topic[topic] = (
                Leasings([one for one in of if one[1].call in lost]),
                Leasings([one for one in of if one[1].call not in lost]),
            )
        return known

    # --- one event

    def _asked(self, place: int, event: Lost) -> None:
        self._open[event.call] = place, event
        if type(event) is ev.Asked:
            self.report.calls += 1
        elif type(event) is ev.Settling:
            self.settling.setdefault((event.topic, event.key, event.token), place)

    def _answered(self, place: int, event: ev.Answered) -> None:
        asked, ask = self._question(event, ev.Asked)
        self.report.answered += 1
        kind = MADE.get(event.result, SHOWN) if event.result is not None else SHOWN
        token = 0 if event.task is None else event.task.token
        op = Op(kind if event.task is not None else ABSENT, ask, event, asked, place, token, event.task)
        self.task(ask.topic, ask.key).ops.append(op)

    def _told(self, place: int, event: ev.Told) -> None:
        asked, ask = self._question(event, ev.Settling, ev.Extending)
        settles = type(ask) is ev.Settling
        self.report.settled += event.ok and settles
        self.report.refused += not event.ok
        if not event.ok and not settles:
            self._refused.append((asked, ask))
        kind = REFUSED if not event.ok else SETTLED if settles else EXTENDED
        self.task(ask.topic, ask.key).ops.append(Op(kind, ask, event, asked, place, ask.token, None))

    def _leasing(self, place: int, event: ev.Leasing) -> None:
        self._open[event.call] = place, event
        for topic in event.wants:
            self.leasings.setdefault(topic, []).append((place, event))

    def _leased(self, place: int, event: ev.Leased) -> None:
        asked, ask = self._question(event, ev.Leasing)
        if event.tasks:
            self.leased.append((place, ask, event))
        for given in event.tasks:
            task, since = given.task, asked
            made_at = task.token // 1000 - self.header.slack  # at the earliest, by the callers' clock
            if made_at < ask.clock:
                since = _made_since(self.leasings.get(given.topic, ()), ask.who, made_at, asked)
            its = self.task(given.topic, given.key)
            its.ops.append(Op(LEASED, ask, event, since, place, task.token, task))
            its.leases[task.token] = its.ops[-1]
            if task.wake_at != ask.until or self.header.own_clock:
                self.exact = False

    def _began(self, place: int, event: ev.Began) -> None:
        self.task(event.topic, event.key).began.append((place, event))
        self.began_at.setdefault((event.topic, event.key, event.token), place)

    def _ended(self, place: int, event: ev.Ended) -> None:
        self.ended[event.who, event.topic, event.key, event.token] = place

    def _failed(self, _: int, event: ev.Failed) -> None:
        asked, ask = self._question(event)
        if event.unknown:
            self._unsure.append((asked, ask))
        else:
            self.report.failed += 1

    def _died(self, _: int, event: ev.Died) -> None:
        self.report.deaths += 1

    def _fault(self, _: int, event: ev.Fault) -> None:
        self.report.faults += 1

    def _is_left(self, place: int, event: ev.Left) -> None:
        self.left.append((place, event))

    def _is_over(self, _: int, event: ev.End) -> None:
        self.end = event

    def _begins(self, _: int, event: ev.Header) -> None:
        self.header = event

    def _question(self, answer: ev.Answered | ev.Told | ev.Leased | ev.Failed, *kinds: type[Question]) -> Any:
        """The call that is answered, with its place."""
        asked, ask = self._open.pop(answer.call, (0, None))
        if ask is None or (kinds and type(ask) not in kinds):
            what = " or ".join(kind.__name__.lower() for kind in kinds or (ev.Asked,))
            raise ValueError(
                f"call {answer.call}, answered at {answer.at}, is not open: before {type(answer).__name__} comes one "
                f"{what!r} event with the same number, once; were all files given, and are the numbers of their calls "
                "apart?"
            )
        return asked, ask

    # --- the end

    def _finish(self) -> None:
        """Give each task its lost calls, and a final read: the version left in the store, or ABSENT if none was left.

        A task whose retention is over is answered as absent but stays in the store until the next purge. If such a task
        was absent before, no final read is added: it would prove nothing.
        """
        self._unsure += self._open.values()  # no answer came, or the caller died before it could record one
        self.report.unknown = len(self._unsure)
        for place, lost in sorted(self._unsure + self._refused, key=itemgetter(0)):
            if isinstance(lost, ev.Leasing):
                self._lost_leasings.add(lost.call)
            elif type(lost) is not ev.Asked or lost.asks is not Asks.GET:
                self.task(lost.topic, lost.key).lost.append((place, lost))
        for place, left in self.left:
            its, task = self.tasks.get((left.topic, left.key)), left.task
            if its is not None:
                its.left = True
                keep = task.keep_until
                over = not task.state.live and keep is not None and keep <= left.clock + self.header.slack
                if not (over and any(op.kind == ABSENT for op in its.ops)):
                    its.ops.append(Op(SHOWN, left, left, place, place, task.token, task))
        end, last = self.end, self.report.events
        if end is not None and end.drained:
            for its in self.tasks.values():
                if not its.left:
                    its.ops.append(Op(ABSENT, end, end, last, last, 0, None))


_STEPS: Mapping[type[Event], Callable[[Gathered, int, Any], None]] = {
    ev.Header: Gathered._begins, ev.Asked: Gathered._asked, ev.Answered: Gathered._answered,
    ev.Failed: Gathered._failed, ev.Leasing: Gathered._leasing, ev.Leased: Gathered._leased,
    ev.Extending: Gathered._asked, ev.Settling: Gathered._asked, ev.Told: Gathered._told,
    ev.Began: Gathered._began, ev.Ended: Gathered._ended, ev.Died: Gathered._died, ev.Fault: Gathered._fault,
    ev.Left: Gathered._is_left, ev.End: Gathered._is_over,
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


_WAITING, _LEASED = State.WAITING, State.LEASED
Wrong: TypeAlias = tuple[Any, ...] | None
"""A promise, a text and its values; None: all is right."""


class _Any:
    def __repr__(self) -> str:
        return "?"


ANY: Any = _Any()
_NAMES = Seen.__struct_fields__


Task: TypeAlias = Seen
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
    if type(value) is not Seen:
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
