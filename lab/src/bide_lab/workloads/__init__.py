"""The workloads: what is asked of a strategy, and what is done to it meanwhile. One file for each family of them."""

from __future__ import annotations

from collections.abc import Mapping

from bide_lab.workload import Workload
from bide_lab.workloads import faults, load, memory, recurrence, waiting

_EVERY = (
    load.steady, load.burst, load.horizon, load.churn, waiting.idle, waiting.verbs, waiting.trips, faults.killed,
    faults.cut, faults.two, faults.away, faults.restarted, faults.failover, faults.beyond, faults.deaf, load.gap,
    load.slow, load.many, load.uneven, load.relay, load.head, faults.writer, load.crowd, memory.cost, memory.laps,
    memory.touch, recurrence.recurrence,
)  # fmt: skip
WORKLOADS: Mapping[str, Workload] = {one.name: one for one in _EVERY}
"""By name, in the order in which they are run and reported."""
