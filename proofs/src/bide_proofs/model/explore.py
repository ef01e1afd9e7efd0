"""Visits every state of the model, breadth first, and looks at the invariants in each, and along the ways between.

A state is five parts: the store, two workers, two clients. The parts have numbers, so that a state is one integer, and
what a part may do next, and what that means to another part, is worked out once for each pair and looked up from then
on. Workers are alike, and so are clients of as many verbs: of states that differ by a swap one is visited. That costs
some 200 bytes for each state.

What has to happen in the end (P2) is looked at from *every* state in which a task is owed: there has to be a way by
steps that help (nothing fails any more, but every wake-up is lost) to a delivery by the live lease, or to the end of
the task. No step can make that impossible, so every fair run gets there: one in which what is possible again and again
is done at last. The way chosen is that of somebody who hurries: time passes only when nothing else can be done. So the
instants on it are how late a delivery is because of what was lost, and not because somebody was slow.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from bide_proofs.model.client import Asking
from bide_proofs.model.records import (
    LEASED,
    NOTHING,
    TICK,
    WAITING,
    Bounds,
    Client,
    Effect,
    Move,
    Rules,
    Shared,
    Worker,
)
from bide_proofs.model.store import Store
from bide_proofs.model.worker import Working, fresh_worker, seen_by, wrong_with

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
_BITS = 16
_MASK = (1 << _BITS) - 1
_REACHED, _HELPS, _TICKS, _NO_HELP = 0, 1, 2, 9
"""How a step is rated: of two that lead on, the lower is taken."""
_NAMES = ("worker A", "worker B", "client 1", "client 2", "the store")
_STORE = 4
"""The places of those who take steps: workers, clients, and the store itself."""

Part = TypeVar("Part", bound=tuple)  # type: ignore[type-arg]


class Numbers(Generic[Part]):
    """Numbers for the values of a part."""

    def __init__(self) -> None:
        self.values: list[Part] = []
        self._numbers: dict[Part, int] = {}

    def of(self, value: Part) -> int:
        """Its number; a new one for a new value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            if number > _MASK:
                raise OverflowError(f"more than {_MASK + 1:,} values of one part: choose smaller bounds")
            self.values.append(value)
        return number


class Found(NamedTuple):
    """What an exploration came to."""

    states: int
    transitions: int
    depth: int
    """Steps to the farthest state."""
    seconds: float
    """Of the processor's time."""
    lateness: int
    """The most instants between a wake and what it is for, when all wake-ups are lost."""
    broken: str = ""
    """The invariant that does not hold; empty: all do."""
    trace: tuple[str, ...] = ()
    """The shortest way there, in words."""


class _Visited:
    """The states that were visited, by number: how each was reached, and how it leads on."""

    def __init__(self, start: int) -> None:
        self.order = [start]
        self.before = array("I", [0])
        self.onward = array("I")
        self.ticks = bytearray()
        """Whether that takes an instant."""
        self.transitions = self.depth = 0
        self._began = time.process_time()

    def way_to(self, at: int) -> list[int]:
        """The states after the first one, up to that one."""
        way = []
        while at:
            way.append(self.order[at])
            at = self.before[at]
        return way[::-1]

    def found(self, lateness: int = 0, broken: str = "", trace: tuple[str, ...] = ()) -> Found:
        seconds = time.process_time() - self._began
        return Found(len(self.order), self.transitions, self.depth, seconds, lateness, broken, trace)


_Way = tuple[int, int, int, int, str, str]
"""The store, the part that moves and the effect, by number; how it is rated; what it breaks; and in words."""
_Ways = tuple[list[_Way], str]
"""And the invariant that does not hold where they begin."""
_State = tuple[int, int, int, int, int]
"""The store, two workers and two clients, by number."""


