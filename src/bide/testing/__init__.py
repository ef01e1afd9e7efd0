"""Test tools for users and store authors: the suites, a manual clock, virtual time, faults, the pytest plugin.

Names for tests of programs can be imported from here. They are loaded on first use, since pytest imports this package
in every project in which bide is installed. The suites need pytest or Hypothesis and are separate modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bide.testing.clock import ManualClock
    from bide.testing.faults import FaultyStore
    from bide.testing.proxy import Act, Chunk, FaultProxy, PlannedFault
    from bide.testing.tasks import task_for
    from bide.testing.time_machine import Fired, TimeMachine
    from bide.testing.virtual import VirtualClock, VirtualLoop, run_virtual

_NAMES = {
    "clock": ("ManualClock",),
    "faults": ("FaultyStore",),
    "proxy": ("Act", "Chunk", "FaultProxy", "PlannedFault"),
    "tasks": ("task_for",),
    "time_machine": ("Fired", "TimeMachine"),
    "virtual": ("VirtualClock", "VirtualLoop", "run_virtual"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Act", "Chunk", "FaultProxy", "FaultyStore", "Fired", "ManualClock", "PlannedFault", "TimeMachine", "VirtualClock",
    "VirtualLoop", "run_virtual", "task_for",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
