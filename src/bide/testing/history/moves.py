"""The effect of each move on a task: the lifecycle's table again, as conditions on the states before and after.

It is independent of `bide.core.lifecycle`, so that it finds errors there. Every function takes the task before the move
(None: there was none) and an operation with its answer. It returns None if the answer is right, else the promise that
it breaks and how: a text for `%` with its values, which is formatted only if it is read.
"""

from __future__ import annotations

from typing import Any

from bide.core.instants import LAST_INSTANT, Due, In, Millis
from bide.core.records import OnConflict, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event, Seen
from bide.testing.history.gathered import (
    ANY,
    CANCELLED,
    LEASED,
    MOVED,
    NEVER,
    NOBODY,
    REDRIVEN,
    SCHEDULED,
    Clocks,
    Op,
    Task,
    Unsure,
    Wrong,
    differs,
    earliest,
    latest,
    same,
)

_WAITING, _LEASED, _DONE = State.WAITING, State.LEASED, State.DONE
_CANCELLED, _DEAD = State.CANCELLED, State.DEAD
_LIVE = (_WAITING, _LEASED)

_UNNOTICED: Millis = 100
"""The most that a clock may seem to go back because several processes read it."""


class Moves:
    """The rules, with the facts they need about the whole history."""

    def __init__(self, header: ev.Header, clocks: Clocks) -> None:
        self.slack = header.slack
        self.gives_back = header.gives_back
        self.clocks = clocks

    # --- the store's clock

    def during(self, ask: Any, answer: Any) -> tuple[Millis, Millis]:
        """The range of the store's clock during this call, in which the clock may jump once."""
        gap = (answer.at - ask.at) // 1_000_000 + 1
        before, after = ask.clock, answer.clock
        return min(before, after - gap) - self.slack, max(after, before + gap) + self.slack

    def after(self, ask: Any) -> tuple[Millis, Millis]:
        """The range of the store's clock for a call that may take effect at any later time."""
        return ask.clock - self.slack - self.clocks.fallback, NEVER

    def may_be_purged(self, task: Task, by: int) -> bool:
        """True if the task has ended and may have been forgotten by this place in the history."""
        if task.state in _LIVE:
            return False
        keep = task.keep_until
        return keep is ANY or keep is None or earliest(keep) <= self.clocks.highest(by) + self.slack

    def may_come_again(self, task: Task, by: int) -> bool:
        """True if an absent task may appear again: its retention was over, and the clock was set back since."""
        return self.clocks.fallback > _UNNOTICED and self.may_be_purged(task, by)

    # --- clients' verbs

    def scheduled(self, task: Task | None, op: Op) -> Wrong:
        """Check a schedule that began a new life."""
        ask: ev.Asked = op.ask  # type: ignore[assignment]
        answer: ev.Answered = op.answer  # type: ignore[assignment]
        seen: Seen = op.seen  # type: ignore[assignment]
        if answer.result is Result.CREATED:
            if task is not None and not self.may_be_purged(task, op.answered):
                if task.state in _LIVE:
                    return "P2", "schedule answered `created`, as if nothing were there, but %s", task
                return ("P4", "schedule answered `created`, as if nothing were there; but %s, and is kept until %s",
                        task, task.keep_until)  # fmt: skip
        elif task is None:
            return "P4", "schedule answered `replaced`, but there was no task to be replaced"
        else:
            wrong = _if_token(task, op) or _was(task, answer)
            if wrong is not None:
                return wrong
            if not replaceable(task, ask.on_conflict, seen.due_at, seen.due_at):
                return ("P4", "schedule with on_conflict=%s replaced a task that was %s, due at %s", ask.on_conflict,
                        task.state, task.due_at)  # fmt: skip
        if seen.id != ask.id:
            return "P12", "schedule asked for a life with id %s and began one with id %s", ask.id, seen.id
        if seen.deadline != ask.deadline:
            return "P4", "schedule asked for the deadline %s and got %s", ask.deadline, seen.deadline
        return _fresh(seen) or self._times(op, ask.due, ask.grain, seen.created_at)

    def moved(self, task: Task | None, op: Op) -> Wrong:
        ask: ev.Asked = op.ask  # type: ignore[assignment]
        seen: Seen = op.seen  # type: ignore[assignment]
        if task is None or task.state is not _WAITING:
            return "P4", "a move answered `moved`, but %s", task or NOBODY
        wrong = _if_token(task, op) or _was(task, op.answer)
        if wrong is not None:
            return wrong
        deadline = task.deadline if ask.deadline is None else ask.deadline
        for name, before in (
            ("state", _WAITING), ("id", task.id), ("attempt", task.attempt), ("failures", task.failures),
            ("losses", task.losses), ("planned_at", 0), ("created_at", task.created_at), ("group", task.group),
            ("error", task.error), ("deadline", deadline),
        ):  # fmt: skip
            if not same(before, getattr(seen, name)):
                promise = "P12" if name in ("id", "attempt") else "P4"
                return promise, "a move made %s %s of %s", name, getattr(seen, name), before
        if seen.deadline is not None and seen.wake_at > seen.deadline:
            return "P4", "a move to %d was not refused, though the deadline is %d", seen.wake_at, seen.deadline
        return self._times(op, ask.due, ask.grain, None)

    def cancelled(self, task: Task | None, op: Op) -> Wrong:
        ask: ev.Asked = op.ask  # type: ignore[assignment]
        answer: ev.Answered = op.answer  # type: ignore[assignment]
        seen: Seen = op.seen  # type: ignore[assignment]
        due = _WAITING if answer.result is Result.CANCELLED else _LEASED
        if task is None or task.state is not due:
            return "P4", "a cancel answered `%s`, but %s", answer.result, task or NOBODY
        wrong = _if_token(task, op)
        if wrong is not None:
            return wrong
        low, high = self.during(ask, answer)
        if seen.finished_at is None or not low <= seen.finished_at <= high:
            return "P4", "a cancel asked between %d and %d ended the task at %s", low, high, seen.finished_at
        wake = task.wake_at if due is _WAITING else _started(task, (seen.finished_at, seen.finished_at))
        wrong = _kept(task, seen, "a cancel", _CANCELLED, wake, task.error)
        if wrong is None and ask.keeps is not None:
            # the retention counts from the caller's call: a task is not kept if the call takes longer than that
            kept = seen.keep_until or 0
            if (kept == 0) if ask.keeps else kept > seen.finished_at:
                wrong = ("P4", "a cancel %s keep the task, but it ended at %d and is kept until %s",
                         "was to" if ask.keeps else "was not to", seen.finished_at, seen.keep_until)  # fmt: skip
        return wrong

    def redriven(self, task: Task | None, op: Op) -> Wrong:
        ask: ev.Asked = op.ask  # type: ignore[assignment]
        seen: Seen = op.seen  # type: ignore[assignment]
        if task is None or task.state is not _DEAD:
            return "P4", "a redrive answered `redriven`, but %s", task or NOBODY
        wrong = _if_token(task, op)
        if wrong is not None:
            return wrong
        if ask.id and seen.id != ask.id:  # the id is empty if the app makes it: the caller does not know it
            return "P12", "redrive asked for a life with id %s and began one with id %s", ask.id, seen.id
        if seen.id == task.id:
            return "P12", "a redrive began a new life with the id of the old one, %s", seen.id
        if seen.deadline is not None or not same(task.group, seen.group):
            return "P4", "redrive made a task of group %s with the deadline %s", seen.group, seen.deadline
        return _fresh(seen) or self._times(op, ask.due, ask.grain, seen.created_at)

    def _times(self, op: Op, due: Due | None, grain: Millis, now: Millis | None) -> Wrong:
        """Compare `due_at` and `wake_at` with the call; `now`: the time at which it took effect, if known."""
        ask, seen = op.ask, op.seen
        assert seen is not None
        low, high = self.during(ask, op.answer)
        if now is not None:
            if not low <= now <= high:
                return "P4", "asked between %d and %d by the store's clock, and done at %d", low, high, now
            if op.token < now * 1000:
                return "P12", "token %d is less than the store's clock, %d ms, in microseconds", op.token, now
            low = high = now
        first, last = due_between(due, grain, low, high)
        if seen.due_at < first:
            return "P1", "due at %d, %d ms earlier than it was asked for", seen.due_at, first - seen.due_at
        if seen.due_at > last:
            return "P4", "due at %d, %d ms later than it was asked for", seen.due_at, seen.due_at - last
        if seen.wake_at < seen.due_at:
            return "P1", "to wake at %d, which is %d ms before it is due", seen.wake_at, seen.due_at - seen.wake_at
        if seen.wake_at > seen.due_at and not low <= seen.wake_at <= high:
            return "P4", "due at %d, and to wake at %d, which is neither that nor now", seen.due_at, seen.wake_at
        return None

    # --- operations that change nothing

    def read(self, task: Task | None, op: Op) -> Wrong:
        """Compare a shown task with the version that it names."""
        seen, answer = op.seen, op.answer
        assert seen is not None
        if task is None:
            return "P4", "%s shows a task, but there was none", _name(op)
        name = differs(task, seen)
        if name is not None:
            return ("P4", "%s shows %s %s with token %d, but it must be %s", _name(op), name, getattr(seen, name),
                    seen.token, getattr(task, name))  # fmt: skip
        if type(answer) is not ev.Answered or answer.result is None:
            return None
        if self._word_fits(op.ask, answer, seen):  # type: ignore[arg-type]
            return None
        return ("P4", "%s answered `%s` of a task that is %s, due at %d, with token %d", _name(op), answer.result,
                seen.state, seen.due_at, seen.token)  # fmt: skip

    def _word_fits(self, ask: ev.Asked, answer: ev.Answered, seen: Seen) -> bool:
        """True if the lifecycle's table has this answer, without a change, for the task that was shown."""
        word, state, asks = answer.result, seen.state, ask.asks
        low, high = self.during(ask, answer)
        if asks is Asks.SCHEDULE:
            if ask.if_token is not None and (ask.if_token != seen.token or word is Result.STALE_TOKEN):
                return ask.if_token != seen.token and word is Result.STALE_TOKEN
            how = ask.on_conflict
            first, last = due_between(ask.due, ask.grain, low, high)
            if word is Result.REFUSED:
                return how is OnConflict.REFUSE and (state in _LIVE or state is _DONE)
            if word is not Result.KEPT:
                return False
            if how is OnConflict.KEEP:
                return state in _LIVE or state is _DONE
            if how is OnConflict.EARLIEST:
                return state is _LEASED or (state is _WAITING and last >= seen.due_at)
            return how is OnConflict.LATEST and state is _WAITING and first <= seen.due_at
        if word is Result.FINISHED:
            return state in (_DONE, _CANCELLED) or (state is _DEAD and asks is not Asks.REDRIVE)
        open_to = state in _LIVE or (state is _DEAD and asks is Asks.REDRIVE)
        if word is Result.STALE_TOKEN:
            return open_to and ask.if_token is not None and ask.if_token != seen.token
        if ask.if_token is not None and ask.if_token != seen.token:
            return False
        if word is Result.UNDER_WAY:
            return state is _LEASED if asks is Asks.MOVE else asks is Asks.REDRIVE and state in _LIVE
        deadline = seen.deadline if ask.deadline is None else ask.deadline
        if word is not Result.REFUSED or asks is not Asks.MOVE or state is not _WAITING or deadline is None:
            return False
        return max(due_between(ask.due, ask.grain, low, high)[1], high) > deadline

    # --- workers' verbs

    def leased(self, task: Task | None, op: Op) -> Wrong:
        seen: Seen = op.seen  # type: ignore[assignment]
        answer: ev.Leased = op.answer  # type: ignore[assignment]
        if task is None or task.state not in _LIVE:
            cancelled = task is not None and task.state is _CANCELLED
            return "P4" if cancelled else "P5", "leased with id %s, but %s", seen.id, task or NOBODY
        if not same(task.id, seen.id):
            return "P5", "leased with id %s, but the life that is to be delivered has id %s", seen.id, task.id
        if not same(task.due_at, seen.due_at):
            return "P5", "leased as due at %d, but it was due at %s", seen.due_at, task.due_at
        lost = task.state is _LEASED
        by = min(answer.clock + self.slack, op.token // 1000)
        if lost and earliest(task.wake_at) > by:
            return ("P3", "leased at %d though the lease with token %s lasts until %s: two live leases at once",
                    answer.clock, task.token, task.wake_at)  # fmt: skip
        planned = task.planned_at if lost else task.wake_at
        if not same(planned, seen.planned_at):
            early = seen.planned_at < earliest(planned)
            return "P1" if early else "P4", "leased for %d, but it was to wake at %s", seen.planned_at, planned
        if seen.planned_at > by and not lost:  # after a lost lease, its end counts, and `planned_at` stays as it was
            return "P1", "leased at %d, %d ms before its wake at %d", by, seen.planned_at - by, seen.planned_at
        if not same(task.attempt if task.attempt is ANY else task.attempt + 1, seen.attempt):
            return "P12", "leased as attempt %d after attempt %s", seen.attempt, task.attempt
        for name, due in (
            ("state", _LEASED), ("losses", task.losses + lost), ("failures", task.failures), ("group", task.group),
            ("created_at", task.created_at), ("deadline", task.deadline), ("error", task.error), ("finished_at", None),
        ):  # fmt: skip
            if not same(due, getattr(seen, name)):
                return "P4", "leased with %s %s, but it must be %s", name, getattr(seen, name), due
        return None

    def settled(self, task: Task, op: Op) -> Task | None:
        """The leased task after an accepted settle; None: it is forgotten."""
        return self.after_settle(task, op.ask, self.during(op.ask, op.answer))  # type: ignore[arg-type]

    def after_settle(self, task: Task, ask: ev.Settling, now: tuple[Millis, Millis]) -> Task | None:
        low, high = now
        verdict, wake = ask.verdict.value, ask.wake
        if wake is None or verdict == "dead":
            if ask.keep_until <= low:
                return None
            error = ask.error if ask.error is not None else (task.error if verdict == "dead" else None)
            return Unsure(
                task, state=_DONE if verdict == "done" else _DEAD, wake_at=_started(task, now), token=ANY,
                finished_at=now, keep_until=ask.keep_until, error=ANY if error is not None else None,
                failures=(task.failures, task.failures + (verdict == "dead")),
            )  # fmt: skip
        first, last = due_between(wake, 0, low, high)
        woken = (max(first, low), max(last, high))
        if verdict == "done":
            return Unsure(
                NOBODY, id=ask.next_id, group=task.group, due_at=(first, last), wake_at=woken, token=ANY, created_at=now
            )
        if verdict == "defer":
            return given_back(task, woken)
        return Unsure(
            task, state=_WAITING, wake_at=woken, planned_at=0, token=ANY, losses=0, failures=task.failures + 1,
            error=ANY,
        )  # fmt: skip


def given_back(leased: Task, woken: tuple[Millis, Millis]) -> Task:
    """The task after a lease that does not count as an attempt; `woken`: when it may be due again."""
    return Unsure(leased, state=_WAITING, wake_at=woken, planned_at=0, token=ANY, losses=0, attempt=leased.attempt - 1)


def due_between(due: Due | None, grain: Millis, low: Millis, high: Millis) -> tuple[Millis, Millis]:
    """The first and last instant that `due` may mean if the store's clock is from `low` to `high`."""
    assert due is not None
    if type(due) is In:
        return _clamp(low + due.millis), _clamp(high + due.millis + (grain if due.millis else 0))
    at = _clamp(due.millis)
    return at, at


def _clamp(at: Millis) -> Millis:
    return 0 if at < 0 else at if at <= LAST_INSTANT or at >= NEVER // 2 else LAST_INSTANT


def _started(task: Task, now: tuple[Millis, Millis]) -> Any:
    """The `wake_at` of a task that ended while it was leased: the instant at which that lease began."""
    token = task.token
    if token is ANY:
        return ANY
    return min(token // 1000, now[0]), min(token // 1000, now[1])


def replaceable(task: Task, how: OnConflict, first: Millis, last: Millis) -> bool:
    """True if a schedule whose due time lies from `first` to `last` may replace the task."""
    state = task.state
    if how is OnConflict.REPLACE or state is _CANCELLED or state is _DEAD:
        return True
    if how is OnConflict.EARLIEST:
        return state is _DONE or (state is _WAITING and first < latest(task.due_at))
    return how is OnConflict.LATEST and (state is not _WAITING or last > earliest(task.due_at))


def _was(task: Task, answer: Event) -> Wrong:
    """Compare the previous wake time in the answer with the task's."""
    assert type(answer) is ev.Answered
    if answer.was is None or (task.state in _LIVE and same(task.wake_at, answer.was)):
        return None
    return "P4", "`%s` says that the wake before was %s; it was %s", answer.result, answer.was, task.wake_at


def _if_token(task: Task, op: Op) -> Wrong:
    asked: int | None = op.ask.if_token  # type: ignore[union-attr]
    if asked is None or same(task.token, asked):
        return None
    return "P4", "asked for the version with token %d alone, and done to the one with token %s", asked, task.token


def _fresh(seen: Seen) -> Wrong:
    if seen.state is not _WAITING:
        return "P4", "a new life is %s", seen.state
    if seen.attempt or seen.failures or seen.losses:
        return ("P12", "a new life begins with attempt %d, %d failures, %d losses", seen.attempt, seen.failures,
                seen.losses)  # fmt: skip
    if seen.error is not None or seen.finished_at is not None or seen.planned_at:
        return "P4", "a new life begins with the error %s, finished at %s", seen.error, seen.finished_at
    return None


def _kept(task: Task, seen: Seen, what: str, state: State, wake: Any, error: Any) -> Wrong:
    """Check that a task that ended is otherwise unchanged."""
    for name, due in (
        ("id", task.id), ("state", state), ("due_at", task.due_at), ("wake_at", wake), ("planned_at", task.planned_at),
        ("attempt", task.attempt), ("failures", task.failures), ("losses", task.losses), ("group", task.group),
        ("created_at", task.created_at), ("deadline", task.deadline), ("error", error),
    ):  # fmt: skip
        if not same(due, getattr(seen, name)):
            promise = "P5" if name == "id" else "P12" if name == "attempt" else "P4"
            return promise, "%s left %s %s, but it must be %s", what, name, getattr(seen, name), due
    return None


def _name(op: Op) -> str:
    return op.ask.asks.value if type(op.ask) is ev.Asked else "what was left in the end"


EXPLAIN = {
    SCHEDULED: Moves.scheduled, MOVED: Moves.moved, CANCELLED: Moves.cancelled, REDRIVEN: Moves.redriven,
    LEASED: Moves.leased,
}  # fmt: skip
