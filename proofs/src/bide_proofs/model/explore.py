"""Visits every state of the model, breadth first, and looks at the invariants in each, and along the ways between.

A state is five parts: the store, two workers, two clients. The parts have numbers, so that a state is one integer, and
what a part may do next, and what that means to another part, is worked out once for each pair and looked up from then
on. Workers are alike, and so are clients of as many verbs: of states that differ by a swap one is visited. That costs
some 2 µs for each way and 200 bytes for each state.

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
    "P8: a worker does not sleep past the next wake, unless a tiding is on its way, or was lost",
    "P10: body and index agree; of a task that is over, neither is left",
    "P12: a token rises at every transition, also over the end of a life; no two leases share one; a life has its id",
)
_GOAL, _STUCK = 0xFFFFFFFF, 0xFFFFFFFE
_BITS = 16
_MASK = (1 << _BITS) - 1
_TICKS, _NO_HELP = 2, 9
"""How a step is rated: the goal 0, one that helps 1; of two the lower is taken."""

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


_Way = tuple[int, int, int, bool, bool, str, str]
"""The store, the part that moves and the effect, by number; whether it helps, whether it is a goal; broken, told."""
_Ways = tuple[list[_Way], str]
"""And the invariant that does not hold where they begin."""
_Named = tuple[int, int, int, int, int]
"""A state as its parts: store, workers, clients."""


class Explorer:
    """All states of one model."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        store = Store(rules, bounds)
        self._store = store
        self._working, self._asking = Working(store), Asking(store)
        self._shared: Numbers[Shared] = Numbers()
        self._workers: Numbers[Worker] = Numbers()
        self._clients: Numbers[Client] = Numbers()
        self._effects: Numbers[Effect] = Numbers()
        self._effects.of(NOTHING)
        self._worker_ways: dict[int, _Ways] = {}
        self._client_ways: dict[int, _Ways] = {}
        self._own_ways: dict[int, _Ways] = {}
        self._seen: dict[int, int] = {}
        self._ticks: dict[int, int] = {}

    def steps(self) -> set[str]:
        """Every step that somebody could take anywhere, in words: to see that what was explored had something in it."""
        entries = (*self._worker_ways.values(), *self._client_ways.values(), *self._own_ways.values())
        return {way[-1] for ways, _ in entries for way in ways}

    # --- what may come next

    def _ways_of_worker(self, pair: int) -> _Ways:
        shared, worker = self._shared.values[pair >> _BITS], self._workers.values[pair & _MASK]
        moves = self._working.moves(shared, worker)
        found = [self._way(move, self._workers.of(move.part)) for move in moves if isinstance(move.part, Worker)]
        entry = self._worker_ways[pair] = (found, wrong_with(self.bounds, shared, worker))
        return entry

    def _ways_of_client(self, pair: int) -> _Ways:
        shared, client = self._shared.values[pair >> _BITS], self._clients.values[pair & _MASK]
        moves = self._asking.moves(shared, client)
        found = [self._way(move, self._clients.of(move.part)) for move in moves if isinstance(move.part, Client)]
        entry = self._client_ways[pair] = (found, "")
        return entry

    def _ways_of_store(self, number: int) -> _Ways:
        """An instant passes; what was kept for its time is purged."""
        shared = self._shared.values[number]
        body = shared.body
        later = shared._replace(
            body=None if body is None else body._replace(wake=max(0, body.wake - 1)),
            entry=None if shared.entry is None else max(0, shared.entry - 1),
        )
        nobody = self._workers.values[0]
        found = [self._way(Move("an instant passes", later, nobody, TICK), 0)]
        purged = self._store.purge(shared)
        if purged is not None:
            found.append(self._way(Move("what was kept long enough is purged", purged, nobody), 0))
        entry = self._own_ways[number] = (found, _wrong_with(shared))
        return entry

    def _way(self, move: Move, part: int) -> _Way:
        shared, effect = self._shared.of(move.shared), self._effects.of(move.effect)
        return shared, part, effect, move.helps, move.goal, move.broken, move.told

    def _after(self, worker: int, effect: int) -> int:
        """The worker after somebody else's step."""
        pair = effect << _BITS | worker
        seen = self._seen.get(pair)
        if seen is None:
            after = seen_by(self._effects.values[effect], self._workers.values[worker], self.rules)
            seen = self._seen[pair] = self._workers.of(after)
        return seen

    # --- every state

    def explore(self) -> Found:
        """Visits all states, or as far as the first in which something is broken."""
        began = time.process_time()
        start = self._start()
        numbers = {_key(start): 0}
        order = [_key(start)]
        before, onward, ticks = array("I", [0]), array("I"), bytearray()
        transitions, depth, at, level_ends = 0, 0, 0, 1
        while at < len(order):
            if at == level_ends:
                depth, level_ends = depth + 1, len(order)
            state = order[at]
            best, rank = _STUCK, 3
            if not self._shared.values[state >> 4 * _BITS].live:
                best, rank = _GOAL, 0
            wrong, ways = self._next(state)
            if wrong:
                return self._broken(wrong, order, before, at, None, transitions, depth, began)
            transitions += len(ways)
            for key, rated, broken in ways:
                number = numbers.get(key)
                if number is None:
                    number = numbers[key] = len(order)
                    order.append(key)
                    before.append(at)
                if broken:
                    return self._broken(broken, order, before, at, key, transitions, depth, began)
                if rated < rank:
                    best, rank = (number if rated else _GOAL), rated
            onward.append(best)
            ticks.append(rank == _TICKS)
            at += 1
        lateness, stuck = self._lateness(order, onward, ticks)
        if stuck is not None:
            late = "P2: an acknowledged task is stuck" if lateness is None else "P8: a task is later than it may be"
            found = self._broken(late, order, before, stuck, None, transitions, depth, began)
            return found._replace(trace=(*found.trace, *self._stuck(order, onward, stuck)))
        return Found(len(order), transitions, depth, time.process_time() - began, lateness or 0)

    def _start(self) -> _Named:
        workers = [self._workers.of(fresh_worker(self.rules, self.bounds)) for _ in range(2)]
        clients = [self._clients.of(Client(left)) for left in self.bounds.verbs]
        return self._shared.of(Shared()), workers[0], workers[1], clients[0], clients[1]

    def _next(self, state: int) -> tuple[str, list[tuple[int, int, str]]]:
        """What is wrong with a state, and the states that may follow: how each helps, and what the way there breaks."""
        shared, one, two, first, second = _parts(state)
        found: list[tuple[int, int, str]] = []
        add, seen, after = found.append, self._seen, self._after
        own, wrong = self._own_ways.get(shared) or self._ways_of_store(shared)
        clients = (first << _BITS | second) if first <= second else (second << _BITS | first)
        worker_ways = self._worker_ways
        for mine, other in ((one, two), (two, one)):
            pair = shared << _BITS | mine
            ways, broken = worker_ways.get(pair) or self._ways_of_worker(pair)
            wrong = wrong or broken
            for to, part, effect, helps, goal, breaks, _ in ways:
                theirs = other
                if effect:
                    theirs = seen.get(effect << _BITS | other, -1)
                    if theirs < 0:
                        theirs = after(other, effect)
                workers = (part << _BITS | theirs) if part <= theirs else (theirs << _BITS | part)
                rated = (0 if goal else 1) if helps else _NO_HELP
                add((((to << 2 * _BITS | workers) << 2 * _BITS) | clients, rated, breaks))
            if one == two:
                break
        for mine, other in ((first, second), (second, first)):
            pair = shared << _BITS | mine
            ways, _ = self._client_ways.get(pair) or self._ways_of_client(pair)
            for to, part, effect, helps, _, breaks, _ in ways:
                workers = one << _BITS | two
                if effect:
                    left, right = seen.get(effect << _BITS | one, -1), seen.get(effect << _BITS | two, -1)
                    if left < 0 or right < 0:
                        left, right = after(one, effect), after(two, effect)
                    workers = (left << _BITS | right) if left <= right else (right << _BITS | left)
                both = (part << _BITS | other) if part <= other else (other << _BITS | part)
                add((((to << 2 * _BITS | workers) << 2 * _BITS) | both, 1 if helps else _NO_HELP, breaks))
            if first == second:
                break
        for to, _, effect, _, _, breaks, _ in own:
            left, right = (after(one, effect), after(two, effect)) if effect else (one, two)
            workers = (left << _BITS | right) if left <= right else (right << _BITS | left)
            add((((to << 2 * _BITS | workers) << 2 * _BITS) | clients, _TICKS if effect else _NO_HELP, breaks))
        return wrong, found

    def _lateness(self, order: list[int], onward: array[int], ticks: bytearray) -> tuple[int | None, int | None]:
        """The most instants by which a wake is missed; and a state from which the goal is missed, or is too late."""
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

    def _broken(
        self, wrong: str, order: list[int], before: array[int], at: int, then: int | None, transitions: int,
        depth: int, began: float,
    ) -> Found:  # fmt: skip
        keys = [] if then is None else [then]
        while at:
            keys.append(order[at])
            at = before[at]
        trace = self._told(keys[::-1], wrong if then is not None else "")
        return Found(len(order), transitions, depth, time.process_time() - began, 0, wrong, (*trace, wrong))

    def _stuck(self, order: list[int], onward: array[int], at: int) -> Iterator[str]:
        yield "from here, if nothing goes wrong any more:"
        seen: set[int] = set()
        state = _parts(order[at])
        while at not in seen and at < _STUCK:
            seen.add(at)
            at = onward[at]
            if at < _STUCK:
                told, state = self._step(state, order[at], "")
                yield told
        yield "and so on for ever"

    def _told(self, keys: list[int], broken: str) -> list[str]:
        """The way through these states in words. The last step breaks `broken`, if that is not empty."""
        told, state = [], self._start()
        for place, key in enumerate(keys):
            words, state = self._step(state, key, broken if place == len(keys) - 1 else "")
            told.append(words)
        return told

    def _step(self, state: _Named, key: int, broken: str) -> tuple[str, _Named]:
        """The step from `state`, in which everybody has a place of his own, to the state `key`."""
        shared, one, two, first, second = state
        for name, mine, other in (("worker A", one, two), ("worker B", two, one)):
            for to, part, effect, _, _, breaks, told in self._ways_of_worker(shared << _BITS | mine)[0]:
                theirs = self._after(other, effect)
                new = (to, part, theirs, first, second) if name == "worker A" else (to, theirs, part, first, second)
                if _key(new) == key and (not broken or breaks == broken):
                    return self._words(told.format(me=name), new), new
        left, right = 0, 0
        for name, mine, other in (("client 1", first, second), ("client 2", second, first)):
            for to, part, effect, _, _, breaks, told in self._ways_of_client(shared << _BITS | mine)[0]:
                left, right = self._after(one, effect), self._after(two, effect)
                new = (to, left, right, part, other) if name == "client 1" else (to, left, right, other, part)
                if _key(new) == key and (not broken or breaks == broken):
                    return self._words(told.format(me=name), new), new
        for to, _, effect, _, _, _, told in self._ways_of_store(shared)[0]:
            new = (to, self._after(one, effect), self._after(two, effect), first, second)
            if _key(new) == key:
                return self._words(told, new), new
        raise AssertionError("no step leads from this state to the next one of its trace")

    def _words(self, told: str, state: _Named) -> str:
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


def _key(state: _Named) -> int:
    """A state as one number, the same for all that differ in who is who."""
    shared, one, two, first, second = state
    if one > two:
        one, two = two, one
    if first > second:
        first, second = second, first
    return (((shared << _BITS | one) << _BITS | two) << _BITS | first) << _BITS | second


def _parts(key: int) -> _Named:
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
