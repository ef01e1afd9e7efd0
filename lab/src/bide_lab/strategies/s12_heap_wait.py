"""Heap and blocking wait: the earliest task on top, and a thread that sleeps exactly until it is due.

**Idea.** A heap (or a red-black tree) holds all tasks by due time. One thread waits on a condition variable, or in
epoll, until the head is due; whoever adds an earlier one wakes it, and it looks at the new head.

**Origin.** Williams' heap of 1964; what most event loops, Java's DelayQueue, nginx (with a tree) and cron daemons have
inside. Here it is bide's HeapTimer and its drive, in a thread.

**Cost.** O(log n) to add and to take out, in memory that a cancelled task keeps until it comes to the top or the dead
are swept. Nothing at all is asked while nothing is due: no period, so no trade of lateness against idle work.

**Flaw.** It is one process's memory: a restart forgets what waits, a second process knows nothing of it. Effects done
in the waiting thread make each other wait.

**Right when.** What waits need not outlive the process: time-outs, caches, debounced saves; or as the sleeper in front
of a store that keeps the tasks.

**To bide.** Schedule with bide where `add` is called now, with a key; `cancel` and `reschedule` by that key replace the
handle that the heap gave. The drive inside bide's worker is this same one, with the store as its heap.

                     09:30                head     thread: wait(head - now) ........ do it, next head
                    /     \\                          ^
               09:40       10:15                     |
               /   \\                                 | notify, if the new one is the head
            11:00  09:55 <------- add ---------------+
"""

from __future__ import annotations

from typing import Any

from bide.core.instants import Millis
from bide.timers import HeapTimer
from bide_lab.servers.memory import GONE, InMemory, held_up
from bide_lab.strategy import Flaw


class HeapWait(InMemory):
    """A heap in one process, and a thread that blocks until its head is due."""

    name = "S12"
    title = "min-heap and a blocking wait"
    shows = ("steady", "idle", "cost")
    flaws = (GONE, Flaw("one slow task holds up all others, in the one thread that there is", "slow", held_up))

    def timer_of(self, start: Millis) -> HeapTimer[Any]:
        return HeapTimer(start=start)
