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

from bide.core.instants import Millis
from bide.core.records import OutcomeKind, Result, Topic
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide.testing.history.gathered import CANCELLED, LAST_WRITE, SETTLED, Gathered, Op, TaskHistory
from bide.testing.history.report import Violation

_LEASE_LOST, _DEADLINE = "holder lost", "deadline"


class Deliveries:
    """The rules of deliveries, over a whole history."""

    def __init__(self, got: Gathered) -> None:
        self.got = got
        self.slack = got.header.slack

    def wrong(self, history: TaskHistory) -> Iterator[Violation]:
        """The violations among the deliveries of one task."""
        cancels: dict[str, Op] = {}
        """By the id of a life, the cancel that found it waiting."""
        for op in history.ops:
            if op.kind == CANCELLED and op.seen is not None and op.answer.result is Result.CANCELLED:  # type: ignore[union-attr]
                cancels[op.seen.id] = op
        settles = [op for op in history.ops if op.kind == SETTLED]
        began: dict[int, tuple[int, ev.Began]] = {}
        for place, one in history.began:
            lease = history.leases.get(one.token)
            if lease is None:
                yield _violation("P3", history, f"a delivery began with token {one.token}, which no lease gave", [one])
                continue
            if one.token in began:
                what = f"two deliveries of the lease with token {one.token}"
                yield _violation("P3", history, what, [began[one.token][1], one])
                continue
            began[one.token] = place, one
            if (wrong := self._not_its(history, one, lease) or self._early(history, one, lease)) is not None:
                yield wrong
            # a life that was replaced while leased is no longer the task that is cancelled: its delivery is under way,
            # even if the handler has not begun, and its settle is refused
            cancel = cancels.get(one.id)
            if cancel is not None and cancel.token > one.token and cancel.answered < place:
                after = (one.at - cancel.answer.at) / 1e6
                what = (
                    f"a delivery with token {one.token} began {after:.3f} ms after the answer `cancelled`, which has "
                    f"token {cancel.token}"
                )
                yield _violation("P4", history, what, [lease.ask, lease.answer, cancel.ask, cancel.answer, one])
        for settle in settles:
            if (wrong := self._unbegun(history, settle, began)) is not None:
                yield wrong

    def _not_its(self, history: TaskHistory, one: ev.Began, lease: Op) -> Violation | None:
        seen = lease.seen
        assert seen is not None
        for name, promise in (("id", "P12"), ("attempt", "P12"), ("planned_at", "P1")):
            told_of, given = getattr(one, name), getattr(seen, name)
            if told_of != given:
                what = f"delivered with {name} {told_of}, but its lease, with token {one.token}, has {given}"
                return _violation(promise, history, what, [lease.ask, lease.answer, one])
        return None

    def _early(self, history: TaskHistory, one: ev.Began, lease: Op) -> Violation | None:
        seen, ask, answer = lease.seen, lease.ask, lease.answer
        assert seen is not None
        assert type(ask) is ev.Leasing
        assert type(answer) is ev.Leased
        if one.clock + self.slack >= seen.planned_at or seen.losses:  # after a lost lease the lease's end counts
            return None
        # a delivery is not early if the lease was on time and the clock went back since
        went_back = ask.clock + (one.at - ask.at) * 99 // 100_000_000 - one.clock
        if answer.clock >= seen.planned_at and went_back > self.slack + 5:
            return None
        what = (
            f"a delivery with token {one.token} began at {one.clock}, {seen.planned_at - one.clock} ms before its wake "
            f"at {seen.planned_at}"
        )
        return _violation("P1", history, what, [ask, answer, one])

    def _unbegun(self, history: TaskHistory, settle: Op, began: dict[int, tuple[int, ev.Began]]) -> Violation | None:
        """A violation if the task ended as done or dead and never ran."""
        ask = settle.ask
        assert type(ask) is ev.Settling
        delivery = began.get(ask.token)
        if ask.verdict is OutcomeKind.DONE:
            if delivery is None:
                what = f"the lease with token {ask.token} was settled as done, and no delivery of it ever began"
                return _violation("P2", history, what, [ask, settle.answer])
            if delivery[0] > settle.asked:
                what = f"the lease with token {ask.token} was settled as done before its delivery began"
                return _violation("P2", history, what, [ask, settle.answer, delivery[1]])
            return None
        if ask.verdict is not OutcomeKind.DEAD or delivery is not None:
            return None
        lease = history.leases.get(ask.token)
        if lease is None or lease.seen is None:
            return None
        seen, error = lease.seen, ask.error or ""
        if any(one.id == seen.id for _, one in began.values()):
            return None
        if error.startswith(_DEADLINE):
            latest = (max(ask.clock, settle.answer.clock) if type(settle.answer) is ev.Told else ask.clock) + self.slack
            if seen.deadline is not None and latest > seen.deadline:
                return None
            what = f"dead by its deadline, {seen.deadline}, at {ask.clock}, and it never ran"
        elif error.startswith(_LEASE_LOST):
            if seen.losses >= self.got.header.losses:
                return None
            what = (
                f"dead after {seen.losses} lost leases, of {self.got.header.losses} that are allowed, and it never ran"
            )
        else:
            what = f"dead, with the error {ask.error!r}, and it never ran"
        return _violation("P2", history, what, [lease.ask, lease.answer, ask, settle.answer])

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
                        yield _violation("P12", history, what, [first.ask, first.answer, op.ask, op.answer])
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
            task = left.task
            history = got.tasks.get((left.topic, left.key))
            if history is None:
                what = f"the store holds a task that is {task.state}, with id {task.id}, and nobody ever asked for it"
                yield Violation("P10", left.topic, left.key, what, [left])
            elif task.state.live:
                if end.drained:
                    what = f"it is left as {task.state}, to wake at {task.wake_at}, at the end, {end.clock}"
                    yield Violation("P10", left.topic, left.key, what, [*_last(history), left])
            elif (task.keep_until or 0) <= end.clock - purged_after - self.slack:
                what = (
                    f"it is left as {task.state}, was kept until {task.keep_until}, and is there still at {end.clock}"
                )
                yield Violation("P10", left.topic, left.key, what, [*_last(history), left])


def _last(history: TaskHistory) -> list[Event]:
    """The events of the last two operations before the final read."""
    done = [op for op in history.ops if type(op.ask) is not ev.Left]
    return [event for op in done[-2:] for event in (op.ask, op.answer)]


def _violation(promise: str, history: TaskHistory, what: str, events: list[Event]) -> Violation:
    return Violation(promise, history.topic, history.key, what, sorted(events, key=lambda event: event.at))
