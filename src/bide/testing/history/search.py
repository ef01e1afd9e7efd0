"""A search for an order in which everything that was done to one task is right.

Each operation took effect at one instant between question and answer. An order is right if each came before all that
were asked after its answer, and each did what the table says to what the one before it left. That is
linearizability; the search is Wing and Gong's ("Testing and verifying concurrent objects", 1993) with Lowe's memory of
what has been tried. Two things make it linear in practice:

- **Tokens rise**, so the order of all that made a version, or was shown one, is known. What is left to choose is when
  something happened that nobody saw.
- What changes nothing can be taken as soon as it is right: that never makes anything else impossible.

What was asked and never answered may have been done at any time since, once. It is thought of only where there is no
other way on: the search is there, so to speak, only for lost answers. Each such choice can be taken back.

Changes of a task that nobody was told of: by questions that were never answered, and by the purge.

Each may have been done at any time since it was asked, once, or never. A search thinks of it only where there is no
other way on, and here only of what could lead to what was shown next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from bide.core.records import OnConflict, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event
from bide.testing.history.gathered import (
    ABSENT,
    ANY,
    LAST_WRITE,
    LEASED,
    NEVER,
    NOBODY,
    REDRIVEN,
    REFUSED,
    SCHEDULED,
    SETTLED,
    SHOWN,
    Leasings,
    Op,
    Task,
    TaskHistory,
    Unsure,
    Wrong,
    earliest,
    same,
)
from bide.testing.history.moves import EXPLAIN, Moves, due_between, given_back

_LEASED = State.LEASED
_PATIENCE = 20_000
"""Steps that are tried beyond the operations there are, before a task is called undecided."""


class Undecided(Exception):
    """Too many orders are possible."""


class Stuck(NamedTuple):
    """The farthest that any order came."""

    done: int
    task: Task | None
    last: int
    active: list[Op]
    write: Op | None
    wrong: Wrong


class Search:
    """For one task. `run` says None if there is an order, else where the longest one stops."""

    def __init__(self, told: TaskHistory, moves: Moves, leasings: tuple[Leasings, Leasings], exact: bool) -> None:
        self.told = told
        self.moves = moves
        self.unseen = Unseen(told, moves, leasings, exact)
        self.ops = sorted(told.ops, key=attrgetter("asked"))
        tokens: dict[int, int] = {}
        self.written: set[int] = set()
        """The versions that an answer reported as made: an operation that is shown one of them comes after."""
        for op in self.ops:
            if op.kind <= SHOWN:
                tokens[op.token] = tokens.get(op.token, 0) + 1
                if op.kind <= LAST_WRITE:
                    self.written.add(op.token)
        self.groups = sorted(tokens.items())
        """The versions that operations were shown, in their order, and by how many operations."""
        self.stuck: Stuck | None = None
        # where an order stands
        self.task: Task | None = None
        self.last = 0
        """The highest token so far."""
        self.next = 0
        self.active: list[Op] = []
        self.soonest = NEVER
        """The earliest answer among what is active: nothing asked later can come before it."""
        self.group = 0
        self.left = self.groups[0][1] if self.groups else 0
        self.used: frozenset[int] = frozenset()
        self.in_a_row = 0
        """How many unseen things were done since the last that was seen."""
        self.done = 0
        self.choices: list[tuple[int, int, int, Any, Way | Op]] = []
        """Other ways to go on, those first that come after most that was seen, and then after the fewest unseen."""
        self.ways = count()

    def run(self) -> Stuck | None:
        ops, active, most = self.ops, self.active, len(self.ops)
        budget = 8 * most + _PATIENCE
        tried: dict[Any, list[frozenset[int]]] = {}
        while True:
            active = self.active
            while self.next < most and (op := ops[self.next]).asked <= self.soonest:
                active.append(op)
                if op.answered < self.soonest:
                    self.soonest = op.answered
                self.next += 1
            if not active:
                return None
            budget -= 1
            if budget < 0:
                raise Undecided
            if self._step():
                continue
            # stuck: something unseen, or an earlier choice was wrong. What failed before with less used up fails again
            state = (
                self.next, self.group, self.left, tuple(map(id, active)),
                self.task.known if type(self.task) is Unsure else id(self.task),
            )  # fmt: skip
            before = tried.setdefault(state, [])
            if not any(used <= self.used for used in before):
                before.append(self.used)
                self._push()
            if not self._back():
                return self.stuck

    # --- one step

    def _step(self) -> bool:
        """Take what can be taken; False: nothing can."""
        task, active = self.task, self.active
        now = self.groups[self.group][0] if self.group < len(self.groups) else NEVER
        settle: Op | None = None
        write: Op | None = None
        extends: list[Op] | None = None
        blocked = False
        for op in active:
            kind = op.kind
            if kind <= LAST_WRITE:
                if op.token == now:
                    write = op
            elif kind == SHOWN:
                if op.token == now and task is not None and op.token >= self.last and (
                    op.token == self.last or op.token not in self.written
                ) and (
                    task.token == now or task.token is ANY
                ) and self.moves.read(task, op) is None:  # fmt: skip
                    if type(task) is Unsure:
                        self.task = op.seen
                    self._take(op)
                    return True
            elif kind == ABSENT:
                if task is None or self.moves.may_come_again(task, op.answered):
                    self._take(op)
                    return True
                blocked = True
            else:
                held = task is not None and task.token == op.token and task.state is _LEASED
                if kind == REFUSED:
                    if not held:
                        self._take(op)
                        return True
                    blocked = True
                elif not held:
                    blocked = True
                elif kind == SETTLED:
                    settle = op
                elif extends is None:
                    extends = [op]
                else:
                    extends.append(op)
        if extends is not None:
            return self._extend(extends)
        if settle is not None:
            assert task is not None
            if now != task.token:
                self._may_turn(blocked)
                self.task = self.moves.settled(task, settle)
                self._take(settle)
                return True
        if write is None:
            self._stop(None, None)
            return False
        return self._write(write, blocked)

    def _write(self, write: Op, blocked: bool) -> bool:
        """Take a write if it is right; else it is where this order stops."""
        wrong: Wrong = None
        if write.token <= self.last:
            wrong = ("P12", "token %d was given twice", write.token)
        else:
            wrong = EXPLAIN[write.kind](self.moves, self.task, write)
        if wrong is not None:
            self._stop(write, wrong)
            return False
        self._may_turn(blocked)
        seen = write.seen
        assert seen is not None
        forgotten = seen.keep_until is not None and seen.finished_at is not None and seen.keep_until <= seen.finished_at
        self.task = None if forgotten else seen
        self._take(write)
        return True

    def _take(self, op: Op) -> None:
        active = self.active
        active.remove(op)
        self.done += 1
        self.in_a_row = 0
        if op.answered <= self.soonest:
            self.soonest = min([one.answered for one in active], default=NEVER)
        if op.kind <= SHOWN:
            if op.token > self.last:
                self.last = op.token
            self.left -= 1
            if not self.left:
                self.group += 1
                if self.group < len(self.groups):
                    self.left = self.groups[self.group][1]

    def _extend(self, extends: list[Op]) -> bool:
        """One of several that came at once, of which any may have been first; or one whose answer was lost."""
        assert self.task is not None
        if len(extends) > 1 or self.unseen.any:
            shown = {
                op.seen.wake_at for op in self.active if op.token == self.task.token and op.seen is not None
            }  # fmt: skip
            if shown and self.unseen.any:
                self._push()
            if len(extends) > 1:
                extends.sort(key=lambda op: (op.ask.until not in shown, -op.ask.until))  # type: ignore[union-attr]
                self._choose(extends[1:])
        self._extended(extends[0])
        return True

    def _extended(self, op: Op) -> None:
        assert self.task is not None
        self.task = Unsure(self.task, wake_at=self.unseen.until(op.ask, op.answer))
        self._take(op)

    # --- what nobody saw

    def _stop(self, write: Op | None, wrong: Wrong) -> None:
        if self.stuck is None or self.done > self.stuck.done:
            self.stuck = Stuck(self.done, self.task, self.last, list(self.active), write, wrong)

    def _snapshot(self) -> Any:
        return (
            self.task, self.last, self.next, list(self.active), self.soonest, self.group, self.left, self.used,
            self.in_a_row, self.done,
        )  # fmt: skip

    def _restore(self, snapshot: Any) -> None:
        (
            self.task, self.last, self.next, active, self.soonest, self.group, self.left, self.used,
            self.in_a_row, self.done,
        ) = snapshot  # fmt: skip
        self.active = list(active)

    def _may_turn(self, blocked: bool) -> None:
        """Before a write that is right: something that is not could be so before it, if something unseen were done."""
        if blocked and (self.unseen.any or self._may_be_gone()):
            self._push()

    def _may_be_gone(self) -> bool:
        """True if an ended task could have been forgotten by now."""
        task = self.task
        return task is not None and not task.state.live and self.moves.may_be_purged(task, self.soonest)

    def _push(self) -> None:
        """Keep each thing that may have been done unseen here as a choice, for when the search comes back."""
        self._choose(self.unseen.ways(self))

    def _choose(self, ways: Sequence[Way | Op]) -> None:
        """Keep these for when the search comes back."""
        if ways:
            snapshot = self._snapshot()
            for way in ways:
                heappush(self.choices, (-self.done, self.in_a_row, next(self.ways), snapshot, way))

    def _back(self) -> bool:
        """Go the best of the ways that are left."""
        if not self.choices:
            return False
        *_, snapshot, way = heappop(self.choices)
        self._restore(snapshot)
        if isinstance(way, Op):
            self._extended(way)
            return True
        number, self.task = way
        self.in_a_row += 1
        if number:
            self.used |= {number}
        return True


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
        """The tokens of the leases that an answer reported."""
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
                # a version that no answer here reported, and a caller knew; and a change that only a lease lets through
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
