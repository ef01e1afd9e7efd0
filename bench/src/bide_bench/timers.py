"""The workload `timers`: bide's timers against `loop.call_at`, as pure data structures in one process.

Each structure is filled to a size with items due at random times within an hour. Then the four take turns: in each
round a thousand items are inserted and cancelled again, and time moves on until a thousand have come due. Figures are
nanoseconds per item, medians over the rounds, with the garbage collector off, as in `timeit`. asyncio's timers run on a
loop whose clock is set by hand, so that only their own work is measured.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from bide.core.errors import BadInput
from bide.ports import Timer
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel
from bide_bench.plan import Limit, Plan, Report, rounded, uncollected
from bide_bench.target import HOUR

_ROUNDS = 15
_MOST_PER_ROUND = 1000
OPERATIONS = ("insert", "cancel", "advance")


class Contestant(Protocol):
    """One structure under test. `times` are milliseconds, `items` their names."""

    def insert(self, items: Sequence[int], times: Sequence[int]) -> None: ...
    def cancel(self, items: Sequence[int]) -> None: ...
    def advance(self, now: int) -> int: ...


class BideTimer:
    """A timer of bide."""

    def __init__(self, timer: Timer[int]) -> None:
        self._timer = timer

    def insert(self, items: Sequence[int], times: Sequence[int]) -> None:
        add = self._timer.add
        for item, at in zip(items, times, strict=True):
            add(item, at)

    def cancel(self, items: Sequence[int]) -> None:
        cancel = self._timer.cancel
        for item in items:
            cancel(item)

    def advance(self, now: int) -> int:
        return len(self._timer.advance(now))


class _LoopByHand(asyncio.SelectorEventLoop):
    """asyncio's event loop with a clock that is set by hand."""

    hand = 0.0

    def time(self) -> float:
        return self.hand


class CallAt:
    """`loop.call_at`, with the handles kept by name, as cancelling by name requires."""

    def __init__(self) -> None:
        self._loop = _LoopByHand()
        self._handles: dict[int, asyncio.TimerHandle] = {}
        self._fired = 0

    def insert(self, items: Sequence[int], times: Sequence[int]) -> None:
        call_at, handles, fire = self._loop.call_at, self._handles, self._fire
        for item, at in zip(items, times, strict=True):
            handles[item] = call_at(at / 1000, fire, item)

    def cancel(self, items: Sequence[int]) -> None:
        pop = self._handles.pop
        for item in items:
            pop(item).cancel()

    def advance(self, now: int) -> int:
        self._fired = 0
        self._loop.hand = now / 1000 + 0.0005  # between two milliseconds, so that no rounding makes it too small
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        return self._fired

    def close(self) -> None:
        self._handles.clear()
        self._loop.close()

    def _fire(self, item: int) -> None:
        del self._handles[item]
        self._fired += 1


async def timers(plan: Plan, limit: Limit) -> Report:
    """At 10^3, 10^4, 10^5 and 10^6 (or up to N) items."""
    sizes = plan.sizes()
    if sizes[-1] < 2:
        raise BadInput("--n", sizes[-1], "2 items at least: one to warm up, and one to measure")
    nanoseconds: dict[str, dict[str, dict[str, float]]] = {}
    faults: list[str] = []
    for number, size in enumerate(sizes):
        plan.progress("timers", number, len(sizes))
        # in a thread, since one loop cannot run inside another
        found, wrong = await asyncio.to_thread(_at_size, size)
        faults += wrong
        for (name, operation), cost in found.items():
            nanoseconds.setdefault(name, {}).setdefault(operation, {})[str(size)] = cost
    return Report(fields={"ns": nanoseconds}, faults=faults)


def _at_size(size: int) -> tuple[dict[tuple[str, str], float], list[str]]:
    """The nanoseconds of each structure and operation, and the faults."""
    by_call_at = CallAt()
    contestants: dict[str, Contestant] = {
        "heap": BideTimer(HeapTimer[int]()),
        "hashed": BideTimer(HashedWheel[int]()),
        "hierarchical": BideTimer(HierarchicalWheel[int]()),
        "call_at": by_call_at,
    }
    taken = {(name, operation): list[float]() for name in contestants for operation in OPERATIONS}
    source = random.Random(size)
    batch = min(_MOST_PER_ROUND, size)
    now, faults = 0, []
    first_times = [source.randrange(1, HOUR) for _ in range(size)]
    for contestant in contestants.values():
        contestant.advance(0)
        contestant.insert(range(size), first_times)
    ordered = sorted(first_times)
    gc.freeze()
    try:
        with uncollected():
            # one round to warm up; a quarter of what is there comes due at most
            step = min(batch, max(1, size // 4 // (_ROUNDS + 1)))
            for number in range(min(_ROUNDS + 1, size)):
                items = list(range(size + number * batch, size + (number + 1) * batch))  # the same objects for all
                times = [now + source.randrange(1, HOUR) for _ in items]
                before, now = now, ordered[(number + 1) * step - 1]
                due = sum(1 for at in ordered[number * step : (number + 2) * step + 1000] if before < at <= now)
                shuffled = source.sample(items, batch)
                for name, contestant in contestants.items():
                    spent, fired = timed_round(contestant, items, times, shuffled, now)
                    if fired != due:
                        faults.append(f"{name} at {size}: {fired} items came due instead of {due}")
                    if number and due:
                        for operation, nanoseconds, count in zip(OPERATIONS, spent, (batch, batch, due), strict=True):
                            taken[name, operation].append(nanoseconds / count)
    finally:
        by_call_at.close()
        gc.unfreeze()
    return {which: rounded(median(costs)) for which, costs in taken.items()}, faults


def timed_round(
    contestant: Contestant, items: Sequence[int], times: Sequence[int], shuffled: Sequence[int], now: int
) -> tuple[tuple[int, int, int], int]:
    """Nanoseconds of each of OPERATIONS: the inserts, the cancels of the same, the advance; and how many came due."""
    zero = time.perf_counter_ns()
    contestant.insert(items, times)
    one = time.perf_counter_ns()
    contestant.cancel(shuffled)
    two = time.perf_counter_ns()
    fired = contestant.advance(now)
    return (one - zero, two - one, time.perf_counter_ns() - two), fired
