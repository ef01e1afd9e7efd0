"""Timers for one process: four pure data structures that return the items due now, and a drive that runs them."""

from bide.ports import SystemClock
from bide.timers.drive import Drive, IdleDrive, SteadyClock, drive
from bide.timers.hashed import HashedWheel
from bide.timers.heap import HeapTimer
from bide.timers.hierarchical import HierarchicalWheel
from bide.timers.idle import IdleRing

__all__ = [
    "Drive", "HashedWheel", "HeapTimer", "HierarchicalWheel", "IdleDrive", "IdleRing", "SteadyClock", "SystemClock",
    "drive",
]  # fmt: skip
