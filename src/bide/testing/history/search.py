"""A search for an order in which all operations on one task are right.

Each operation took effect at one instant between its call and its answer. An order is right if each operation precedes
all those that were called after its answer, and if each has the effect that the lifecycle's table gives for the state
before it. This is linearizability. The algorithm is Wing and Gong's ("Testing and verifying concurrent objects", 1993)
with Lowe's cache of visited states. Two facts make it linear in practice:

- **Tokens rise**, so the order of all operations that made or showed a version is known. The search only has to choose
  when unseen changes happened.
- An operation that changes nothing is taken as soon as it is right: this rules out no other order.

*Unseen changes* are made by calls that were never answered, and by the purge. Such a call may have taken effect once,
at any time after it was made, or never. The search tries unseen changes only where no other step is possible, and only
those that could lead to the version shown next (`Unseen`). It can undo each such choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from bide.core.records import State
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
    Wrong,
    earliest,
    same,
)
from bide.testing.history.moves import Moves, given_back, held

_WAITING, _LEASED = State.WAITING, State.LEASED
_PATIENCE = 20_000
"""Steps beyond eight for each operation, after which the task is undecided."""


class Undecided(Exception):
    """Too many orders are possible."""


class Stuck(NamedTuple):
    """The state in which the longest order stopped."""

    done: int
    task: Task | None
    last: int
    active: list[Op]
    write: Op | None
    wrong: Wrong


class Search:
    """The search for one task. `run` returns None if there is an order, else where the longest one stops."""

    def __init__(self, history: TaskHistory, moves: Moves, leasings: tuple[Leasings, Leasings], exact: bool) -> None:
        self.told = history
        self.moves = moves
        self.unseen = Unseen(history, moves, leasings, exact)
        self.ops = sorted(history.ops, key=attrgetter("asked"))
        self.written = {op.token for op in self.ops if op.kind <= LAST_WRITE}
        """The versions that an answer reported as made: an operation that shows such a version comes after it."""
        lowest = accumulate((_version(op) for op in reversed(self.ops)), min, initial=NEVER)
        self._lowest = list(lowest)[::-1]
        """The lowest version that the operations from each place on made or showed."""
        self.stuck: Stuck | None = None
        # the state of the current order
        self.task: Task | None = None
        self.last = 0
        """The highest token so far."""
        self.next = 0
        self.active: list[Op] = []
        self.soonest = NEVER
        """The earliest answer among the active operations: no operation called later can come before it."""
        self.now = NEVER
        """The lowest version that an operation still to come made or showed."""
        self.used: frozenset[int] = frozenset()
        self.in_a_row = 0
        """The number of unseen changes since the last operation."""
        self.done = 0
        self.choices: list[tuple[int, int, int, Any, Way | Op]] = []
        """Choices to return to: first those after the most operations, then those after the fewest unseen changes."""
        self.ways = count()

    def run(self) -> Stuck | None:
        budget = 8 * len(self.ops) + _PATIENCE
        tried: dict[Any, list[frozenset[int]]] = {}
        while self._activate():
            budget -= 1
            if budget < 0:
                raise Undecided
            if self._step():
                continue
            # stuck: an unseen change is missing, or an earlier choice was wrong. A state that failed before with fewer
            # lost calls used fails again
            before = tried.setdefault((self.next, tuple(map(id, self.active)), self.task), [])
            if not any(used <= self.used for used in before):
                before.append(self.used)
                self._push()
            if not self._back():
                return self.stuck
        return None

    def _activate(self) -> bool:
        """Add the operations that may come next to the active ones; False if no operation is left."""
        ops, active = self.ops, self.active
        soonest = min([op.answered for op in active], default=NEVER)
        while self.next < len(ops) and (op := ops[self.next]).asked <= soonest:
            active.append(op)
            soonest = min(soonest, op.answered)
            self.next += 1
        self.soonest = soonest
        self.now = min([self._lowest[self.next], *map(_version, active)])
        return bool(active)

    # --- one step

    def _step(self) -> bool:
        """Take one operation; False if none can be taken."""
        task, now = self.task, self.now
        settle: Op | None = None
        write: Op | None = None
        extends: list[Op] | None = None
        blocked = False
        for op in self.active:
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
                within = self.moves.during(settle.ask, settle.answer)
                self.task = self.moves.settled(task, settle.ask, within)  # type: ignore[arg-type]
                self._take(settle)
                return True
        if write is None:
            self._stop(None, None)
            return False
        return self._write(write, blocked)

    def _write(self, write: Op, blocked: bool) -> bool:
        """Take a write if it is right; else this order stops here."""
        wrong: Wrong = None
        if write.token <= self.last:
            wrong = ("P12", "token %d was given twice", write.token)
        else:
            wrong = self.moves.write(self.task, write)
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
        self.active.remove(op)
        self.done += 1
        self.in_a_row = 0
        if op.kind <= SHOWN:
            self.last = max(self.last, op.token)

    def _extend(self, extends: list[Op]) -> bool:
        """Take one of several concurrent extends, any of which may have been first; a lost extend may precede it."""
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
        self.task = replace(self.task, wake_at=self.unseen.until(op.ask, op.answer))
        self._take(op)

    # --- unseen changes, and choices

    def _stop(self, write: Op | None, wrong: Wrong) -> None:
        if self.stuck is None or self.done > self.stuck.done:
            self.stuck = Stuck(self.done, self.task, self.last, list(self.active), write, wrong)

    def _may_turn(self, blocked: bool) -> None:
        """Before a right write, keep the unseen changes as choices: one of them may make a blocked operation right."""
        task = self.task
        if blocked and (self.unseen.any or (task is not None and self.moves.may_be_purged(task, self.soonest))):
            self._push()

    def _push(self) -> None:
        """Keep each possible unseen change at this point as a choice to return to."""
        self._choose(self.unseen.ways(self))

    def _choose(self, ways: Sequence[Way | Op]) -> None:
        """Keep these as choices to return to."""
        if ways:
            here = self.task, self.last, self.next, tuple(self.active), self.used, self.in_a_row, self.done
            for way in ways:
                heappush(self.choices, (-self.done, self.in_a_row, next(self.ways), here, way))

    def _back(self) -> bool:
        """Return to the best remaining choice; False if none is left."""
        if not self.choices:
            return False
        *_, here, way = heappop(self.choices)
        self.task, self.last, self.next, active, self.used, self.in_a_row, self.done = here
        self.active = list(active)
        if isinstance(way, Op):
            self._extended(way)
            return True
        number, self.task = way
        self.in_a_row += 1
        if number:
            self.used |= {number}
        return True


def _version(op: Op) -> int:
    """The version that the operation made or showed; NEVER: none."""
    return op.token if op.kind <= SHOWN else NEVER


_NONE: frozenset[int] = frozenset()
Way: TypeAlias = tuple[int, Task | None]
"""The number of a call (0: no call, as for the purge) and the task after it."""


class Unseen:
    """The possible unseen changes of one task."""

    def __init__(self, history: TaskHistory, moves: Moves, leasings: tuple[Leasings, Leasings], exact: bool) -> None:
        self._lost = history.lost
        self._moves = moves
        self._leasings = leasings
        self._exact = exact
        self._versions: dict[int, list[Op]] = {}
        for op in history.ops:
            if op.kind <= SHOWN:
                self._versions.setdefault(op.token, []).append(op)
        self._begun: dict[str, set[int]] = {}
        """By the id of a life, the lost calls that would begin it; under "", redrives whose id the app makes."""
        for _, lost in history.lost:
            life = lost.id if type(lost) is ev.Asked else lost.next_id if type(lost) is ev.Settling else None
            if life is not None and (life or (type(lost) is ev.Asked and lost.asks is Asks.REDRIVE)):
                self._begun.setdefault(life, set()).add(lost.call)
        self._told = frozenset(history.leases)
        """The tokens of the leases that an answer reported."""
        self._gave = {op.ask.call for op in history.leases.values()}  # type: ignore[union-attr]
        self.any = bool(history.lost or leasings[0].in_order)
        """True if any call was lost."""

    def until(self, ask: Event, answer: Event | None) -> Any:
        """The end of an extended lease. A store with its own clock counts from that, and not from the worker's."""
        assert type(ask) is ev.Extending
        if self._exact:
            return ask.until
        if ask.now is None:
            return ANY
        first, last = self._moves.after(ask) if answer is None else self._moves.during(ask, answer)
        lasts = ask.until - ask.now
        return min(first + lasts, ask.until), max(last + lasts, ask.until)

    def ways(self, at: Search) -> list[Way]:
        """The possible unseen changes in the current state of the search, the likeliest first."""
        task, moves, ways = at.task, self._moves, []
        token = at.now
        still = task is not None and task.token == token  # the same version is shown again
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
        """True if the life that is shown next can follow from this change."""
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
        """True if every next operation would still be wrong after this change."""
        moves = self._moves
        return not any(
            moves.write(made, op) is None if op.kind <= LAST_WRITE and op.token == token
            else made is not None and moves.read(made, op) is None if op.kind == SHOWN and op.token == token
            else made is None if op.kind == ABSENT
            else op.kind == REFUSED and (made is None or made.token != op.token)
            for op in active
        )  # fmt: skip

    # --- changes by clients and holders

    def _made(self, task: Task | None, ask: Any, now: tuple[int, int]) -> Task | None:
        """The task after a lost call takes effect; NOBODY: the call would change nothing."""
        if type(ask) is ev.Settling or type(ask) is ev.Extending:
            if task is None or task.state is not _LEASED or task.token != ask.token:
                return NOBODY
            if type(ask) is ev.Settling:
                return self._moves.settled(task, ask, now)
            assert type(ask) is ev.Extending
            return NOBODY if task.wake_at == ask.until else replace(task, wake_at=self.until(ask, None))
        made = self._moves.made(task, ask, now)
        return None if ask.asks is Asks.CANCEL and ask.keeps is False and made is not NOBODY else made

    # --- changes by workers

    def _taken(self, task: Task, token: int, at: Search) -> list[Way]:
        """Leases that no answer reported, if the next version suggests one.

        Their answers were lost or incomplete. An answer is incomplete when a call is sent again or a part of the store
        is away: it omits the tasks that have changed hands since.
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
        found: list[ev.Leasing] = []
        for leasings in self._leasings:
            # only the lease that ends first is tried: a later end explains no more, unless exactly that end was shown.
            # A second unreported lease in a row is tried only for such an end, or where attempts were counted
            if not again or self._counted(task, token):
                found += islice(self._untold(leasings.in_order, at), 1)
            for until in shown:
                found += self._untold(leasings.by_until.get(until, ()), at)
        return [(leasing.call, held(task, leasing.until if self._exact else ANY)) for leasing in found]

    def _untold(self, leasings: Iterable[tuple[int, ev.Leasing]], at: Search) -> Iterator[ev.Leasing]:
        """Lease calls that may have leased this task without an answer that reports it, up to the current state."""
        for place, leasing in leasings:
            if place <= at.soonest and leasing.call not in at.used and leasing.call not in self._gave:
                yield leasing

    def _returned(self, task: Task, token: int, at: Search) -> list[Way]:
        """Unreported leases that the store itself has ended, if the next version suggests one."""
        if not self._looks_returned(task, token):
            return []
        if task.state is _LEASED and task.token is not ANY and task.token not in self._told:
            return [(0, given_back(task, (task.token // 1000 - self._moves.clocks.fallback, NEVER)))]
        if earliest(task.wake_at) > self._moves.clocks.highest(at.soonest) + self._moves.slack:
            return []
        for leasings in self._leasings:
            for leasing in self._untold(leasings.in_order, at):
                held = replace(task, attempt=task.attempt + 1)
                return [(leasing.call, given_back(held, self._moves.after(leasing)))]
        return []

    def _looks_returned(self, task: Task, token: int) -> bool:
        """True if the next version is of this life and shows it released or due at another time."""
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
        """True if the next version is of this life and has more attempts."""
        for op in self._versions.get(token, ()):
            assert op.seen is not None
            if same(task.id, op.seen.id) and op.seen.attempt - (op.kind == LEASED) > task.attempt:
                return True
        return False

    def _looks_taken(self, task: Task, token: int, at: Search) -> bool:
        """True if an unseen lease counts, makes the next operation right, or a lost call possible that was not."""
        leased, after = held(task, ANY), self._moves.after
        return (
            self._counted(task, token)
            or not self._is_unlikely(leased, token, at.active)
            or any(
                place <= at.soonest and lost.call not in at.used
                and self._made(task, lost, after(lost)) is NOBODY
                and self._made(leased, lost, after(lost)) is not NOBODY
                for place, lost in self._lost
            )
        )  # fmt: skip