class Explorer:
    """All states of one model."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        self._store = Store(rules, bounds)
        self._working, self._asking = Working(self._store), Asking(self._store)
        self._shared: Numbers[Shared] = Numbers()
        self._workers: Numbers[Worker] = Numbers()
        self._clients: Numbers[Client] = Numbers()
        self._effects: Numbers[Effect] = Numbers()
        self._effects.of(NOTHING)
        of_workers: dict[int, _Ways] = {}
        of_clients: dict[int, _Ways] = {}
        self._ways: tuple[dict[int, _Ways], ...] = (of_workers, of_workers, of_clients, of_clients, {})
        """By place, then by the store and the part in that place."""
        self._seen: dict[int, int] = {}
        """By effect and worker: the worker after somebody else's step of that effect."""

    def steps(self) -> set[str]:
        """Every step that somebody could take anywhere, in words: to see that what was explored had something in it."""
        return {way[-1] for known in self._ways for ways, _ in known.values() for way in ways}

    # --- what may come next

    def _turns(self, state: _State) -> list[tuple[int, _Ways]]:
        """The places of those who are to be asked, and what each may do. Of two who are alike one is asked."""
        shared, one, two, first, second = state
        parts = ((0, one), (1, two), (2, first), (3, second), (_STORE, 0))
        alike = (1 if one == two else -1, 3 if first == second else -1)
        turns = []
        for place, part in parts:
            if place not in alike:
                pair = shared << _BITS | part
                turns.append((place, self._ways[place].get(pair) or self._work_out(place, pair)))
        return turns

    def _work_out(self, place: int, pair: int) -> _Ways:
        shared, part, wrong = self._shared.values[pair >> _BITS], pair & _MASK, ""
        if place == _STORE:
            moves, wrong = self._moves_of_store(shared), _wrong_with(shared)
        elif place < 2:
            worker = self._workers.values[part]
            moves, wrong = self._working.moves(shared, worker), wrong_with(self.bounds, shared, worker)
        else:
            moves = self._asking.moves(shared, self._clients.values[part])
        entry = self._ways[place][pair] = [self._way(move) for move in moves], wrong
        return entry

    def _way(self, move: Move) -> _Way:
        part = 0
        if isinstance(move.part, Worker):
            part = self._workers.of(move.part)
        elif move.part is not None:
            part = self._clients.of(move.part)
        rated = _TICKS if move.effect.tick else _NO_HELP
        if move.helps:
            rated = _REACHED if move.goal else _HELPS
        return self._shared.of(move.shared), part, self._effects.of(move.effect), rated, move.broken, move.told

    def _moves_of_store(self, shared: Shared) -> Iterator[Move]:
        """An instant passes; what was kept for its time is purged."""
        body = shared.body
        later = shared._replace(
            body=None if body is None else body._replace(wake=max(0, body.wake - 1)),
            entry=None if shared.entry is None else max(0, shared.entry - 1),
        )
        yield Move("an instant passes", later, None, TICK)
        purged = self._store.purge(shared)
        if purged is not None:
            yield Move("what was kept long enough is purged", purged, None)

    def _after(self, state: _State, place: int, way: _Way) -> _State:
        """The state after a way that somebody goes: the workers see what it means to them."""
        _, one, two, first, second = state
        shared, part, effect = way[0], way[1], way[2]
        if effect:
            one, two = self._seeing(effect, one), self._seeing(effect, two)
        if place == 0:
            return shared, part, two, first, second
        if place == 1:
            return shared, one, part, first, second
        if place == 2:
            return shared, one, two, part, second
        return (shared, one, two, first, part) if place == 3 else (shared, one, two, first, second)

    def _seeing(self, effect: int, worker: int) -> int:
        pair = effect << _BITS | worker
        seen = self._seen.get(pair)
        if seen is None:
            after = seen_by(self._effects.values[effect], self._workers.values[worker], self.rules)
            seen = self._seen[pair] = self._workers.of(after)
        return seen

    # --- every state

    def explore(self) -> Found:
        """Visits all states, or as far as the first in which something is broken."""
        visited = _Visited(_key(self._start()))
        order, after = visited.order, self._after
        numbers = {order[0]: 0}
        at, level_ends = 0, 1
        while at < len(order):
            if at == level_ends:
                visited.depth, level_ends = visited.depth + 1, len(order)
            state = _parts(order[at])
            best, rank = _STUCK, _TICKS + 1
            if not self._shared.values[state[0]].live:
                best, rank = _GOAL, _REACHED
            turns = self._turns(state)
            if wrong := next((wrong for _, (_, wrong) in (turns[-1], *turns) if wrong), ""):
                return self._broken(visited, wrong, at)
            for place, (ways, _) in turns:
                visited.transitions += len(ways)
                for way in ways:
                    key = _key(after(state, place, way))
                    number = numbers.get(key)
                    if number is None:
                        number = numbers[key] = len(order)
                        order.append(key)
                        visited.before.append(at)
                    rated, broken = way[3], way[4]
                    if broken:
                        return self._broken(visited, broken, at, key)
                    if rated < rank:
                        best, rank = (number if rated else _GOAL), rated
            visited.onward.append(best)
            visited.ticks.append(rank == _TICKS)
            at += 1
        lateness, stuck = self._lateness(visited)
        if stuck is not None:
            late = "P2: an acknowledged task is stuck" if lateness is None else "P8: a task is later than it may be"
            found = self._broken(visited, late, stuck)
            return found._replace(trace=(*found.trace, *self._stuck(visited, stuck)))
        return visited.found(lateness or 0)

    def _start(self) -> _State:
        workers = [self._workers.of(fresh_worker(self.rules, self.bounds)) for _ in range(2)]
        clients = [self._clients.of(Client(left)) for left in self.bounds.verbs]
        return self._shared.of(Shared()), workers[0], workers[1], clients[0], clients[1]

    def _lateness(self, visited: _Visited) -> tuple[int | None, int | None]:
        """The most instants by which a wake is missed; and a state from which the goal is missed, or is too late."""
        order, onward, ticks = visited.order, visited.onward, visited.ticks
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
                return None, path[0]
            left = 0 if at == _GOAL else instants[at]
            for state in reversed(path):
                left += ticks[state]
                instants[state] = left
            wake = self._shared.values[order[begin] >> 4 * _BITS].entry
            if wake is not None and instants[begin] - wake > worst:
                worst = instants[begin] - wake
                if worst > self.bounds.latest:
                    return worst, begin
        return worst, None

    # --- what went wrong

    def _broken(self, visited: _Visited, wrong: str, at: int, then: int | None = None) -> Found:
        """`wrong` in the state that was visited as number `at`; or in the step from there to the state `then`."""
        told, state = [], self._start()
        for key in visited.way_to(at):
            words, state = self._step(state, key)
            told.append(words)
        if then is not None:
            told.append(self._step(state, then, wrong)[0])
        return visited.found(broken=wrong, trace=(*told, wrong))

    def _stuck(self, visited: _Visited, at: int) -> Iterator[str]:
        yield "from here, if nothing goes wrong any more:"
        seen: set[int] = set()
        state = _parts(visited.order[at])
        while at not in seen and at < _STUCK:
            seen.add(at)
            at = visited.onward[at]
            if at < _STUCK:
                told, state = self._step(state, visited.order[at])
                yield told
        yield "and so on for ever"

    def _step(self, state: _State, key: int, broken: str = "") -> tuple[str, _State]:
        """The step from `state`, in which everybody has a place of his own, to the state `key`, breaking `broken`."""
        for place, (ways, _) in self._turns(state):
            for way in ways:
                new = self._after(state, place, way)
                if _key(new) == key and (not broken or way[4] == broken):
                    return self._words(way[5].format(me=_NAMES[place]), new), new
        raise AssertionError("no step leads from this state to the next one of its trace")

    def _words(self, told: str, state: _State) -> str:
        shared = self._shared.values[state[0]]
        body = shared.body
        if body is None:
            now = "no task"
        elif body.state == WAITING:
            now = f"waiting, due in {body.wake}" if body.wake else "waiting, due"
        elif body.state == LEASED:
            now = f"leased for another {body.wake}" if body.wake else "leased, and the lease has ended"
        else:
            now = body.state
        return f"{told} [{now}]"


def _key(state: _State) -> int:
    """A state as one number, the same for all that differ in who is who."""
    shared, one, two, first, second = state
    if one > two:
        one, two = two, one
    if first > second:
        first, second = second, first
    return (((shared << _BITS | one) << _BITS | two) << _BITS | first) << _BITS | second


def _parts(key: int) -> _State:
    return (
        key >> 4 * _BITS, key >> 3 * _BITS & _MASK, key >> 2 * _BITS & _MASK, key >> _BITS & _MASK, key & _MASK,
    )  # fmt: skip


def _wrong_with(shared: Shared) -> str:
    """The invariant of the store that does not hold; empty: all do."""
    body = shared.body
    if shared.owed and not shared.live:
        return "P2: a task that was acknowledged is nowhere"
    if not shared.owed and shared.live:
        return "P5: a task that had ended is there again"
    if body is not None and shared.live and shared.entry != body.wake:
        return "P2: the index does not say when the task wakes"
    if not shared.live and shared.entry is not None:
        return "P10: an entry of the index is left of a task that is over"
    return ""
