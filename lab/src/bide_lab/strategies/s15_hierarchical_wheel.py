"""Hierarchical wheel: near times in fine buckets, far times in coarse ones that are filed again when they begin.

**Idea.** Hours, minutes, seconds: a task far off is filed under its hour; when the hour begins its tasks are filed by
minute, and so on down to the tick. Only buckets that hold something are visited, so that idle time costs nothing.

**Origin.** Varghese and Lauck, 1987, scheme 7; Linux until 4.8, Kafka's purgatory (20 slots a level, and a heap of
buckets), tokio. Here it is bide's HierarchicalWheel: base 256 on the millisecond, buckets in use as bits of a number.

**Cost.** O(1) to add and to cancel however many wait; each task is filed again at most once a level. No laps, so
nothing is visited before its time.

**Flaw.** A coarse bucket that begins is filed again in one go, and meanwhile nothing fires. And it is memory: a restart
forgets all.

**Right when.** Very many time-outs in one process, most of which are cancelled, from milliseconds to days.

**To bide.** As from a heap: bide where `add` is, a key where the handle was. A wheel in front of a table, filled with
the next hour's rows, becomes unnecessary: bide's worker sleeps on the store's index.

          hours    [ . . . . # . . ]      # begins: its tasks are filed by minute
                           |
          minutes  [ . . # . . # . ]      and by second when the minute begins
                         |
          seconds  [ . # . . . # # ]      fires from here alone
"""

from __future__ import annotations

from typing import Any

from bide.core.instants import Millis
from bide.timers import HierarchicalWheel
from bide_lab.journal import Figures
from bide_lab.servers.memory import GONE, InMemory
from bide_lab.strategy import Flaw

_PAUSE = 200_000
"""Nanoseconds in one go that are worth a word: a fifth of the millisecond that it promises."""


def _filed_again(seen: Figures) -> str:
    pauses = {int(size): spent for size, spent in seen.curve.get("pause_ns", {}).items()}
    most = max(pauses, default=0)
    if not most or pauses[most] < _PAUSE:
        return ""
    return f"with {most:,} waiting one step of a millisecond takes {pauses[most] / 1e6:,.1f} ms"


class HierarchicalWheels(InMemory):
    """Wheels of 256 buckets, each bucket of which is one whole turn of the finer wheel."""

    name = "S15"
    title = "hierarchical wheel"
    flaws = (
        GONE,
        Flaw("a coarse bucket that begins is filed again in one go, and holds up what is due", "cost", _filed_again),
    )

    def timer_of(self, start: Millis) -> HierarchicalWheel[Any]:
        return HierarchicalWheel(start=start)
