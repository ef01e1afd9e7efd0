"""Changes of a task that nobody was told of: by questions that were never answered, and by the purge.

Each may have been done at any time since it was asked, once, or never. A search thinks of it only where there is no
other way on, and here only of what could lead to what was shown next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from bide.core.records import OnConflict, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event
from bide.testing.history.gathered import (
    ABSENT,
    LAST_WRITE,
    LEASED,
    NEVER,
    REDRIVEN,
    REFUSED,
    SCHEDULED,
    SHOWN,
    Leasings,
    Op,
    TaskHistory,
)
from bide.testing.history.moves import EXPLAIN, Moves, due_between, given_back
from bide.testing.history.unsure import ANY, NOBODY, Task, Unsure, earliest, same

if TYPE_CHECKING:
    from bide.testing.history.search import Search

_WAITING, _LEASED, _DONE, _DEAD = State.WAITING, State.LEASED, State.DONE, State.DEAD
_NONE: frozenset[int] = frozenset()
Way: TypeAlias = tuple[int, Task | None]
"""The number of a call (0: the purge), and what it makes of the task."""


class Unseen:
    """Of one task."""

    def __init__(self, told: TaskHistory, moves: Moves, leasings: tuple[Leasings, Leasings], exact: bool) -> None:
        self._lost = told.lost
        self._moves = moves
        self._leasings = leasings
        self._exact = exact
        self._versions: dict[int, list[Op]] = {}
        for op in told.ops:
            if op.kind <= SHOWN:
                self._versions.setdefault(op.token, []).append(op)
        self._begun: dict[str, set[int]] = {}
        """By the id of a life, the lost questions that would begin it; with "", those that leave the id to others."""
        for _, lost in told.lost:
            life = lost.id if type(lost) is ev.Asked else lost.next_id if type(lost) is ev.Settling else None
            if life is not None and (life or (type(lost) is ev.Asked and lost.asks is Asks.REDRIVE)):
                self._begun.setdefault(life, set()).add(lost.call)
        self._told = frozenset(told.leases)
        """The tokens of the leases that somebody was told of."""
        self._gave = {op.ask.call for op in told.leases.values()}  # type: ignore[union-attr]
        self.any = bool(told.lost or leasings[0].in_order)
        """True if any question was lost."""

    def until(self, ask: Event, answer: Event | None) -> Any:
        """The end of an extended lease. A store with a clock of its own counts from that, and not from a worker's."""
        assert type(ask) is ev.Extending
        if self._exact:
            return ask.until
        if ask.now is None:
            return ANY
        first, last = self._moves.after(ask) if answer is None else self._moves.during(ask, answer)
        lasts = ask.until - ask.now
        return min(first + lasts, ask.until), max(last + lasts, ask.until)

    def ways(self, at: Search) -> list[Way]:
        """The changes that are possible where the search stands; the likeliest first."""
        task, moves, ways = at.task, self._moves, []
        token = at.groups[at.group][0] if at.group < len(at.groups) else NEVER
        still = task is not None and task.token == token  # it will be shown again, as it is
        for place, ask in self._lost:
            if place > at.soonest:
                break
            if ask.call not in at.used and (not still or type(ask) is ev.Extending):
                made = self._made(task, ask, moves.after(ask))
                if made is not NOBODY and self._leads_on(made, ask.call, token, at.used):
                    ways.append((ask.call, made))
        if task is not None and not still:
            if task.state is _WAITING or task.state is _LEASED:
                ways += self._taken(task, token, at)
                if moves.gives_back:
                    ways += self._returned(task, token, at)
            elif moves.may_be_purged(task, at.soonest):
                ways.append((0, None))
        if len(ways) > 1:
            ways.sort(key=lambda way: self._is_unlikely(way[1], token, at.active))
        return ways

    def _leads_on(self, made: Task | None, call: int, token: int, used: frozenset[int]) -> bool:
        """True if the life that is shown next can come of this."""
        shown = self._versions.get(token)
        if shown is None or any(op.kind == SCHEDULED or op.kind == REDRIVEN for op in shown):
            return True
        seen = shown[0].seen
        assert seen is not None
        if made is not None and same(made.id, seen.id):
            return True
        begun = self._begun.get(seen.id, _NONE) | self._begun.get("", _NONE)
        return any(one != call and one not in used for one in begun)

    def _is_unlikely(self, made: Task | None, token: int, active: list[Op]) -> bool:
        """True if the next operation would still be wrong after this."""
        for op in active:
            if op.kind <= LAST_WRITE and op.token == token:
                return EXPLAIN[op.kind](self._moves, made, op) is not None
            if op.kind == SHOWN and op.token == token:
                return made is None or self._moves.read(made, op) is not None
            if op.kind == ABSENT and made is None:
                return False
            if op.kind == REFUSED and (made is None or made.token != op.token):
                return False
        return True

    # --- by clients, and by holders

    def _made(self, task: Task | None, ask: Any, now: tuple[int, int]) -> Task | None:
        """The task after a lost question is done; NOBODY: it would change nothing."""
        if type(ask) is ev.Settling or type(ask) is ev.Extending:
            if task is None or task.state is not _LEASED or task.token != ask.token:
                return NOBODY
            if type(ask) is ev.Settling:
                return self._moves.after_settle(task, ask, now)
            assert type(ask) is ev.Extending
            return NOBODY if task.wake_at == ask.until else Unsure(task, wake_at=self.until(ask, None))
        if ask.asks is Asks.SCHEDULE:
            if task is not None and not _replaceable(task, ask, now):
                return NOBODY
            due = due_between(ask.due, ask.grain, *now)
            return Unsure(
                NOBODY, id=ask.id, due_at=due, wake_at=(max(due[0], now[0]), NEVER), token=ANY, created_at=now,
                group=ANY, deadline=ask.deadline,
            )  # fmt: skip
        if task is None or (ask.if_token is not None and not same(task.token, ask.if_token)):
            return NOBODY
        if ask.asks is Asks.CANCEL:
            if task.state is not _WAITING and task.state is not _LEASED:
                return NOBODY
            if ask.keeps is False:
                return None
            token = task.token
            wake = task.wake_at if task.state is _WAITING else ANY if token is ANY else (0, token // 1000)
            return Unsure(task, state=State.CANCELLED, wake_at=wake, token=ANY, finished_at=now, keep_until=ANY)
        due = due_between(ask.due, ask.grain, *now)
        wake = (max(due[0], now[0]), NEVER)
        if ask.asks is Asks.MOVE:
            if task.state is not _WAITING:
                return NOBODY
            deadline = task.deadline if ask.deadline is None else ask.deadline
            return Unsure(task, due_at=due, wake_at=wake, planned_at=0, token=ANY, deadline=deadline)
        if task.state is not _DEAD:
            return NOBODY
        return Unsure(NOBODY, id=ask.id or ANY, group=task.group, due_at=due, wake_at=wake, token=ANY, created_at=now)

    # --- by workers

    def _taken(self, task: Task, token: int, at: Search) -> list[Way]:
        """Leases that nobody was told of, where what comes next looks like it.

        Their answers were lost, or came in part: when a call is sent again, and when one part of a store is away, what
        has changed hands since is left out.
        """
        if earliest(task.wake_at) > token // 1000 or not self._looks_taken(task, token, at):
            return []
        if earliest(task.wake_at) > self._moves.clocks.highest(at.soonest) + self._moves.slack:
            return []
        shown: set[int] = set()
        for op in self._versions.get(token, ()):
            if type(op.answer) is ev.Answered and op.answer.was is not None:
                shown.add(op.answer.was)
            if op.kind == SHOWN and op.seen is not None and op.seen.state is _LEASED:
                shown.add(op.seen.wake_at)
        again = task.state is _LEASED and task.token is ANY
        taken: list[Way] = []
        for leasings in self._leasings:
            # whatever it explains, one that ends later does no better, unless just that was shown; and a second one
            # after one that nobody was told of is thought of for that alone, or where attempts were counted
            if not again or self._counted(task, token):
                taken += islice(self._held(task, leasings.in_order, at), 1)
            for until in shown:
                taken += self._held(task, leasings.by_until.get(until, ()), at)
        return taken

    def _held(self, task: Task, leasings: Iterable[tuple[int, ev.Leasing]], at: Search) -> Iterator[Way]:
        lost = task.state is _LEASED
        for leasing in self._untold(leasings, at):
            held = Unsure(
                task, state=_LEASED, wake_at=leasing.until if self._exact else ANY, token=ANY,
                planned_at=task.planned_at if lost else task.wake_at, attempt=task.attempt + 1,
                losses=task.losses + lost,
            )  # fmt: skip
            yield leasing.call, held

    def _untold(self, leasings: Iterable[tuple[int, ev.Leasing]], at: Search) -> Iterator[ev.Leasing]:
        """Questions that may have leased this task though no answer says so, by where the search stands."""
        for place, leasing in leasings:
            if place <= at.soonest and leasing.call not in at.used and leasing.call not in self._gave:
                yield leasing

    def _returned(self, task: Task, token: int, at: Search) -> list[Way]:
        """Leases that nobody was told of and the store has ended, where what comes next looks like it."""
        if not self._looks_returned(task, token):
            return []
        if task.state is _LEASED and task.token is not ANY and task.token not in self._told:
            return [(0, given_back(task, (task.token // 1000 - self._moves.clocks.fallback, NEVER)))]
        if earliest(task.wake_at) > self._moves.clocks.highest(at.soonest) + self._moves.slack:
            return []
        for leasings in self._leasings:
            for leasing in self._untold(leasings.in_order, at):
                held = Unsure(task, attempt=task.attempt + 1)
                return [(leasing.call, given_back(held, self._moves.after(leasing)))]
        return []

    def _looks_returned(self, task: Task, token: int) -> bool:
        """True if the version that is shown next is of this life, and shows it released or due at another time."""
        held = task.state is _LEASED
        plan = task.planned_at if held else task.wake_at
        for op in self._versions.get(token, ()):
            seen, answer = op.seen, op.answer
            assert seen is not None
            if type(answer) is ev.Answered and answer.was is not None and not same(task.wake_at, answer.was):
                return True
            if not same(task.id, seen.id):
                continue
            if seen.planned_at and not same(plan, seen.planned_at):
                return True
            if op.kind == LEASED and seen.losses < task.losses + held:
                return True
            waited = seen.state is (_WAITING if op.kind == SHOWN else State.CANCELLED)
            if waited and not seen.planned_at and (held or not same(task.wake_at, seen.wake_at)):
                return True
        return False

    def _counted(self, task: Task, token: int) -> bool:
        """True if the next version is of this life, with more attempts than there were."""
        for op in self._versions.get(token, ()):
            assert op.seen is not None
            if same(task.id, op.seen.id) and op.seen.attempt - (op.kind == LEASED) > task.attempt:
                return True
        return False

    def _looks_taken(self, task: Task, token: int, at: Search) -> bool:
        """True if the next version tells of a lease between."""
        if self._counted(task, token):
            return True
        taken = task.state is _LEASED and task.token is ANY
        for op in self._versions.get(token, ()):
            answer, ask = op.answer, op.ask
            if type(answer) is ev.Answered and answer.result is Result.REPLACED and type(ask) is ev.Asked:
                if answer.was is not None and not same(task.wake_at, answer.was):
                    return True
                if ask.on_conflict is OnConflict.LATEST and not taken:
                    return True
        if taken:
            return False
        for op in at.active:
            if op.kind == REFUSED and task.token == op.token:
                return True
        for place, lost in self._lost:
            if place > at.soonest:
                break
            if type(lost) is ev.Asked and lost.call not in at.used:
                # a version that nobody told of here, and somebody knew; and a change that only a lease lets through
                if lost.if_token is not None and at.last < lost.if_token < token:
                    return True
                if lost.on_conflict is OnConflict.LATEST and task.state is _WAITING:
                    return True
        return False


def _replaceable(task: Task, ask: ev.Asked, now: tuple[int, int]) -> bool:
    how, state = ask.on_conflict, task.state
    if state is State.CANCELLED or state is _DEAD or how is OnConflict.REPLACE:
        return True
    if how is OnConflict.EARLIEST:
        first = due_between(ask.due, ask.grain, *now)[0]
        due = task.due_at[1] if type(task.due_at) is tuple else task.due_at
        return state is _DONE or (state is _WAITING and (due is ANY or first < due))
    if how is OnConflict.LATEST:
        last = due_between(ask.due, ask.grain, *now)[1]
        return state is not _WAITING or last > earliest(task.due_at)
    return False
