"""The effect of each move on a task: the lifecycle's table again, as conditions on the states before and after.

It is independent of `bide.core.lifecycle`, so that it finds errors there. `results` says how a client's call may be
answered, and `made` what it makes of the task, as far as that can be known: also for a call whose answer was lost. A
check of an answer returns None if it is right, else the promise that it breaks and how: a text for `%` with its values,
which is formatted only if it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from bide.core.instants import LAST_INSTANT, Due, In, Millis
from bide.core.records import OnConflict, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Seen
from bide.testing.history.gathered import (
    ANY,
    CANCELLED,
    LEASED,
    MADE,
    MOVED,
    NEVER,
    NOBODY,
    REDRIVEN,
    Clocks,
    Op,
    Task,
    Wrong,
    differs,
    earliest,
    latest,
    same,
)

_WAITING, _LEASED, _DONE = State.WAITING, State.LEASED, State.DONE
_CANCELLED, _DEAD = State.CANCELLED, State.DEAD
_LIVE = (_WAITING, _LEASED)
_LEASED_AS: Mapping[str, tuple[str, str]] = {
    "id": ("P5", "leased with id %s, but the life that is to be delivered has id %s"),
    "due_at": ("P5", "leased as due at %s, but it was due at %s"),
    "planned_at": ("P4", "leased for %s, but it was to wake at %s"),
    "attempt": ("P12", "leased as attempt %s, but it must be attempt %s"),
}

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

    def results(self, task: Task, ask: ev.Asked, now: tuple[Millis, Millis]) -> set[Result]:
        """The results that a call may have on this task within `now`."""
        asks, state, how = ask.asks, task.state, ask.on_conflict
        if asks is not Asks.SCHEDULE and (
            state in (_DONE, _CANCELLED) or (state is _DEAD and asks is not Asks.REDRIVE)
        ):
            return {Result.FINISHED}
        found: set[Result] = set()
        if ask.if_token is not None and task.token != ask.if_token:
            found.add(Result.STALE_TOKEN)
            if not same(task.token, ask.if_token):
                return found
        if asks is Asks.CANCEL:
            found.add(Result.CANCELLED if state is _WAITING else Result.CANCELLED_WHILE_LEASED)
        elif asks is Asks.REDRIVE:
            found.add(Result.REDRIVEN if state is _DEAD else Result.UNDER_WAY)
        elif asks is Asks.MOVE and state is _LEASED:
            found.add(Result.UNDER_WAY)
        elif asks is Asks.MOVE:
            first, last = due_between(ask.due, ask.grain, *now)
            deadline = task.deadline if ask.deadline is None else ask.deadline
            if deadline is None or max(first, now[0]) <= deadline:
                found.add(Result.MOVED)
            if deadline is not None and max(last, now[1]) > deadline:
                found.add(Result.REFUSED)
        elif how is OnConflict.REPLACE or state is _CANCELLED or state is _DEAD:
            found.add(Result.REPLACED)
        elif how is OnConflict.REFUSE or how is OnConflict.KEEP:
            found.add(Result.REFUSED if how is OnConflict.REFUSE else Result.KEPT)
        elif state is not _WAITING:
            found.add(Result.KEPT if how is OnConflict.EARLIEST and state is _LEASED else Result.REPLACED)
        else:
            due, there = due_between(ask.due, ask.grain, *now), (earliest(task.due_at), latest(task.due_at))
            sooner, later = (due, there) if how is OnConflict.EARLIEST else (there, due)
            if sooner[0] < later[1]:
                found.add(Result.REPLACED)
            if sooner[1] >= later[0]:
                found.add(Result.KEPT)
        return found

    def made(self, task: Task | None, ask: ev.Asked, now: tuple[Millis, Millis]) -> Task:
        """The task after the call took effect within `now`, if not forgotten; NOBODY: it would change nothing."""
        if (ask.asks is not Asks.SCHEDULE) if task is None else not self.results(task, ask, now) & MADE.keys():
            return NOBODY
        if ask.asks is Asks.CANCEL:
            assert task is not None
            wake = task.wake_at if task.state is _WAITING else _started(task, now)
            return replace(task, state=_CANCELLED, wake_at=wake, token=ANY, finished_at=now, keep_until=ANY)
        due = due_between(ask.due, ask.grain, *now)
        wake = max(due[0], now[0]), max(due[1], now[1])
        if ask.asks is Asks.MOVE:
            assert task is not None
            deadline = task.deadline if ask.deadline is None else ask.deadline
            return replace(task, due_at=due, wake_at=wake, planned_at=0, token=ANY, deadline=deadline)
        return replace(
            NOBODY, id=ask.id or ANY, group=ANY if task is None or ask.asks is Asks.SCHEDULE else task.group,
            due_at=due, wake_at=wake, token=ANY, created_at=now, deadline=ask.deadline,
        )  # fmt: skip

    def write(self, task: Task | None, op: Op) -> Wrong:
        """Check an operation that made a new version of the task."""
        if op.kind == LEASED:
            return self._leased(task, op)
        ask: ev.Asked = op.ask  # type: ignore[assignment]
        answer: ev.Answered = op.answer  # type: ignore[assignment]
        seen: Seen = op.seen  # type: ignore[assignment]
        result, now = answer.result, self.during(ask, answer)
        if result is Result.CREATED:
            if task is not None and not self.may_be_purged(task, op.answered):
                if task.state in _LIVE:
                    return "P2", "schedule answered `created`, as if nothing were there, but %s", task
                return ("P4", "schedule answered `created`, as if nothing were there; but %s, and is kept until %s",
                        task, task.keep_until)  # fmt: skip
            task = None
        else:
            wrong = self._wrong_result(task, ask, answer, seen, now)
            if wrong is not None or task is None:
                return wrong
        at = None if op.kind == MOVED else seen.finished_at if op.kind == CANCELLED else seen.created_at
        if at is not None:
            if not now[0] <= at <= now[1]:
                return "P4", "asked between %d and %d by the store's clock, and done at %d", *now, at
            if op.kind != CANCELLED and op.token < at * 1000:
                return "P12", "token %d is less than the store's clock, %d ms, in microseconds", op.token, at
            now = at, at
        if op.kind == REDRIVEN and task is not None and seen.id == task.id:
            return "P12", "a redrive began a new life with the id of the old one, %s", seen.id
        if op.kind != CANCELLED and seen.wake_at < seen.due_at:
            return "P1", "to wake at %d, which is %d ms before it is due", seen.wake_at, seen.due_at - seen.wake_at
        if op.kind != CANCELLED and seen.wake_at > max(seen.due_at, now[1]):
            return "P4", "due at %d, and to wake at %d, which is neither that nor now", seen.due_at, seen.wake_at
        return _unlike(f"a {ask.asks} made", self.made(task, ask, now), seen, {}) or _kept(ask, seen)

    def _wrong_result(
        self, task: Task | None, ask: ev.Asked, answer: ev.Answered, seen: Seen, now: tuple[Millis, Millis]
    ) -> Wrong:
        """Compare the result of a change with the task before it."""
        if task is not None and ask.if_token is not None and not same(task.token, ask.if_token):
            return ("P4", "asked for the version with token %d alone, and done to the one with token %s", ask.if_token,
                    task.token)  # fmt: skip
        if answer.result is Result.MOVED and seen.deadline is not None and seen.wake_at > seen.deadline:
            return "P4", "a move to %d was not refused, though the deadline is %d", seen.wake_at, seen.deadline
        if task is None or answer.result not in self.results(task, ask, now):
            verb = f"schedule with on_conflict={ask.on_conflict}" if ask.asks is Asks.SCHEDULE else ask.asks.value
            return "P4", f"a {verb} answered `%s`, but %s", answer.result, task or NOBODY
        if answer.was is not None and not (task.state in _LIVE and same(task.wake_at, answer.was)):
            return "P4", "`%s` says that the wake before was %s; it was %s", answer.result, answer.was, task.wake_at
        return None

    def read(self, task: Task | None, op: Op) -> Wrong:
        """Compare a shown task with the version that it names."""
        ask, seen, answer = op.ask, op.seen, op.answer
        assert seen is not None
        verb = ask.asks.value if type(ask) is ev.Asked else "what was left in the end"
        if task is None:
            return "P4", "%s shows a task, but there was none", verb
        name = differs(task, seen)
        if name is not None:
            return ("P4", "%s shows %s %s with token %d, but it must be %s", verb, name, getattr(seen, name),
                    seen.token, getattr(task, name))  # fmt: skip
        if type(ask) is not ev.Asked or type(answer) is not ev.Answered or answer.result is None:
            return None
        if answer.result in self.results(seen, ask, self.during(ask, answer)):
            return None
        return ("P4", "%s answered `%s` of a task that is %s, due at %d, with token %d", verb, answer.result,
                seen.state, seen.due_at, seen.token)  # fmt: skip

    # --- workers' verbs

    def _leased(self, task: Task | None, op: Op) -> Wrong:
        seen: Seen = op.seen  # type: ignore[assignment]
        answer: ev.Leased = op.answer  # type: ignore[assignment]
        if task is None or task.state not in _LIVE:
            cancelled = task is not None and task.state is _CANCELLED
            return "P4" if cancelled else "P5", "leased with id %s, but %s", seen.id, task or NOBODY
        lost = task.state is _LEASED
        by = min(answer.clock + self.slack, op.token // 1000)
        if lost and same(task.id, seen.id) and earliest(task.wake_at) > by:
            return ("P3", "leased at %d though the lease with token %s lasts until %s: two live leases at once",
                    answer.clock, task.token, task.wake_at)  # fmt: skip
        wrong = _unlike("leased with", held(task, ANY), seen, _LEASED_AS)
        if wrong is None and seen.planned_at > by and not lost:  # after a lost lease, its end counts
            return "P1", "leased at %d, %d ms before its wake at %d", by, seen.planned_at - by, seen.planned_at
        return wrong

    def settled(self, task: Task, ask: ev.Settling, now: tuple[Millis, Millis]) -> Task | None:
        """The leased task after a settle that was accepted within `now`; None: it is forgotten."""
        low, high = now
        verdict, wake = ask.verdict.value, ask.wake
        if wake is None or verdict == "dead":
            if ask.keep_until <= low:
                return None
            error = ask.error if ask.error is not None else (task.error if verdict == "dead" else None)
            return replace(
                task, state=_DONE if verdict == "done" else _DEAD, wake_at=_started(task, now), token=ANY,
                finished_at=now, keep_until=ask.keep_until, error=ANY if error is not None else None,
                failures=(task.failures, task.failures + (verdict == "dead")),
            )  # fmt: skip
        first, last = due_between(wake, 0, low, high)
        woken = (max(first, low), max(last, high))
        if verdict == "done":
            return replace(
                NOBODY, id=ask.next_id, group=task.group, due_at=(first, last), wake_at=woken, token=ANY, created_at=now
            )
        if verdict == "defer":
            return given_back(task, woken)
        return replace(
            task, state=_WAITING, wake_at=woken, planned_at=0, token=ANY, losses=0, failures=task.failures + 1,
            error=ANY,
        )  # fmt: skip


def given_back(leased: Task, woken: tuple[Millis, Millis]) -> Task:
    """The task after a lease that does not count as an attempt; `woken`: when it may be due again."""
    return replace(leased, state=_WAITING, wake_at=woken, planned_at=0, token=ANY, losses=0, attempt=leased.attempt - 1)


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


def held(task: Task, until: Any) -> Task:
    """The live task after a lease."""
    lost = task.state is _LEASED
    return replace(
        task, state=_LEASED, wake_at=until, token=ANY, planned_at=task.planned_at if lost else task.wake_at,
        attempt=task.attempt + 1, losses=task.losses + lost,
    )  # fmt: skip


def _unlike(what: str, made: Task, seen: Seen, texts: Mapping[str, tuple[str, str]]) -> Wrong:
    """Compare a new version with what it must be; `texts` has a promise and a text for some fields."""
    name = differs(made, seen)
    if name is None:
        return None
    value, right = getattr(seen, name), getattr(made, name)
    early = name in ("due_at", "wake_at", "planned_at") and value < earliest(right)
    if name in texts:
        promise, text = texts[name]
        return "P1" if early and promise == "P4" else promise, text, value, right
    if early:
        return "P1", f"{what} {name} %d, %d ms earlier than it was asked for", value, earliest(right) - value
    return "P12" if name in ("id", "attempt") else "P4", f"{what} {name} %s, but it must be %s", value, right


def _kept(ask: ev.Asked, seen: Seen) -> Wrong:
    """Compare the retention of a cancelled task with the caller's: none is kept if the call takes longer than that."""
    if ask.keeps is None or seen.finished_at is None:
        return None
    kept = seen.keep_until or 0
    if (kept > 0) if ask.keeps else kept <= seen.finished_at:
        return None
    return ("P4", "a cancel %s keep the task, but it ended at %d and is kept until %s",
            "was to" if ask.keeps else "was not to", seen.finished_at, seen.keep_until)  # fmt: skip
