"""S12: the earliest task on top, and a thread that sleeps exactly until it is due."""

from __future__ import annotations

from bide.timers import HeapTimer
from bide_lab.strategies.timers.in_process import InMemory
from bide_lab.strategy import GONE, Flaw, held_up


class HeapWait(InMemory):
    """A heap in one process, and a thread that blocks until its head is due."""

    name = "S12"
    title = "min-heap and a blocking wait"
    shows = ("steady", "idle", "cost")
    flaws = (GONE, Flaw("one slow task holds up all others, in the one thread that there is", "slow", held_up))
    kind_of_timer = HeapTimer
