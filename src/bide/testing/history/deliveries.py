"""The rules of deliveries that go beyond the lifecycle: one per lease, on time, not after a cancel, not too many.

P7, *a worker holds only what it runs*, is derived from the worker's own calls. A worker asks for as many tasks as it
has room for, and starts with none. So over all topics together it never holds more at once than the sum, over topics,
of the most that it ever asked for. If `Header.room` is set, that is the bound instead. A delivery counts from the
answer that leased it to the handler's last line, or if that is not recorded, to its settle. A task that is returned
without a delivery does not count. No answer may hold more tasks than were asked for. P7 does not apply to holders that
ask for more while they wait for the tasks they hold (a consumer without a worker).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TypeAlias

from bide.core.instants import Millis
from bide.core.records import OutcomeKind, Result, Topic
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide.testing.history.gathered import CANCELLED, LAST_WRITE, SETTLED, Gathered, Op, TaskHistory
from bide.testing.history.report import Violation

_LEASE_LOST, _DEADLINE = "holder lost", "deadline"
Found: TypeAlias = tuple[str, str, list[Event]]
"""A broken promise, the sentence and the events that show it."""
Begun: TypeAlias = dict[int, tuple[int, ev.Began]]
"""Deliveries with their places in the history, by the token of their lease."""


class Deliveries:
    """The rules of deliveries, over a whole history."""

    def __init__(self, got: Gathered) -> None:
        self.got = got
        self.slack = got.header.slack

    def wrong(self, history: TaskHistory) -> Iterator[Violation]:
        """The violations among the deliveries of one task."""
        for promise, what, events in self._found(history):
            yield Violation(promise, history.topic, history.key, what, sorted(events, key=attrgetter("at")))

    def _found(self, history: TaskHistory) -> Iterator[Found]:
        cancels = {
            op.seen.id: op
            for op in history.ops
            if op.kind == CANCELLED and op.seen is not None and op.answer.result is Result.CANCELLED  # type: ignore[union-attr]
        }
        """By the id of a life, the cancel that found it waiting."""
        began: Begun = {}
        for place, one in history.began:
            lease = history.leases.get(one.token)
            if lease is None:
                yield "P3", f"a delivery began with token {one.token}, which no lease gave", [one]
                continue
            if one.token in began:
                yield "P3", f"two deliveries of the lease with token {one.token}", [began[one.token][1], one]
                continue
            began[one.token] = place, one
            yield from self._begun(one, lease)
            # a life that was replaced while leased is no longer the task that is cancelled: its delivery is under way,
            # even if the handler has not begun, and its settle is refused
            cancel = cancels.get(one.id)
            if cancel is not None and cancel.token > one.token and cancel.answered < place:
                after = (one.at - cancel.answer.at) / 1e6
                what = (
                    f"a delivery with token {one.token} began {after:.3f} ms after the answer `cancelled`, which has "
                    f"token {cancel.token}"
                )
                yield "P4", what, [lease.ask, lease.answer, cancel.ask, cancel.answer, one]
        for settle in history.ops:
            if settle.kind == SETTLED:
                yield from self._unbegun(history, settle, began)

    def _begun(self, one: ev.Began, lease: Op) -> Iterator[Found]:
        """A delivery that is not as it was leased, or early."""
        seen, ask, answer = lease.seen, lease.ask, lease.answer
        assert seen is not None
        assert type(ask) is ev.Leasing
        assert type(answer) is ev.Leased
        for name, promise in (("id", "P12"), ("attempt", "P12"), ("planned_at", "P1")):
            is_told, given = getattr(one, name), getattr(seen, name)
            if is_told != given:
                what = f"delivered with {name} {is_told}, but its lease, with token {one.token}, has {given}"
                yield promise, what, [ask, answer, one]
        # not early if the lease was on time and the clock went back since; after a lost lease, its end counts
        went_back = ask.clock + (one.at - ask.at) * 99 // 100_000_000 - one.clock
        on_time = answer.clock >= seen.planned_at and went_back > self.slack + 5
        if one.clock + self.slack < seen.planned_at and not seen.losses and not on_time:
            what = (
                f"a delivery with token {one.token} began at {one.clock}, {seen.planned_at - one.clock} ms before its "
                f"wake at {seen.planned_at}"
            )
            yield "P1", what, [ask, answer, one]

    def _unbegun(self, history: TaskHistory, settle: Op, began: Begun) -> Iterator[Found]:
        """A task that ended as done or dead and never ran."""
        ask, answer, delivery, lease = (
            settle.ask,
            settle.answer,
            began.get(settle.token),
            history.leases.get(settle.token),
        )
        assert type(ask) is ev.Settling
        if ask.verdict is OutcomeKind.DONE:
            what = f"the lease with token {ask.token} was settled as done"
            if delivery is None:
                yield "P2", f"{what}, and no delivery of it ever began", [ask, answer]
            elif delivery[0] > settle.asked:
                yield "P2", f"{what} before its delivery began", [ask, answer, delivery[1]]
        if ask.verdict is not OutcomeKind.DEAD or delivery is not None or lease is None or lease.seen is None:
            return
        seen, error, most = lease.seen, ask.error or "", self.got.header.losses
        latest = (max(ask.clock, answer.clock) if type(answer) is ev.Told else ask.clock) + self.slack
        if any(one.id == seen.id for _, one in began.values()):
            return
        if error.startswith(_DEADLINE):
            right = seen.deadline is not None and latest > seen.deadline
            what = f"dead by its deadline, {seen.deadline}, at {ask.clock}"
        elif error.startswith(_LEASE_LOST):
            right, what = seen.losses >= most, f"dead after {seen.losses} lost leases, of {most} that are allowed"
        else:
            right, what = False, f"dead, with the error {ask.error!r}"
        if not right:
            yield "P2", f"{what}, and it never ran", [lease.ask, lease.answer, ask, answer]

    # --- over all tasks

    def twice(self) -> Iterator[Violation]:
        """Find ids that two tasks share."""
        owners: dict[str, tuple[TaskHistory, Op]] = {}
        for history in self.got.tasks.values():
            for op in history.ops:
                if op.kind <= LAST_WRITE and op.seen is not None:
                    known = owners.setdefault(op.seen.id, (history, op))
                    if known[0] is not history:
                        other, first = known
                        what = f"its life has the id {op.seen.id}, which is that of {other.topic}/{other.key}"
                        events = sorted([first.ask, first.answer, op.ask, op.answer], key=attrgetter("at"))
                        yield Violation("P12", history.topic, history.key, what, events)
                        break

    def too_many(self) -> tuple[int, list[Violation]]:
        """The most tasks that any holder held at once, and the violations of each holder's room."""
        got, wrong = self.got, []
        changes: dict[str, list[tuple[int, int, ev.Leased, Topic, str]]] = {}
        asked: dict[str, dict[Topic, int]] = {}
        for topic, leasings in got.leasings.items():
            for _, one in leasings:
                most = asked.setdefault(one.who, {})
                if one.wants[topic] > most.get(topic, 0):
                    most[topic] = one.wants[topic]
        for place, ask, answer in got.leased:
            given: dict[Topic, int] = {}
            its = changes.setdefault(ask.who, [])
            for held in answer.tasks:
                topic, key, token = held.topic, held.key, held.task.token
                given[topic] = given.get(topic, 0) + 1
                if (topic, key, token) in got.began_at:
                    its.append((place, 1, answer, topic, key))
                    ended = got.ended.get((ask.who, topic, key, token), got.settling.get((topic, key, token)))
                    if ended is not None:
                        its.append((ended, -1, answer, topic, key))
            for topic, count in given.items():
                if count > ask.wants.get(topic, 0):
                    what = f"{ask.who} asked for {ask.wants.get(topic, 0)} tasks of {topic} and was given {count}"
                    key = next(held.key for held in answer.tasks if held.topic == topic)
                    wrong.append(Violation("P7", topic, key, what, [ask, answer]))
        worst = 0
        for who, its in changes.items():
            its.sort(key=lambda change: change[:2])
            room = got.header.room if got.header.room is not None else sum(asked[who].values())
            held_now, told = 0, False
            for _, by, leased, topic, key in its:
                held_now += by
                if held_now > worst:
                    worst = held_now
                if held_now > room and not told:
                    told = True
                    what = f"{who} held {held_now} tasks at once, and has room for {room}"
                    wrong.append(Violation("P7", topic, key, what, [leased]))
        return worst, wrong

    def left(self, purged_after: Millis) -> Iterator[Violation]:
        """Find tasks that are in the store at the end and should not be."""
        got, end = self.got, self.got.end
        if end is None:
            return
        for _, left in got.left:
            task, history = left.task, got.tasks.get((left.topic, left.key))
            events = [] if history is None else _last(history)
            if history is None:
                what = f"the store holds a task that is {task.state}, with id {task.id}, and nobody ever asked for it"
            elif task.state.live and end.drained:
                what = f"it is left as {task.state}, to wake at {task.wake_at}, at the end, {end.clock}"
            elif not task.state.live and (task.keep_until or 0) <= end.clock - purged_after - self.slack:
                what = (
                    f"it is left as {task.state}, was kept until {task.keep_until}, and is there still at {end.clock}"
                )
            else:
                continue
            yield Violation("P10", left.topic, left.key, what, [*events, left])


def _last(history: TaskHistory) -> list[Event]:
    """The events of the last two operations before the final read."""
    done = [op for op in history.ops if type(op.ask) is not ev.Left]
    return [event for op in done[-2:] for event in (op.ask, op.answer)]
