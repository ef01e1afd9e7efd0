"""Visit every state of the model, breadth first, and check the invariants in each state and along each step.

A state has five parts: the store, two workers, two clients. The parts are numbered. The next steps of a part, and their
effect on another part, are computed once for each pair. The workers are interchangeable, and so are clients with the
same number of verbs: of states that differ only by a swap, one is visited.

The liveness part of P2 is checked from *every* state in which a task is owed: there must be a path of steps that help
(nothing fails any more, but every notification is lost) to a delivery by the live lease, or to the end of the task. No
step can make this impossible, so every fair run gets there: a run in which a step that is possible again and again is
finally taken. On the chosen path, time passes only when no other step is possible. So the number of instants on it is
the delay caused by lost messages, and not by a slow actor.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from bide_proofs.model.actors import Asking, Working, fresh_worker, seen_by, wrong_with
from bide_proofs.model.store import LEASED, NOTHING, TICK, WAITING, Answer, Bounds, Client, Rules, Shared, Step, Store

INVARIANTS = (
    "P1: no delivery begins before the wake that it was leased for, by the store's clock",
    "P2: what was acknowledged is there until it is settled after a delivery, or cancelled",
    "P2: from every state in which a task is owed, a way leads to its delivery or its end, in time (see Bounds.latest)",
    "P3: settle and extend are accepted from the live lease, and from no other; a live lease has a live task",
    "P4: after `cancelled` no delivery of that life begins; `not_found` is not said of what is owed",
    "P5: a request sent twice is done once, and answered alike; an older one of a caller never follows a newer",
    "P8: a worker does not sleep past the next wake, unless a wake-up is on its way, or was lost",
    "P10: body and index agree; of a task that is over, neither is left",
    "P12: a token rises at every transition, also over the end of a life; no two leases share one; a life has its id",
)
_GOAL, _STUCK = 0xFFFFFFFF, 0xFFFFFFFE
_REACHED, _HELPS, _TICKS, _NO_HELP = 0, 1, 2, 9
"""The ratings of steps: of two possible steps, the lower one is taken."""
_NAMES = ("the store", "worker A", "worker B", "client 1", "client 2")
"""The names of the parts, by place in a state."""
_State: TypeAlias = tuple[int, int, int, int, int]
"""The store, two workers and two clients, by number."""


class Found(NamedTuple):
    """The result of an exploration."""

    states: int
    transitions: int
    depth: int
    """The number of steps to the farthest state."""
    seconds: float
    """Seconds of processor time."""
    lateness: int
    """The most instants from a wake time to the delivery or end of its task, when all notifications are lost."""
    broken: str = ""
    """The broken invariant; empty if none is."""
    trace: tuple[str, ...] = ()
    """The shortest path to it, in words."""


class _Way(NamedTuple):
    """A step, with numbers for its parts."""

    shared: int
    part: int
    effect: int
    rated: int
    broken: str
    told: str


class _Numbers(dict[Any, int]):
    """Gives each value a number at its first use."""

    def __init__(self) -> None:
        self.values_by_number: list[Any] = []

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        self.values_by_number.append(value)
        return number


class Explorer:
    """All states of one model."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        self._store = Store(rules, bounds)
        self._working, self._asking = Working(self._store), Asking(self._store)
        self._number = _Numbers()
        self._value = self._number.values_by_number
        assert self._number[NOTHING] == 0
        self._told: set[str] = set()
        self._ways = cache(self._work_out)
        self._seen = cache(lambda effect, part: self._number[seen_by(self._value[effect], self._value[part], rules)])
        fresh = fresh_worker(rules, bounds)
        start = Shared(), fresh, fresh, *map(Client, bounds.verbs)
        self._start: _State = tuple(self._number[part] for part in start)  # type: ignore[assignment]
        # for each visited state: its parts, its predecessor, its next state on the path, and if that step takes time
        self._order: list[_State] = [_merged(self._start)]
        self._before, self._onward, self._ticks = array("I", [0]), array("I"), bytearray()
        self._transitions = self._depth = 0

    def steps(self) -> set[str]:
        """Every step that was possible in any state, in words, to verify that the exploration covers them."""
        return self._told

    def explore(self) -> Found:
        """Visit all states, or stop at the first broken invariant."""
        began = time.process_time()
        broken, trace = self._visit()
        lateness = 0
        if not broken:
            lateness, broken, trace = self._lateness()
        seconds = time.process_time() - began
        return Found(len(self._order), self._transitions, self._depth, seconds, lateness, broken, trace)

    def _visit(self) -> tuple[str, tuple[str, ...]]:
        """Visit states breadth first; return the first broken invariant and the path to it."""
        order = self._order
        numbers = {order[0]: 0}
        at, level_ends = 0, 1
        while at < len(order):
            if at == level_ends:
                self._depth, level_ends = self._depth + 1, len(order)
            state = order[at]
            best, rank = (_STUCK, _TICKS + 1) if self._value[state[0]].live else (_GOAL, _REACHED)
            turns = self._turns(state)
            if wrong := next((wrong for _, _, wrong in (turns[-1], *turns) if wrong), ""):
                return wrong, (*self._way_to(at), wrong)
            for place, ways, _ in turns:
                self._transitions += len(ways)
                for way in ways:
                    after = _merged(self._after(state, place, way))
                    number = numbers.get(after)
                    if number is None:
                        number = numbers[after] = len(order)
                        order.append(after)
                        self._before.append(at)
                    if way.broken:
                        return way.broken, (*self._way_to(at, way.broken, after), way.broken)
                    if way.rated < rank:
                        best, rank = (number if way.rated else _GOAL), way.rated
            self._onward.append(best)
            self._ticks.append(rank == _TICKS)
            at += 1
        return "", ()

    def _lateness(self) -> tuple[int, str, tuple[str, ...]]:
        """The greatest lateness, in instants; or the invariant broken if a task is stuck or too late, and the path."""
        order, onward = self._order, self._onward
        unknown, on_the_way = 0xFFFF, 0xFFFE
        instants = array("H", [unknown]) * len(order)
        worst = 0
        for begin in range(len(order)):
            path = []
            at = begin
            while at < _STUCK and instants[at] == unknown:
                instants[at] = on_the_way
                path.append(at)
                at = onward[at]
            if at == _STUCK or (at != _GOAL and instants[at] == on_the_way):
                return 0, "P2: an acknowledged task is stuck", self._stuck(path[0], "P2: an acknowledged task is stuck")
            left = 0 if at == _GOAL else instants[at]
            for state in reversed(path):
                left += self._ticks[state]
                instants[state] = left
            wake = self._value[order[begin][0]].entry
            if wake is not None and instants[begin] - wake > worst:
                worst = instants[begin] - wake
                if worst > self.bounds.latest:
                    late = "P8: a task is later than it may be"
                    return 0, late, self._stuck(begin, late)
        return worst, "", ()

    # --- possible next steps

    def _turns(self, state: _State) -> list[tuple[int, list[_Way], str]]:
        """By place, the steps of each part and its broken invariant. Of two equal parts, one is included."""
        shared, one, two, first, second = state
        places = [1, 2, 3, 4, 0]
        if one == two:
            places.remove(2)
        if first == second:
            places.remove(4)
        return [(place, *self._ways(shared, state[place])) for place in places]

    def _work_out(self, shared_number: int, number: int) -> tuple[list[_Way], str]:
        """The steps of the part with that number when the store is in this state, and the broken invariant, if any."""
        shared, part = self._value[shared_number], self._value[number]
        wrong = ""
        if part is shared:
            steps, wrong = self._steps_of_store(shared), _wrong_with_store(shared)
        elif isinstance(part, Client):
            steps = self._asking.steps(shared, part)
        else:
            steps, wrong = self._working.steps(shared, part), wrong_with(shared, part)
        return [self._way(step) for step in steps], wrong

    def _way(self, step: Step) -> _Way:
        self._told.add(step.told)
        rated = _TICKS if step.after.effect.tick else _NO_HELP
        if step.helps:
            rated = _REACHED if step.goal else _HELPS
        part = step.after.shared if step.part is None else step.part
        number, after = self._number, step.after
        return _Way(
            number[after.shared], number[part], number[after.effect], rated, step.broken or after.broken, step.told
        )

    def _steps_of_store(self, shared: Shared) -> Iterator[Step]:
        """The store's own steps: an instant passes, or an ended task is purged."""
        body, entry = shared.body, shared.entry
        later = shared._replace(
            body=None if body is None else body._replace(wake=max(0, body.wake - 1)),
            entry=None if entry is None else max(0, entry - 1),
        )
        yield Step("an instant passes", Answer("", later, TICK), None)
        purged = self._store.purge(shared)
        if purged is not None:
            yield Step("what was kept long enough is purged", Answer("", purged), None)

    def _after(self, state: _State, place: int, way: _Way) -> _State:
        """The state after a step at that place, with the step's effect on the other workers."""
        shared, part, effect = way[0], way[1], way[2]
        _, one, two, first, second = state
        if effect:  # 0: no effect on other parts
            one, two = self._seen(effect, one), self._seen(effect, two)
        return (
            shared, part if place == 1 else one, part if place == 2 else two,
            part if place == 3 else first, part if place == 4 else second,
        )  # fmt: skip

    # --- traces, in words

    def _way_to(self, at: int, broken: str = "", then: _State | None = None) -> Iterator[str]:
        """The shortest path to state `at`, and on to the state `then` by the step that breaks `broken`."""
        way = [] if then is None else [(then, broken)]
        while at:
            way.append((self._order[at], ""))
            at = self._before[at]
        state = self._start
        for goal, breaks in reversed(way):
            told, state = self._step(state, goal, breaks)
            yield told

    def _stuck(self, at: int, wrong: str) -> tuple[str, ...]:
        told = [*self._way_to(at), wrong, "from here, if nothing goes wrong any more:"]
        seen: set[int] = set()
        state = self._order[at]
        while at not in seen:
            seen.add(at)
            at = self._onward[at]
            if at >= _STUCK:
                break
            words, state = self._step(state, self._order[at])
            told.append(words)
        return *told, "and so on for ever"

    def _step(self, state: _State, goal: _State, broken: str = "") -> tuple[str, _State]:
        """The step from `state`, whose parts have fixed places, to the merged state `goal`, breaking `broken`."""
        for place, ways, _ in self._turns(state):
            for way in ways:
                new = self._after(state, place, way)
                if _merged(new) == goal and (not broken or way.broken == broken):
                    return f"{way.told.format(me=_NAMES[place])} [{_in_words(self._value[new[0]])}]", new
        raise AssertionError("no step leads from this state to the next one of its trace")


def _merged(state: _State) -> _State:
    """The representative of all states that differ only by a swap of workers or clients."""
    shared, one, two, first, second = state
    if one > two:
        one, two = two, one
    if first > second:
        first, second = second, first
    return shared, one, two, first, second


def _wrong_with_store(shared: Shared) -> str:
    """The broken invariant of the store; empty if none is."""
    if shared.owed and not shared.live:
        return "P2: a task that was acknowledged is nowhere"
    if not shared.owed and shared.live:
        return "P5: a task that had ended is there again"
    if shared.body is not None and shared.live and shared.entry != shared.body.wake:
        return "P2: the index does not say when the task wakes"
    if not shared.live and shared.entry is not None:
        return "P10: an entry of the index is left of a task that is over"
    return ""


def _in_words(shared: Shared) -> str:
    body = shared.body
    if body is None:
        return "no task"
    if body.state == WAITING:
        return f"waiting, due in {body.wake}" if body.wake else "waiting, due"
    if body.state == LEASED:
        return f"leased for another {body.wake}" if body.wake else "leased, and the lease has ended"
    return body.state
