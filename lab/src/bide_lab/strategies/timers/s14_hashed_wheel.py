"""S14: the ring as a library has it, with ticks of 100 ms, bucket lists, and a limit to what may wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from bide.core.instants import Millis
from bide.timers import HashedWheel
from bide_lab.strategies.timers.in_process import VISITED, GoingRound, InMemory, Laps, Thing
from bide_lab.strategy import GONE, Flaw, Harm, Item, when

TICK: Millis = 100
BUCKETS = 512
_FILED_PER_TICK = 100_000


@dataclass(slots=True, eq=False)
class Timeout(Generic[Thing]):
    """An entry. `bucket` is None until it is filed."""

    item: Thing
    at: Millis
    rounds: int = 0
    bucket: dict[Timeout[Thing], None] | None = None


class TickingWheel(Laps[Thing]):
    """Netty's algorithm. Never early, up to a tick late; `advance` alone touches the buckets."""

    def __init__(self, *, tick: Millis = TICK, buckets: int = BUCKETS, start: Millis = 0) -> None:
        super().__init__()
        self._tick = tick
        self._start = start
        self._ticks = 0
        self._buckets: list[dict[Timeout[Thing], None]] = [{} for _ in range(buckets)]
        self._added: deque[Timeout[Thing]] = deque()
        self._cancelled: deque[Timeout[Thing]] = deque()

    def add(self, item: Thing, at: Millis) -> None:
        self.cancel(item)
        timeout = self.waiting[item] = Timeout(item, at)
        self._added.append(timeout)

    def cancel(self, item: Thing) -> bool:
        timeout = self.waiting.pop(item, None)
        if timeout is None:
            return False
        self._cancelled.append(timeout)
        return True

    def advance(self, now: Millis) -> list[Thing]:
        """Make the ticks that are over."""
        due: list[Thing] = []
        while self.next_deadline() <= now:
            self._unlink()
            self._file()
            self._expire(due)
            self._ticks += 1
        return due

    def _unlink(self) -> None:
        while self._cancelled:
            timeout = self._cancelled.popleft()
            if timeout.bucket is not None:
                timeout.bucket.pop(timeout, None)

    def _file(self) -> None:
        for _ in range(min(len(self._added), _FILED_PER_TICK)):
            timeout = self._added.popleft()
            if self.waiting.get(timeout.item) is not timeout:
                continue
            at_tick = (timeout.at - self._start) // self._tick
            timeout.rounds = (at_tick - self._ticks) // len(self._buckets)
            timeout.bucket = self._buckets[max(at_tick, self._ticks) % len(self._buckets)]
            timeout.bucket[timeout] = None

    def _expire(self, due: list[Thing]) -> None:
        bucket = self._buckets[self._ticks % len(self._buckets)]
        over = []
        for timeout in bucket:
            if timeout.rounds > 0:
                timeout.rounds -= 1
            else:
                over.append(timeout)
        self.visited(len(bucket), len(over))
        for timeout in over:
            del bucket[timeout]
            del self.waiting[timeout.item]
            due.append(timeout.item)

    def next_deadline(self) -> Millis:
        """The end of the tick, whether or not there is anything in it."""
        return self._start + (self._ticks + 1) * self._tick


class Ticking(GoingRound):
    """Netty's form. Options: `lap`, seconds of strategy time instead of 512 ticks; `pending`, the most that may wait
    (without it there is no limit, as in Netty)."""

    name = "S14-A"
    title = "hashed wheel that ticks, as in Netty"
    period = TICK / 1000
    shows = ("cost",)
    flaws = (
        Flaw(
            "every task waits for the end of its tick", "steady",
            when("p50", f"half of them more than {{p50:.0f}} ms late, at ticks of {TICK} ms", over=TICK / 4), Harm.LATE,
        ),
        VISITED,
        GONE,
    )  # fmt: skip

    def timer_of(self, start: Millis) -> TickingWheel[Any]:
        lap = self.setting.options.get("lap")
        buckets = BUCKETS if lap is None else max(1, round(self.setting.span(lap) * 1000 / TICK))
        return TickingWheel(buckets=buckets, start=start)

    async def schedule(self, items: Sequence[Item]) -> None:
        if len(self.timer) + len(items) > self.setting.options.get("pending", math.inf):
            raise RuntimeError(f"{len(self.timer)} tasks are waiting, and no more may")
        await super().schedule(items)


class Exact(InMemory):
    """bide's wheel: slots of 128 ms, exact to the millisecond, and asleep while nothing is near."""

    name = "S14-B"
    title = "hashed wheel that sleeps, bide's"
    flaws = ()
    kind_of_timer = HashedWheel
