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
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from bide.core.records import State
from bide.testing.history.gathered import (
    ABSENT,
    LAST_WRITE,
    NEVER,
    REFUSED,
    SETTLED,
    SHOWN,
    Leasings,
    Op,
    TaskHistory,
)
from bide.testing.history.moves import EXPLAIN, Moves
from bide.testing.history.unseen import Unseen, Way
from bide.testing.history.unsure import ANY, Task, Unsure, Wrong

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
        """The versions that somebody was told to have made: who is shown one of them comes after."""
        for op in self.ops:
            if op.kind <= SHOWN:
                tokens[op.token] = tokens.get(op.token, 0) + 1
                if op.kind <= LAST_WRITE:
                    self.written.add(op.token)
        self.groups = sorted(tokens.items())
        """The versions that somebody was shown, in their order, and by how many operations."""
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
